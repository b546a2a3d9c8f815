"""Writes the queries, keys and values of latent attention.

The cache has the keys and values of all heads, as a traced graph's: the attention's operator knows
no other. Values are widened to the columns of keys. The arithmetic is that of transformers'
``modeling_deepseek_v2``, ``modeling_deepseek_v3`` and ``modeling_minicpm3``.
"""

from collections.abc import Callable

import numpy as np

from maskdial_export.direct.latent import Latent
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products


class LatentWriter:
    """Writes the attention of one layer after the other, but for the attention itself."""

    def __init__(
        self,
        latent: Latent,
        num_heads: int,
        products: Products,
        nodes: Nodes,
        vector: Callable[..., str],
    ) -> None:
        """``vector`` writes a vector of the checkpoint, by its name."""
        self._latent = latent
        self._num_heads = num_heads
        self._products = products
        self._nodes = nodes
        self._vector = vector

    def parts(self, module: str, source: str, tables: tuple[str, str]) -> tuple[str, str, str]:
        """Queries, keys and values, (batch, length, num_heads * key_size) each.

        ``tables``: cosines and sines by position, (positions, turning / 2).
        """
        latent, nodes = self._latent, self._nodes
        turns = [self._turn(table) for table in tables]
        query = nodes.split_heads(self._query(module, source), latent.key_size)
        still, turning = self._split(query, latent.still, latent.turning, 3)
        query = nodes.add("Concat", [still, self._turned(turning, turns)], axis=-1)

        both = self._project(source, f"{module}.kv_a_proj_with_mqa", has_bias=latent.has_bias)
        row, turning = self._split(both, latent.rank, latent.turning, 2)
        turning = self._turned(nodes.split_heads(turning, latent.turning), turns)
        heads = nodes.constant("latent.heads", np.array([1, 1, self._num_heads, 1]))
        turning = nodes.add("Expand", [turning, heads])
        product = self._products.project(
            self._norm(row, f"{module}.kv_a_layernorm"), [f"{module}.kv_b_proj"]
        )
        inner = nodes.split_heads(product, latent.still + latent.value_size)
        still, value = self._split(inner, latent.still, latent.value_size, 3)
        key = nodes.add("Concat", [still, turning], axis=-1)
        missing = latent.key_size - latent.value_size
        if missing:
            pads = nodes.constant("latent.pads", np.array([0] * 7 + [missing]))
            value = nodes.add("Pad", [value, pads], mode="constant")
        parts = nodes.join_heads(query), nodes.join_heads(key), nodes.join_heads(value)
        nodes.widths.update(dict.fromkeys(parts, self._num_heads * latent.key_size))
        return parts

    def narrowed(self, output: str) -> str:
        """What the attention gives, without the columns that values were widened by."""
        latent, nodes = self._latent, self._nodes
        if latent.key_size == latent.value_size:
            return output
        heads = nodes.split_heads(output, latent.key_size)
        places = [
            nodes.constant(f"latent.{name}", np.array([place]))
            for name, place in (("first", 0), ("end", latent.value_size), ("axis", 3), ("step", 1))
        ]
        return nodes.join_heads(nodes.add("Slice", [heads, *places]))

    def _query(self, module: str, source: str) -> str:
        latent = self._latent
        if latent.query_rank is None:
            return self._products.project(source, [f"{module}.q_proj"])
        row = self._project(source, f"{module}.q_a_proj", has_bias=latent.has_bias)
        row = self._norm(row, f"{module}.q_a_layernorm")
        return self._products.project(row, [f"{module}.q_b_proj"])

    def _turn(self, table: str) -> str:
        """Rows of a table by the tokens' places, for each head: (batch, length, 1, columns)."""
        nodes = self._nodes
        rows = nodes.once("Gather", [table, "position_ids"], f"{table}.rows", axis=0)
        axis = nodes.constant("latent.unit", np.array([2]))
        return nodes.once("Unsqueeze", [rows, axis], f"{table}.heads")

    def _turned(self, heads: str, turns: list[str]) -> str:
        """(batch, length, heads, turning), by the angles of its pairs."""
        latent, nodes, (cos, sin) = self._latent, self._nodes, turns
        first, second = self._pairs(heads)
        turned = (
            nodes.add("Sub", [nodes.add("Mul", [first, cos]), nodes.add("Mul", [second, sin])]),
            nodes.add("Add", [nodes.add("Mul", [second, cos]), nodes.add("Mul", [first, sin])]),
        )
        if latent.pairs != "neighbors":
            return nodes.add("Concat", turned, axis=-1)
        last = nodes.constant("latent.last", np.array([4]))
        columns = [nodes.add("Unsqueeze", [each, last]) for each in turned]
        stacked = nodes.add("Concat", columns, axis=-1)
        return nodes.split_heads(stacked, latent.turning)

    def _pairs(self, heads: str) -> tuple[str, str]:
        """The first and the second columns of all pairs."""
        latent, nodes, half = self._latent, self._nodes, self._latent.turning // 2
        if latent.pairs == "halves":
            return self._split(heads, half, half, 3)
        axis = nodes.constant("latent.axis", np.array([3]))
        step = nodes.constant("latent.two", np.array([2]))
        end = nodes.constant("latent.turning", np.array([latent.turning]))
        first, second = (nodes.constant(f"latent.at.{at}", np.array([at])) for at in (0, 1))
        return (
            nodes.add("Slice", [heads, first, end, axis, step]),
            nodes.add("Slice", [heads, second, end, axis, step]),
        )

    def _split(self, source: str, first: int, second: int, axis: int) -> tuple[str, str]:
        nodes = self._nodes
        left, right = f"{source}.left", f"{source}.right"
        sizes = nodes.constant(f"latent.split.{first}.{second}", np.array([first, second]))
        nodes.add_all("Split", [source, sizes], [left, right], axis=axis)
        return left, right

    def _project(self, source: str, module: str, *, has_bias: bool) -> str:
        product = self._products.project(source, [module])
        if not has_bias:
            return product
        return self._nodes.add("Add", [product, self._vector(f"{module}.bias")])

    def _norm(self, source: str, norm: str) -> str:
        return self._nodes.add(
            "SimplifiedLayerNormalization",
            [source, self._vector(f"{norm}.weight")],
            axis=-1,
            epsilon=self._latent.epsilon,
            stash_type=1,
        )
