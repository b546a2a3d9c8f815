"""Writes a mixture of experts: each expert computes the tokens that chose it, and no others.

A token's results are added in the experts' order, so its bits do not depend on its batch. The
operators are those of `maskdial_export.tracing.experts`.
"""

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from maskdial_export.direct.experts import Experts, Groups
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products


class MixtureWriter:
    """Writes the experts of one layer after the other."""

    def __init__(
        self,
        experts: Experts,
        hidden_size: int,
        products: Products,
        nodes: Nodes,
        vector: Callable[..., str],
    ) -> None:
        """``vector`` writes vectors of the checkpoint, one after the other, by their names."""
        self._experts = experts
        self._products = products
        self._nodes = nodes
        self._hidden_size = hidden_size
        self._vector = vector

    def write(self, layer: str, source: str, full_shape: str, routed: str | None = None) -> str:
        """What a layer adds to the stream; (batch, length, hidden_size), as ``source``.

        ``full_shape``: the name of that shape. ``routed``: what the router reads, if that is
        something else.
        """
        experts, nodes = self._experts, self._nodes
        flat = nodes.constant("flat", np.array([-1, self._hidden_size]))
        tokens = nodes.add("Reshape", [source, flat], allowzero=1)
        if routed is not None:
            routed = nodes.add("Reshape", [routed, flat], allowzero=1)
        shares = self._shares(layer, routed or tokens)
        shape = nodes.add("Shape", [tokens], start=0)
        total = nodes.add("Expand", [nodes.number("zero", 0.0), shape])
        for expert in range(experts.count):
            total = self._add_expert(total, layer, expert, tokens, shares)
        if experts.bias is not None:
            bias = self._vector(f"{experts.within(layer)}.{experts.bias}")
            total = nodes.add("Add", [total, bias])
        shared, module = experts.shared, experts.within(layer)
        if shared is not None and shared.gate is not None:
            common = self._mlp(tokens, f"{module}.{shared.module}", self._project)
            gate = self._project(tokens, f"{module}.{shared.gate}")
            gated = nodes.add("Mul", [nodes.add("Sigmoid", [gate]), common])
            total = nodes.add("Add", [total, gated])
        total = nodes.add("Reshape", [total, full_shape], allowzero=1)
        if shared is None or shared.gate is not None:
            return total
        common = self._mlp(source, f"{module}.{shared.module}", self._project_rows)
        return nodes.add("Add", [total, common])

    def _shares(self, layer: str, tokens: str) -> str:
        """The experts' weights for the tokens, (num_experts, num_tokens); 0 if not chosen."""
        experts, nodes, router = self._experts, self._nodes, self._experts.router
        module = experts.within(layer)
        bias = self._vector(f"{module}.{router.module}.bias") if router.has_bias else None
        scores = self._project(tokens, f"{experts.within_graph(layer)}.{router.module}", bias)
        if router.scores == "softmax":
            scores = nodes.add("Softmax", [scores], axis=-1)
        elif router.scores == "sigmoid":
            scores = nodes.add("Sigmoid", [scores])
        best, chosen = self._best(f"{layer}.experts", module, scores)
        if router.scores == "chosen":
            best = nodes.add("Softmax", [best], axis=1)
        if router.normalizes:
            axis = nodes.constant("minus_one", np.array([-1]))
            total = nodes.add("ReduceSum", [best, axis], keepdims=1)
            if router.least_sum is not None:
                total = nodes.add("Add", [total, nodes.number("shares.least", router.least_sum)])
            best = nodes.add("Div", [best, total])
        if router.expert_scale is not None:
            scale = self._vector(f"{module}.{router.expert_scale}")
            best = nodes.add("Mul", [best, nodes.add("Gather", [scale, chosen], axis=0)])
        if router.factor is not None:
            best = nodes.add("Mul", [best, nodes.number("shares.factor", router.factor)])
        shape = nodes.add("Shape", [scores], start=0)
        none = nodes.add("Expand", [nodes.number("zero", 0.0), shape])
        spread = nodes.add("ScatterElements", [none, chosen, best], axis=1, reduction="add")
        return nodes.add("Transpose", [spread], perm=[1, 0])

    def _best(self, name: str, module: str, scores: str) -> tuple[str, str]:
        """The largest scores of each token, and whose they are."""
        nodes, router = self._nodes, self._experts.router
        correction, source = router.correction, scores
        if correction is not None:
            source = nodes.add("Add", [scores, self._vector(f"{module}.{correction}")])
        if router.groups is not None:
            source = self._within_groups(name, router.groups, source)
        best, chosen = self._top(source, self._experts.chosen, name, is_sorted=router.is_sorted)
        if correction is None:
            return best, chosen
        return nodes.add("GatherElements", [scores, chosen], axis=1), chosen

    def _within_groups(self, name: str, groups: Groups, scores: str) -> str:
        """The scores of the experts of a token's groups; those of others are replaced."""
        nodes, size = self._nodes, self._experts.count // groups.count
        shape = nodes.constant("groups.apart", np.array([-1, groups.count, size]))
        apart = nodes.add("Reshape", [scores, shape])
        best, _ = self._top(apart, groups.best, f"{name}.within")
        axis = nodes.constant("minus_one", np.array([-1]))
        ranks = nodes.add("ReduceSum", [best, axis], keepdims=0)
        _, chosen = self._top(ranks, groups.chosen, f"{name}.groups")
        zeros = nodes.add("Mul", [ranks, nodes.number("zero", 0.0)])
        ones = nodes.add("Expand", [nodes.number("one", 1.0), nodes.add("Shape", [chosen])])
        marks = nodes.add("ScatterElements", [zeros, chosen, ones], axis=1)
        marks = nodes.add("Unsqueeze", [nodes.add("Cast", [marks], to=TensorProto.BOOL), axis])
        otherwise = nodes.number("groups.otherwise", groups.otherwise)
        masked = nodes.add("Where", [marks, apart, otherwise])
        flat = nodes.constant("groups.joined", np.array([-1, self._experts.count]))
        return nodes.add("Reshape", [masked, flat])

    def _top(
        self, scores: str, count: int, name: str, *, is_sorted: bool = True
    ) -> tuple[str, str]:
        """The largest of each row, and their places."""
        number = self._nodes.constant(f"experts.{count}", np.array([count]))
        best, places = f"{name}.shares", f"{name}.chosen"
        self._nodes.add_all(
            "TopK", [scores, number], [best, places], axis=-1, largest=1, sorted=int(is_sorted)
        )
        return best, places

    def _add_expert(self, total: str, layer: str, expert: int, tokens: str, shares: str) -> str:
        nodes, experts = self._nodes, self._experts
        name = f"{experts.within_graph(layer)}.experts"
        index = nodes.constant(f"expert.{expert}", np.array(expert))
        share = nodes.add("Gather", [shares, index], axis=0)
        places = nodes.add("Transpose", [nodes.add("NonZero", [share])], perm=[1, 0])
        minus = nodes.constant("minus_one", np.array([-1]))
        rows = nodes.add("Reshape", [places, minus], allowzero=0)
        weight = nodes.add("Gather", [share, places], axis=0)
        hidden = nodes.add("Gather", [tokens, rows], axis=0)
        first, second = (f"{name}.products.{expert}.{part}" for part in (0, 1))
        biases: tuple[str | None, str | None] = None, None
        if experts.has_biases:
            one = f"{experts.within(layer)}.experts.{expert}"
            gate_up = [f"{one}.{each}.bias" for each in experts.names[:2]]
            biases = self._vector(*gate_up), self._vector(f"{one}.{experts.names[2]}.bias")
        both = self._project(hidden, first, biases[0])
        inner = self._gated(first, both) if experts.is_gated else self._activated(both)
        result = self._project(inner, second, biases[1])
        weighted = nodes.add("Mul", [result, weight])
        return nodes.add("ScatterND", [total, places, weighted], reduction="add")

    def _activated(self, source: str) -> str:
        if self._experts.activation == "gelu":
            return self._nodes.add("Gelu", [source], approximate="none")
        assert self._experts.activation == "relu2", "others have gates"
        return self._nodes.relu2(source)

    def _gated(self, module: str, both: str) -> str:
        nodes, clamp = self._nodes, self._experts.clamp
        gate, up = f"{module}.gate", f"{module}.up"
        nodes.add_all("Split", [both], [gate, up], axis=1, num_outputs=2)
        if self._experts.activation == "gelu_tanh":
            return nodes.add("Mul", [nodes.add("Gelu", [gate], approximate="tanh"), up])
        if clamp is None:
            return nodes.add("Mul", [self._nodes.silu(gate), up])
        most, least = (
            nodes.number(f"clamp.{name}", value)
            for name, value in (("most", clamp.limit), ("least", -clamp.limit))
        )
        gate = nodes.add("Clip", [gate, "", most])
        up = nodes.add("Clip", [up, least, most])
        scaled = nodes.add("Mul", [gate, nodes.number("clamp.alpha", clamp.alpha)])
        gate = nodes.add("Mul", [gate, nodes.add("Sigmoid", [scaled])])
        return nodes.add("Mul", [nodes.add("Add", [up, nodes.number("one", 1.0)]), gate])

    def _mlp(self, source: str, name: str, project: Callable[[str, str], str]) -> str:
        if not self._experts.is_gated:
            inner = self._activated(project(source, f"{name}.up_proj"))
            return project(inner, f"{name}.down_proj")
        gate = self._nodes.silu(project(source, f"{name}.gate_proj"))
        inner = self._nodes.add("Mul", [gate, project(source, f"{name}.up_proj")])
        return project(inner, f"{name}.down_proj")

    def _project_rows(self, source: str, module: str) -> str:
        return self._products.project(source, [module])

    def _project(self, source: str, module: str, bias: str | None = None) -> str:
        return self._products.project_vectors(source, module, bias)
