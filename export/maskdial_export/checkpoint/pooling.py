"""Pooling: from a model's output for each token to one vector per text, in the graph.

The modules are those of sentence-transformers, computed so that a vector does not depend on the
padding: sums over a text's tokens run in their order, and end with the text.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from maskdial.bundle.manifest import Embedding


class Pooler(nn.Module):
    """Pools what a model returns for each token.

    Args:
        pool: from (batch, length, columns) and lengths (batch,) to (batch, columns), all float32.
        steps: what follows, from (batch, columns) to (batch, columns).
        embedding: describes the result, for the manifest.
    """

    def __init__(self, pool: nn.Module, steps: Sequence[nn.Module], embedding: Embedding) -> None:
        super().__init__()
        self.pool = pool
        self.steps = nn.Sequential(*steps)
        self.embedding = embedding

    def forward(self, output: Tensor, lengths: Tensor) -> Tensor:
        """Pools (batch, length, columns), float32 or float16, to float32 (batch, dimension)."""
        vectors: Tensor = self.steps(self.pool(output, lengths))
        return vectors


class TokenPooling(nn.Module):
    """Pools hidden states in one or several ways, whose results are concatenated."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = [POOLINGS[mode] for mode in modes]

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([pool(hidden, lengths) for pool in self.modes], dim=-1)


def _first(hidden: Tensor, _: Tensor) -> Tensor:
    return hidden[:, 0].float()


def _last(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden.gather(1, _ends(hidden, lengths))[:, 0].float()


def _largest(hidden: Tensor, lengths: Tensor) -> Tensor:
    inside = _positions(hidden) < lengths[:, None]
    return torch.where(inside[:, :, None], hidden.float(), -torch.inf).amax(1)


def _mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    return _sum(hidden, lengths) / lengths[:, None]


def _root_mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    return _sum(hidden, lengths) / lengths[:, None].float().sqrt()


def _weighted_mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The mean by position: the first token counts once, the second twice."""
    total = lengths.float() * (lengths + 1).float() / 2
    weights = (1 + _positions(hidden)).float()
    return _sum(hidden * weights[:, :, None], lengths) / total[:, None]


POOLINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len": _root_mean,
    "weighted_mean": _weighted_mean,
    "last": _last,
}
"""By name in the manifest: from hidden states (batch, length, columns) and lengths (batch,). In the
order in which older versions of sentence-transformers concatenate them."""


def _sum(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The sum over each text's tokens, float32."""
    if hidden.dtype == torch.float16:
        # float16 is for CUDA, whose CumSum takes time quadratic in the length. TF32 products of
        # float16's 11 bits are exact.
        inside = _positions(hidden)[:, None, :] < lengths[:, None, None]
        return (inside.float() @ hidden.float())[:, 0]
    # A running sum adds in the same order with any padding, so the sum is batch-invariant.
    return hidden.cumsum(1).gather(1, _ends(hidden, lengths))[:, 0]


def _positions(hidden: Tensor) -> Tensor:
    return torch.arange(hidden.shape[1])[None, :]


def _ends(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Each text's last position, as an index for `Tensor.gather` along the length."""
    return (lengths.to(torch.int64) - 1)[:, None, None].expand(-1, 1, hidden.shape[2])


class SpladePooling(nn.Module):
    """SPLADE's weights of the vocabulary: ``log(1 + relu(logits))``, at their largest or summed.

    Formal, Piwowarski, Clinchant, SIGIR 2021 (sum), and Formal et al., arXiv:2109.10086 (max).
    ``num_logs`` is 2 where the logarithm is taken twice (arXiv:2504.14839).
    """

    def __init__(self, *, largest: bool, num_logs: int = 1) -> None:
        super().__init__()
        self.largest = largest
        self.num_logs = num_logs

    def forward(self, logits: Tensor, lengths: Tensor) -> Tensor:
        weights = logits.float().relu()
        for _ in range(self.num_logs):
            weights = weights.log1p()
        if not self.largest:
            return _sum(weights, lengths)
        inside = _positions(logits) < lengths[:, None]
        return (weights * inside[:, :, None]).amax(1)


class Dense(nn.Module):
    """A linear layer and an activation, possibly beside a residual connection.

    ``residual`` projects it where the widths differ.
    """

    def __init__(
        self,
        linear: nn.Linear,
        activation: nn.Module,
        *,
        has_residual: bool = False,
        residual: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.has_residual = has_residual
        self.residual = residual

    def forward(self, vectors: Tensor) -> Tensor:
        output: Tensor = self.activation(self.linear(vectors))
        if not self.has_residual:
            return output
        return output + (vectors if self.residual is None else self.residual(vectors))


class Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=-1)


class Leading(nn.Module):
    """The first entries of vectors, which have no length of 1 then."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors[..., : self.count]


class LargestWeights(nn.Module):
    """Vectors with all but the largest entries set to 0; none is negative."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, vectors: Tensor) -> Tensor:
        values, places = vectors.topk(self.count, dim=-1)
        return torch.zeros_like(vectors).scatter(-1, places, values)
