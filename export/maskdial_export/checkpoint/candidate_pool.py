"""GLiNER2.5's pool: pairs of boundaries chosen for all fields together, which see each other."""

import torch
from torch import Tensor, nn

from maskdial_export.checkpoint.boundary_layers import (
    ContentPooler,
    attend,
    inside_evidence,
    length_features,
)
from maskdial_export.checkpoint.boundary_pairs import (
    MASKED,
    NO_PAIR,
    likeliest,
    pair_keys,
    spans,
    top,
)

_NUM_POSITIONS = 8  # of two spans to each other


class CandidatePool(nn.Module):
    """Chooses pairs of the likeliest boundaries, with a few of the best ones of each field."""

    def __init__(self, dim: int, *, num_boundaries: int, size: int, quota: int) -> None:
        super().__init__()
        self.num_boundaries, self.size, self.quota = num_boundaries, size, quota
        self.start_projection = nn.Linear(dim, dim)
        self.end_projection = nn.Linear(dim, dim)

    def forward(
        self, boundaries: Tensor, start: Tensor, end: Tensor, always: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs and how well their ends fit together, (num_candidates,) each.

        Args:
            boundaries: (num_boundaries, dim).
            start: logits of starts, (num_fields, num_boundaries).
            end: likewise.
            always: pairs that come before all others.
        """
        of_start, of_end = self.start_projection(boundaries), self.end_projection(boundaries)
        scale = boundaries.shape[-1] ** -0.5
        best_start, best_end = start.amax(dim=0), end.amax(dim=0)
        _, starts, valid_start = top(best_start, self.num_boundaries)
        _, ends, valid_end = top(best_end, self.num_boundaries)
        valid = valid_start[:, None] & valid_end & (ends > starts[:, None])
        keys = pair_keys(starts[:, None], ends, valid).flatten()
        fit = of_start[starts] @ of_end[ends].T * scale
        scores = (fit + best_start[starts][:, None] + best_end[ends]).flatten()
        if self.quota:
            of_field = (fit + start[:, starts][..., None] + end[:, ends][:, None]).flatten(1)
            of_field = torch.where(keys == NO_PAIR, MASKED, of_field)
            _, places, found = top(of_field, min(self.quota, of_field.shape[1]))
            own = torch.where(found, keys[places], NO_PAIR)
            # Before all others, and a field's best pairs before its next ones
            ranks = torch.arange(own.shape[1], 0, -1).float() - MASKED / 2
            keys = torch.cat([own.flatten(), keys])
            scores = torch.cat([ranks.expand(own.shape).flatten(), scores])
        keys = torch.cat([always, keys])
        scores = torch.cat([torch.full_like(always, -MASKED, dtype=torch.float32), scores])
        keys = likeliest(keys, scores, self.size)
        starts, ends = spans(keys)
        return keys, (of_start[starts] * of_end[ends]).sum(dim=-1) * scale


class PoolScorer(nn.Module):
    """Scores each pair of the pool for each field."""

    def __init__(
        self,
        hidden_size: int,
        dim: int,
        pair_dim: int,
        *,
        num_layers: int,
        num_field_layers: int,
        num_heads: int,
        content_dim: int | None,
        reads_inside: bool,
    ) -> None:
        super().__init__()
        self.reads_inside = reads_inside
        self.start_projection = nn.Linear(dim, pair_dim)
        self.end_projection = nn.Linear(dim, pair_dim)
        self.length_projection = nn.Linear(3, pair_dim)
        self.prior_projection = nn.Linear(1, pair_dim)
        self.content_pooler = None
        if content_dim is not None:
            self.content_pooler = ContentPooler(hidden_size, content_dim)
            self.content_projection = nn.Linear(content_dim, pair_dim)
        self.candidate_norm = nn.LayerNorm(pair_dim)
        self.candidate_layers = nn.ModuleList(
            _PairAttention(pair_dim, num_heads) for _ in range(num_layers)
        )
        self.query_projection = nn.Linear(hidden_size, pair_dim)
        self.query_layers = nn.ModuleList(
            _FieldAttention(pair_dim, num_heads) for _ in range(num_field_layers)
        )
        self.film = nn.Linear(pair_dim, 2 * pair_dim)
        self.film_output = _two_layers(pair_dim, 64, 1)

    def forward(
        self,
        boundaries: Tensor,
        words: Tensor,
        fields: Tensor,
        keys: Tensor,
        prior: Tensor,
        marginals: tuple[Tensor, Tensor],
        inside: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The logits of the pairs ``keys`` (num_candidates,), (num_fields, num_candidates)."""
        starts, ends = spans(keys)
        pairs = self.start_projection(boundaries)[starts] + self.end_projection(boundaries)[ends]
        pairs = pairs + self.length_projection(length_features(starts, ends, words.shape[0]))
        pairs = pairs + self.prior_projection(prior[:, None])
        if self.content_pooler is not None:
            pairs = pairs + self.content_projection(self.content_pooler(words, starts, ends))
        pairs = self.candidate_norm(pairs)
        absent = keys == NO_PAIR
        for layer in self.candidate_layers:
            pairs = layer(pairs, starts, ends, absent)
        query = self.query_projection(fields)
        for layer in self.query_layers:
            weights = torch.where(absent, MASKED, query @ pairs.T).softmax(dim=-1)
            query = layer(query, weights @ pairs)
        score: Tensor = query @ pairs.T * pairs.shape[-1] ** -0.5
        gamma, beta = self.film(query)[:, None].chunk(2, dim=-1)
        score = score + self.film_output(pairs * (1.0 + gamma) + beta)[..., 0]
        starts, ends = (each[None].expand(score.shape) for each in (starts, ends))
        score = score + marginals[0].gather(1, starts) + marginals[1].gather(1, ends)
        if self.reads_inside:
            score = score + inside_evidence(*inside, starts, ends)
        return score


class _PairAttention(nn.Module):
    """Pairs attend to each other, with a bias for how two of them lie."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        self.relative_bias = nn.Parameter(torch.zeros(_NUM_POSITIONS, heads))
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = _two_layers(dim, 4 * dim, dim)

    def forward(self, pairs: Tensor, starts: Tensor, ends: Tensor, absent: Tensor) -> Tensor:
        bias = self.relative_bias[_positions(starts, ends)].permute(2, 0, 1)
        bias = torch.where(absent, MASKED, bias)
        query, key, value = self.qkv(self.norm1(pairs)).chunk(3, dim=-1)
        pairs = pairs + self.output(attend(query, key, value, bias, self.heads))
        update: Tensor = self.ffn(self.norm2(pairs))
        return pairs + update


class _FieldAttention(nn.Module):
    """Fields attend to each other, each with what the pairs say of it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.query_in = nn.Linear(dim, dim)
        self.evidence_in = nn.Linear(dim, dim)
        self.attention = _SelfAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = _two_layers(dim, 4 * dim, dim)

    def forward(self, fields: Tensor, evidence: Tensor) -> Tensor:
        states: Tensor = self.query_in(fields) + self.evidence_in(evidence)
        states = states + self.attention(self.norm1(states))
        update: Tensor = self.ffn(self.norm2(states))
        return states + update


class _SelfAttention(nn.Module):
    """torch's MultiheadAttention of one input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, states: Tensor) -> Tensor:
        projected = states @ self.in_proj_weight.T + self.in_proj_bias
        query, key, value = projected.chunk(3, dim=-1)
        attended: Tensor = self.out_proj(attend(query, key, value, None, self.heads))
        return attended


def _two_layers(inner: int, wide: int, outer: int) -> nn.Sequential:
    """Dropout stands before the last one in a checkpoint."""
    return nn.Sequential(nn.Linear(inner, wide), nn.GELU(), nn.Identity(), nn.Linear(wide, outer))


def _positions(starts: Tensor, ends: Tensor) -> Tensor:
    """How each span lies to each other one: a number below `_NUM_POSITIONS`."""
    start, end, starts, ends = starts[:, None], ends[:, None], starts[None], ends[None]
    cases = (
        (end <= starts, 6),
        (start >= ends, 7),
        ((start > starts) & (end < ends), 1),
        ((start < starts) & (end > ends), 2),
        ((start == starts) & (end != ends), 4),
        ((end == ends) & (start != starts), 5),
        ((start == starts) & (end == ends), 0),
    )
    found = torch.full_like(start + starts, 3)  # they cross
    for holds, number in cases:
        found = torch.where(holds, number, found)
    return found
