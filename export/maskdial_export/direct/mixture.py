"""Writes a mixture of experts: each expert computes the tokens that chose it, and no others.

A token's results are added in the experts' order, so its bits do not depend on its batch. The
operators are those of `maskdial_export.tracing.experts`.
"""

import numpy as np

from maskdial_export.direct.decoder import Experts
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products


class MixtureWriter:
    """Writes the experts of one layer after the other."""

    def __init__(
        self, experts: Experts, hidden_size: int, products: Products, nodes: Nodes
    ) -> None:
        self._experts = experts
        self._products = products
        self._nodes = nodes
        self._hidden_size = hidden_size

    def write(self, layer: str, source: str, full_shape: str) -> str:
        """What a layer adds to the stream; (batch, length, hidden_size), as ``source``.

        ``full_shape``: the name of that shape.
        """
        experts, nodes = self._experts, self._nodes
        flat = nodes.constant("flat", np.array([-1, self._hidden_size]))
        tokens = nodes.add("Reshape", [source, flat], allowzero=1)
        shares = self._shares(layer, tokens)
        shape = nodes.add("Shape", [tokens], start=0)
        total = nodes.add("Expand", [nodes.number("zero", 0.0), shape])
        for expert in range(experts.count):
            total = self._add_expert(total, f"{layer}.mlp.experts", expert, tokens, shares)
        if experts.shared_width is not None:
            name = f"{layer}.mlp.shared_expert"
            common = self._mlp(tokens, name)
            gate = self._products.project_vectors(tokens, f"{name}_gate", None)
            gated = nodes.add("Mul", [nodes.add("Sigmoid", [gate]), common])
            total = nodes.add("Add", [total, gated])
        return nodes.add("Reshape", [total, full_shape], allowzero=1)

    def _shares(self, layer: str, tokens: str) -> str:
        """The experts' weights for the tokens, (num_experts, num_tokens); 0 if not chosen."""
        experts, nodes = self._experts, self._nodes
        scores = self._products.project_vectors(tokens, f"{layer}.mlp.gate", None)
        likely = nodes.add("Softmax", [scores], axis=-1)
        count = nodes.constant(f"experts.{experts.chosen}", np.array([experts.chosen]))
        best, chosen = f"{layer}.experts.shares", f"{layer}.experts.chosen"
        nodes.add_all("TopK", [likely, count], [best, chosen], axis=-1, largest=1, sorted=1)
        if experts.normalizes:
            axis = nodes.constant("minus_one", np.array([-1]))
            best = nodes.add("Div", [best, nodes.add("ReduceSum", [best, axis], keepdims=1)])
        shape = nodes.add("Shape", [likely], start=0)
        none = nodes.add("Expand", [nodes.number("zero", 0.0), shape])
        spread = nodes.add("ScatterElements", [none, chosen, best], axis=1, reduction="add")
        return nodes.add("Transpose", [spread], perm=[1, 0])

    def _add_expert(self, total: str, name: str, expert: int, tokens: str, shares: str) -> str:
        nodes = self._nodes
        index = nodes.constant(f"expert.{expert}", np.array(expert))
        share = nodes.add("Gather", [shares, index], axis=0)
        places = nodes.add("Transpose", [nodes.add("NonZero", [share])], perm=[1, 0])
        minus = nodes.constant("minus_one", np.array([-1]))
        rows = nodes.add("Reshape", [places, minus], allowzero=0)
        weight = nodes.add("Gather", [share, places], axis=0)
        hidden = nodes.add("Gather", [tokens, rows], axis=0)
        first, second = (f"{name}.products.{expert}.{part}" for part in (0, 1))
        both = self._products.project_vectors(hidden, first, None)
        gate, up = f"{first}.gate", f"{first}.up"
        nodes.add_all("Split", [both], [gate, up], axis=1, num_outputs=2)
        inner = nodes.add("Mul", [self._silu(gate), up])
        result = self._products.project_vectors(inner, second, None)
        weighted = nodes.add("Mul", [result, weight])
        return nodes.add("ScatterND", [total, places, weighted], reduction="add")

    def _mlp(self, source: str, name: str) -> str:
        project = self._products.project_vectors
        gate = self._silu(project(source, f"{name}.gate_proj", None))
        inner = self._nodes.add("Mul", [gate, project(source, f"{name}.up_proj", None)])
        return project(inner, f"{name}.down_proj", None)

    def _silu(self, source: str) -> str:
        return self._nodes.add("Mul", [source, self._nodes.add("Sigmoid", [source])])
