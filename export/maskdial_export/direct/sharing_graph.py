"""Writes what Gemma 4 has beside other decoders: attention whose layers may share keys and values,
and the inputs of layers.

Norms and rotations are operators; a trace has transformers' own arithmetic, of which the last bits
are others.
"""

from collections.abc import Callable

import numpy as np

from maskdial_export.direct.decoder import Decoder, Rotary, SharingAttends
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.streams import LayerInputs

_Tables = Callable[[Rotary], tuple[str, str]]


class SharingWriter:
    """Writes queries, keys and values of one layer after the other."""

    def __init__(
        self,
        decoder: Decoder,
        products: Products,
        nodes: Nodes,
        vector: Callable[..., str],
        tables: _Tables,
    ) -> None:
        """``vector`` writes a vector of the checkpoint by its name, ``tables`` those that turn."""
        self._decoder = decoder
        self._products = products
        self._nodes = nodes
        self._vector = vector
        self._tables = tables
        self._pairs: list[tuple[str, str]] = []

    def queries(self, layer: str, kind: SharingAttends, source: str) -> tuple[str, str, str]:
        """Queries, keys and values, normalized and turned; (batch, length, columns) each."""
        attention = f"{layer}.self_attn"
        heads = self._decoder.num_heads
        query = self._project(source, f"{attention}.q_proj")
        query = self._turned(self._normed(query, kind, f"{attention}.q_norm"), kind, heads)
        if kind.source is not None:
            self._pairs.append(self._pairs[kind.source])
            return query, *self._pairs[-1]
        key = value = self._project(source, f"{attention}.k_proj")
        if kind.has_values:
            value = self._project(source, f"{attention}.v_proj")
        key = self._turned(self._normed(key, kind, f"{attention}.k_norm"), kind, kind.num_kv_heads)
        self._pairs.append((key, self._normed(value, kind, None)))
        return query, *self._pairs[-1]

    def layer_inputs(self, inputs: LayerInputs, embedded: str) -> str:
        """The inputs of all layers, (batch, length, num_layers, size)."""
        decoder, nodes = self._decoder, self._nodes
        rows = self._products.look_up(inputs.table, self._ids(inputs))
        root = nodes.number("layer_inputs.scale", inputs.size**0.5)
        rows = self._nodes.split_heads(nodes.add("Mul", [rows, root]), inputs.size)
        others = self._products.project(embedded, [inputs.projection])
        root = nodes.number("layer_inputs.projection_scale", decoder.hidden_size**-0.5)
        others = self._nodes.split_heads(nodes.add("Mul", [others, root]), inputs.size)
        others = self._norm(others, self._vector(f"{inputs.norm}.weight"))
        both = nodes.add("Add", [others, rows])
        return nodes.add("Mul", [both, nodes.number("layer_inputs.share", 2**-0.5)])

    def _ids(self, inputs: LayerInputs) -> str | None:
        """The tokens' rows of the table: the first one for those that it has none for."""
        nodes, rows = self._nodes, inputs.vocab_size
        if rows >= self._decoder.vocab_size:
            return None
        known = nodes.add(
            "Less", ["input_ids", nodes.constant("layer_inputs.rows", np.array(rows))]
        )
        zero = nodes.constant("integer.0", np.array(0))
        return nodes.add("Where", [known, "input_ids", zero], output="layer_inputs.ids")

    def input_of(self, inputs: str, index: int) -> str:
        """The input of one layer."""
        place = self._nodes.constant(f"layer_inputs.{index}", np.array(index))
        return self._nodes.add("Gather", [inputs, place], axis=2)

    def routed(self, layer: str, stream: str, scale: str) -> str:
        """What a router reads of the stream."""
        nodes, width = self._nodes, self._decoder.hidden_size
        normed = self._norm(stream, self._ones(width))
        scaled = nodes.add("Mul", [normed, self._vector(f"{layer}.{scale}")])
        return nodes.add("Mul", [scaled, nodes.number("router.root", width**-0.5)])

    def _project(self, source: str, module: str) -> str:
        product = self._products.project(source, [module])
        if self._decoder.biases.query_key_value:
            product = self._nodes.add("Add", [product, self._vector(f"{module}.bias")])
        return product

    def _normed(self, source: str, kind: SharingAttends, norm: str | None) -> str:
        """Each head by itself; without a name the norm has no weight."""
        size = kind.head_dim
        weight = self._ones(size) if norm is None else self._vector(f"{norm}.weight")
        return self._nodes.join_heads(self._norm(self._nodes.split_heads(source, size), weight))

    def _turned(self, source: str, kind: SharingAttends, num_heads: int) -> str:
        assert kind.rotary is not None, "all layers have positions"
        inputs = [source, self._places(), *self._looked_up(kind.rotary)]
        return self._nodes.add("RotaryEmbedding", inputs, num_heads=num_heads)

    def _places(self) -> str:
        """A number for each token of a pass, by which it finds its cosines, (batch, length)."""
        nodes = self._nodes
        zero, one = (nodes.constant(f"integer.{each}", np.array(each)) for each in (0, 1))
        count = nodes.once("Size", ["position_ids"], "places.count")
        listed = nodes.once("Range", [zero, count, one], "places.listed")
        shape = nodes.once("Shape", ["position_ids"], "places.shape")
        return nodes.once("Reshape", [listed, shape], "places", allowzero=1)

    def _looked_up(self, rotary: Rotary) -> tuple[str, str]:
        """Cosines and sines of the tokens of a pass, one below the other.

        The operator refuses passes that are longer than its tables have rows. Pairs that do not
        turn have no columns in the file.
        """
        names, nodes = self._tables(rotary), self._nodes
        still = len(rotary.frequencies) - rotary.num_turning
        pads = nodes.constant(f"turning.{still}", np.array([0, 0, 0, still]))
        flat = nodes.constant("minus_one", np.array([-1]))
        places = nodes.once("Reshape", ["position_ids", flat], "places.flat", allowzero=0)
        found = []
        for name, value in zip(names, (1.0, 0.0), strict=True):
            rows = f"{name}.rows"
            if not still:
                found.append(nodes.once("Gather", [name, places], rows, axis=0))
                continue
            turning = nodes.once("Gather", [name, places], f"{name}.turning", axis=0)
            inputs = [turning, pads, nodes.number(f"still.{value:.0f}", value)]
            found.append(nodes.once("Pad", inputs, rows))
        return found[0], found[1]

    def _norm(self, source: str, weight: str) -> str:
        inputs, epsilon = [source, weight], self._decoder.epsilon
        return self._nodes.add(
            "SimplifiedLayerNormalization", inputs, axis=-1, epsilon=epsilon, stash_type=1
        )

    def _ones(self, size: int) -> str:
        return self._nodes.constant(f"ones.{size}", np.ones(size, np.float32))
