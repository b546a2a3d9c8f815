"""Latent attention, as a configuration describes it."""

from dataclasses import dataclass
from typing import Literal

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Latent:
    """Keys and values of all heads are products of one short row (arXiv:2405.04434, section 2.1).

    A head of queries and keys has columns without positions, and behind them some that turn; those
    of the keys are the same in all heads.

    Attributes:
        query_rank: columns of the row that queries are products of; None: they are of the stream.
        rank: of the row that keys and values are products of.
        still: columns of a head of queries or keys that do not turn.
        turning: those that do.
        value_size: columns of a head of values.
        has_bias: whether the products of the stream, and the last one, have one.
        pairs: which of the turning columns are pairs: neighbors, which stay in their places or
            are taken apart into halves, or columns of two halves.
        epsilon: of the norms of the two rows.
    """

    query_rank: int | None
    rank: int
    still: int
    turning: int
    value_size: int
    has_bias: bool = False
    pairs: Literal["neighbors", "apart", "halves"] = "neighbors"
    epsilon: float = 1e-6

    @property
    def key_size(self) -> int:
        """Columns of a head of queries or keys."""
        return self.still + self.turning

    def shapes(self, hidden: int, heads: int) -> Shapes:
        """The name and the shape of every weight, within a layer."""
        found: Shapes = {
            "kv_a_proj_with_mqa.weight": (self.rank + self.turning, hidden),
            "kv_a_layernorm.weight": (self.rank,),
            "kv_b_proj.weight": (heads * (self.still + self.value_size), self.rank),
            "o_proj.weight": (hidden, heads * self.value_size),
        }
        biases = {"kv_a_proj_with_mqa": self.rank + self.turning, "o_proj": hidden}
        if self.query_rank is None:
            found["q_proj.weight"] = (heads * self.key_size, hidden)
        else:
            found["q_a_proj.weight"] = (self.query_rank, hidden)
            found["q_a_layernorm.weight"] = (self.query_rank,)
            found["q_b_proj.weight"] = (heads * self.key_size, self.query_rank)
            biases["q_a_proj"] = self.query_rank
        if self.has_bias:
            found |= {f"{name}.bias": (size,) for name, size in biases.items()}
        return {f"self_attn.{name}": shape for name, shape in found.items()}
