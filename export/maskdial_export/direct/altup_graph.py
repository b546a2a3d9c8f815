"""Writes the streams of Gemma 3n: layers compute one, the others are predicted and corrected.

Streams are one value, (batch, length, num_inputs, hidden_size).
"""

from collections.abc import Callable

import numpy as np

from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.streams import AltUp

_LEAST = 1e-5


class AltUpWriter:
    """Writes what happens before a layer, within it and after it."""

    def __init__(
        self,
        altup: AltUp,
        hidden_size: int,
        products: Products,
        nodes: Nodes,
        vector: Callable[..., str],
        norm: Callable[[str, str], str],
    ) -> None:
        """``vector`` writes a vector of the checkpoint by its name, ``norm`` a norm of a value."""
        self._altup = altup
        self._hidden_size = hidden_size
        self._products = products
        self._nodes = nodes
        self._vector = vector
        self._norm = norm

    def begin(self, embedded: str) -> str:
        """The streams of embeddings: these, and others as large."""
        names = [f"model.altup_projections.{each}" for each in range(self._altup.num_inputs - 1)]
        others = self._nodes.split_heads(self._products.project(embedded, names), self._hidden_size)
        first = self._nodes.add("Unsqueeze", [embedded, self._axis(2)])
        scaled = self._as_large(others, self._magnitude(first))
        return self._nodes.add("Concat", [first, scaled], axis=2)

    def end(self, streams: str) -> str:
        """Their mean, the others brought back to the size of the first."""
        nodes, first = self._nodes, self.active(streams)
        size, found = self._magnitude(first), [first]
        for index in range(1, self._altup.num_inputs):
            place = nodes.constant(f"stream.{index}", np.array(index))
            stream = nodes.add("Gather", [streams, place], axis=2)
            name = f"model.altup_unembed_projections.{index - 1}"
            found.append(self._as_large(self._products.project(stream, [name]), size))
        return nodes.add("Mean", found)

    def predict(self, layer: str, streams: str) -> str:
        """What is expected of them behind the layer."""
        nodes, count = self._nodes, self._altup.num_inputs
        modalities = self._modalities(layer, self.active(streams))
        coefficients = self._products.project(modalities, [f"{layer}.altup.prediction_coefs"])
        # A row for each stream that is predicted
        square = nodes.split_heads(coefficients, count)
        return nodes.add("Add", [nodes.add("MatMul", [square, streams]), streams])

    def correct(self, layer: str, predictions: str, computed: str) -> str:
        """Adds shares of how far the first one was from what the layer computed."""
        nodes = self._nodes
        modalities = self._modalities(layer, computed)
        coefficients = self._products.project(modalities, [f"{layer}.altup.correction_coefs"])
        shares = nodes.add("Add", [coefficients, nodes.number("one", 1.0)])
        missed = nodes.add("Sub", [computed, self.active(predictions)])
        parts = [
            nodes.add("Unsqueeze", [missed, self._axis(2)]),
            nodes.add("Unsqueeze", [shares, self._axis(3)]),
        ]
        return nodes.add("Add", [nodes.add("Mul", parts), predictions])

    def active(self, streams: str) -> str:
        """The first stream."""
        place = self._nodes.constant("stream.0", np.array(0))
        return self._nodes.add("Gather", [streams, place], axis=2)

    def scaled(self, layer: str, stream: str) -> str:
        """The corrected first one, as it is gated."""
        if not self._altup.scales_output:
            return stream
        scale = self._vector(f"{layer}.altup.correct_output_scale")
        return self._nodes.add("Mul", [stream, scale])

    def add_to_others(self, streams: str, added: str) -> str:
        """Adds to all but the first."""
        nodes, count = self._nodes, self._altup.num_inputs
        others = np.ones((count, 1), np.float32)
        others[0] = 0
        wide = nodes.add("Unsqueeze", [added, self._axis(2)])
        shares = nodes.add("Mul", [wide, nodes.constant("stream.others", others)])
        return nodes.add("Add", [streams, shares])

    def beside(self, layer: str, source: str) -> str:
        """A product of low rank, and what it reads."""
        left = self._products.project(source, [f"{layer}.laurel.linear_left"])
        right = self._products.project(left, [f"{layer}.laurel.linear_right"])
        normed = self._norm(right, f"{layer}.laurel.post_laurel_norm")
        return self._nodes.add("Add", [source, normed])

    def joined(self, attended: str, beside: str) -> str:
        """The stream and that product together."""
        nodes = self._nodes
        both = nodes.add("Add", [attended, beside])
        return nodes.add("Div", [both, nodes.number("root_of_two", 2**0.5)])

    def cut_off(self, gate: str, deviations: float) -> str:
        """What exceeds the mean by so many standard deviations; 0 for all else."""
        nodes, axis = self._nodes, self._axis(-1)
        mean = nodes.add("ReduceMean", [gate, axis], keepdims=1)
        centered = nodes.add("Sub", [gate, mean])
        square = nodes.add("Mul", [centered, centered])
        spread = nodes.add("Sqrt", [nodes.add("ReduceMean", [square, axis], keepdims=1)])
        most = nodes.add("Mul", [spread, nodes.number(f"deviations.{deviations}", deviations)])
        return nodes.add("Relu", [nodes.add("Sub", [centered, most])])

    def _modalities(self, layer: str, stream: str) -> str:
        nodes = self._nodes
        normed = self._norm(stream, f"{layer}.altup.router_norm")
        share = nodes.number("router.share", 1 / self._hidden_size)
        read = nodes.add("Mul", [normed, share])
        routed = self._products.project(read, [f"{layer}.altup.modality_router"])
        return nodes.add("Tanh", [routed])

    def _magnitude(self, value: str) -> str:
        """The root of the mean of squares."""
        nodes = self._nodes
        square = nodes.add("Mul", [value, value])
        return nodes.add("Sqrt", [nodes.add("ReduceMean", [square, self._axis(-1)], keepdims=1)])

    def _as_large(self, value: str, magnitude: str) -> str:
        nodes = self._nodes
        square = nodes.add("Mul", [value, value])
        mean = nodes.add("ReduceMean", [square, self._axis(-1)], keepdims=1)
        least = nodes.add("Max", [mean, nodes.number("magnitude.least", _LEAST)])
        product = nodes.add("Mul", [value, magnitude])
        return nodes.add("Div", [product, nodes.add("Sqrt", [least])])

    def _axis(self, value: int) -> str:
        return self._nodes.constant(f"axis.{value}", np.array([value]))
