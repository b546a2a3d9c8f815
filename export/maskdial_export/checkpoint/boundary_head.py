"""GLiNER2.5's head: pairs of boundaries are chosen for each field, and scored by a second network.

Nothing in it depends on other texts: gliner2 chooses as many boundaries as its longest text of a
batch asks for (``boundary_top_k_alpha``), this head as many as the text itself does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from maskdial_export.checkpoint.boundary_layers import (
    Boundaries,
    ContentPooler,
    Marginals,
    Rotary,
    inside_evidence,
    length_features,
)
from maskdial_export.checkpoint.boundary_pairs import MASKED, likeliest, pair_keys, spans, top
from maskdial_export.checkpoint.candidate_pool import CandidatePool, PoolScorer
from maskdial_export.checkpoint.entity_heads import Weights

_PREFIX = "boundary_head."


@dataclass(frozen=True, slots=True)
class BoundarySettings:
    """What the head needs of ``boundary_head`` in config.json, with gliner2's defaults."""

    boundary_dim: int = 128
    pair_dim: int = 128
    boundary_refinement_layers: int = 1
    boundary_ffn_multiplier: float = 2.0
    boundary_attention_layers: int = 0
    boundary_attention_heads: int = 4
    boundary_attention_window: int = 0
    start_top_k: int = 16
    end_top_k: int = 16
    ends_per_start: int = 8
    starts_per_end: int = 8
    candidate_budget: int = 128
    bidirectional_proposals: bool = True
    boundary_top_k_alpha: float = 0.0
    boundary_top_k_max: int = 128
    boundary_top_k_bucket: int = 8
    use_inside_evidence: bool = True
    query_conditioned_inside_weight: bool = False
    endpoint_difference_features: bool = False
    reranker_endpoint_compat: bool = True
    multihead_pair_compat_heads: int = 8
    enable_span_content: bool = False
    content_dim: int = 64
    enable_rotary_endpoints: bool = False
    rotary_base: float = 10000.0
    pair_temperature: float = 1.0
    candidate_pool: str = "per_query"
    pool_boundary_top_k: int = 64
    pool_size: int = 384
    min_pool_per_query: int = 8
    candidate_attention_layers: int = 2
    candidate_attention_heads: int = 4
    query_attention_layers: int = 1

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "BoundarySettings":
        """Those of a configuration, which has others as well."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names})


class BoundaryHead(nn.Module):
    """From the hidden states of a text's words (num_words, hidden_size) and of a schema's fields
    (num_fields, hidden_size) to (num_fields, num_candidates, 3): start, end and logit of spans.

    Start and end are boundaries; both are 0 where a field has fewer spans. The spans ``forced``
    (num_forced, 2) are among those of each field.
    """

    output = "spans"

    def __init__(self, stored: Weights, settings: BoundarySettings) -> None:
        super().__init__()
        hidden_size = stored[f"{_PREFIX}boundary_encoder.left_projection.weight"].shape[1]
        self.hidden_size, self.temperature = hidden_size, settings.pair_temperature
        self.boundary_encoder = Boundaries(
            hidden_size,
            settings.boundary_dim,
            num_refinements=settings.boundary_refinement_layers,
            multiplier=settings.boundary_ffn_multiplier,
            num_attentions=settings.boundary_attention_layers,
            num_heads=settings.boundary_attention_heads,
            window=settings.boundary_attention_window,
        )
        self.boundary_query_head = Marginals(hidden_size, settings.boundary_dim)
        self.is_shared = settings.candidate_pool == "shared"
        if self.is_shared:
            self.shared_pool_builder = CandidatePool(
                settings.boundary_dim,
                num_boundaries=settings.pool_boundary_top_k,
                size=settings.pool_size,
                quota=settings.min_pool_per_query,
            )
            self.shared_pool_scorer = PoolScorer(
                hidden_size,
                settings.boundary_dim,
                settings.pair_dim,
                num_layers=settings.candidate_attention_layers,
                num_field_layers=settings.query_attention_layers,
                num_heads=settings.candidate_attention_heads,
                content_dim=settings.content_dim if settings.enable_span_content else None,
                reads_inside=settings.use_inside_evidence,
            )
        else:
            self.boundary_proposer = _Proposer(hidden_size, settings)
            self.pair_scorer = _PairScorer(hidden_size, settings)
        own = {n.removeprefix(_PREFIX): w for n, w in stored.items() if n.startswith(_PREFIX)}
        names = self.state_dict().keys()
        for name in names:
            if name not in own:
                raise KeyError(f"{_PREFIX}{name}")
        self.load_state_dict({name: own[name] for name in names})

    def marginals(self, words: Tensor, fields: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of each boundary as a start and as an end, (num_fields, num_boundaries)."""
        starts, ends = self.boundary_query_head(self.boundary_encoder(words), fields)
        return starts, ends

    def forward(self, words: Tensor, fields: Tensor, forced: Tensor) -> Tensor:
        always = pair_keys(forced[:, 0], forced[:, 1], forced[:, 1] > forced[:, 0])
        boundaries = self.boundary_encoder(words)
        marginals = self.boundary_query_head(boundaries, fields)
        inside = self.boundary_query_head.inside(words, fields)
        if self.is_shared:
            keys, prior = self.shared_pool_builder(boundaries, *marginals, always)
            logits = self.shared_pool_scorer(
                boundaries, words, fields, keys, prior, marginals, inside
            )
            keys = keys[None].expand(logits.shape)
        else:
            keys, prior = self.boundary_proposer(boundaries, fields, *marginals, always)
            logits = self.pair_scorer(boundaries, words, fields, keys, prior, marginals, inside)
        starts, ends = spans(keys)
        return torch.stack([starts.float(), ends.float(), logits / self.temperature], dim=-1)

    def example(self, size: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs of so many fields and words."""
        num_fields, num_words = size
        return {
            "words": torch.randn(num_words, self.hidden_size, generator=generator),
            "fields": torch.randn(num_fields, self.hidden_size, generator=generator),
            "forced": torch.tensor([[0, 1], [num_words - 1, num_words], [0, num_words]]),
        }


class _Proposer(nn.Module):
    """Chooses pairs for each field: the best ends of its likeliest starts, and vice versa."""

    def __init__(self, hidden_size: int, settings: BoundarySettings) -> None:
        super().__init__()
        self.settings, dim = settings, settings.boundary_dim
        rotates = settings.enable_rotary_endpoints
        self.start_pair_projection = nn.Linear(dim, dim)
        self.end_key_projection = nn.Linear(dim, dim)
        self.start_query_projection = nn.Linear(hidden_size, dim // 2 if rotates else dim)
        self.rotary = Rotary(dim, settings.rotary_base if rotates else None)

    def forward(
        self, boundaries: Tensor, fields: Tensor, start: Tensor, end: Tensor, always: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs and how well their ends fit together, (num_fields, num_candidates) each; the last
        ones are the pairs ``always``."""
        settings, scale = self.settings, boundaries.shape[-1] ** -0.5
        of_start = self.rotary(self.start_pair_projection(boundaries))
        of_end = self.rotary(self.end_key_projection(boundaries))
        gate = self.rotary.gate(self.start_query_projection(fields))
        places = torch.arange(boundaries.shape[0])
        # From the likeliest starts
        first, at, valid = self._likeliest(start, settings.start_top_k)
        scores = (of_start[at] * gate[:, None]) @ of_end.T * scale
        scores = scores + end[:, None] + first[..., None]
        allowed = valid[..., None] & (places > at[..., None])
        keys, chosen = _partners(scores, allowed, at, settings.ends_per_start, of_ends=False)
        if settings.bidirectional_proposals:
            last, at, valid = self._likeliest(end, settings.end_top_k)
            scores = (of_end[at] * gate[:, None]) @ of_start.T * scale
            scores = scores + start[:, None] + last[..., None]
            allowed = valid[..., None] & (places < at[..., None])
            more = _partners(scores, allowed, at, settings.starts_per_end, of_ends=True)
            keys, chosen = torch.cat([keys, more[0]], dim=-1), torch.cat([chosen, more[1]], dim=-1)
        keys = likeliest(keys, chosen, settings.candidate_budget)
        keys = torch.cat([keys, always[None].expand(keys.shape[0], -1)], dim=-1)
        starts, ends = spans(keys)
        fit = (of_start[starts] * gate[:, None] * of_end[ends]).sum(dim=-1) * scale
        return keys, fit

    def _likeliest(self, logits: Tensor, base: int) -> tuple[Tensor, Tensor, Tensor]:
        """The boundaries to pair, `top` of as many as a text of this length asks for."""
        settings = self.settings
        if settings.boundary_top_k_alpha <= 0:
            return top(logits, base)
        most, bucket = settings.boundary_top_k_max, settings.boundary_top_k_bucket
        num_words = torch.arange(logits.shape[-1], dtype=torch.float64)[-1]
        asked = (settings.boundary_top_k_alpha * num_words).ceil().clamp(max=most).clamp(min=base)
        count = ((asked / bucket).ceil() * bucket).clamp(max=most)
        values, places, valid = top(logits, most)
        return values, places, valid & (torch.arange(most) < count)


class _PairScorer(nn.Module):
    """Scores pairs of each field."""

    def __init__(self, hidden_size: int, settings: BoundarySettings) -> None:
        super().__init__()
        self.settings, dim, pair = settings, settings.boundary_dim, settings.pair_dim
        rotates = settings.enable_rotary_endpoints
        self.start_endpoint_projection = nn.Linear(dim, pair)
        self.end_endpoint_projection = nn.Linear(dim, pair)
        self.query_gate = nn.Linear(hidden_size, pair // 2 if rotates else pair)
        self.length_query_projection = nn.Linear(hidden_size, 3)
        self.inside_weight: nn.Module | nn.Parameter
        if settings.query_conditioned_inside_weight:
            self.inside_weight = nn.Linear(hidden_size, 1)
        else:
            self.inside_weight = nn.Parameter(torch.tensor(1.0))
        if settings.endpoint_difference_features:
            self.endpoint_difference_projection = nn.Linear(2 * pair, 1)
        if settings.enable_span_content:
            self.content_pooler = ContentPooler(hidden_size, settings.content_dim)
            self.content_query_projection = nn.Linear(hidden_size, settings.content_dim)
            self.content_bias = nn.Linear(settings.content_dim, 1)
        self.compat_mix = nn.Linear(settings.multihead_pair_compat_heads, 1)
        self.rotary = Rotary(pair, settings.rotary_base if rotates else None)

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
        """The logits of the pairs ``keys``, (num_fields, num_candidates)."""
        settings = self.settings
        starts, ends = spans(keys)
        of_start = self.rotary(self.start_endpoint_projection(boundaries))[starts]
        of_end = self.rotary(self.end_endpoint_projection(boundaries))[ends]
        score = prior + marginals[0].gather(1, starts) + marginals[1].gather(1, ends)
        if settings.reranker_endpoint_compat:
            gate = self.rotary.gate(self.query_gate(fields))[:, None]
            products = of_start * gate * of_end
            heads = products.unflatten(-1, (settings.multihead_pair_compat_heads, -1)).sum(dim=-1)
            score = score + self.compat_mix(heads)[..., 0] * settings.pair_dim**-0.5
        if settings.endpoint_difference_features:
            difference = of_start - of_end
            both = torch.cat([difference, difference.abs()], dim=-1)
            score = score + self.endpoint_difference_projection(both)[..., 0]
        if settings.enable_span_content:
            content = self.content_pooler(words, starts, ends)
            weights = self.content_query_projection(fields)[:, None] * settings.content_dim**-0.5
            score = score + (content * weights).sum(dim=-1) + self.content_bias(content)[..., 0]
        if settings.use_inside_evidence:
            weight = self.inside_weight
            factor = weight(fields) if isinstance(weight, nn.Module) else weight
            score = score + factor * inside_evidence(*inside, starts, ends)
        weights = self.length_query_projection(fields)[:, None]
        lengths = length_features(starts, ends, words.shape[0]) * weights
        scores: Tensor = score + lengths.sum(dim=-1)
        return scores


def _partners(
    scores: Tensor, allowed: Tensor, at: Tensor, count: int, *, of_ends: bool
) -> tuple[Tensor, Tensor]:
    """The best partners of boundaries: pairs and their scores, (num_fields, num_pairs) each.

    Args:
        scores: of each boundary with each, (num_fields, num_chosen, num_boundaries).
        allowed: which of them are pairs.
        at: the boundaries, (num_fields, num_chosen).
        count: how many partners each gets.
        of_ends: whether the boundaries are ends.
    """
    values, places, valid = top(torch.where(allowed, scores, MASKED), count)
    own = at[..., None].expand_as(places)
    keys = pair_keys(places, own, valid) if of_ends else pair_keys(own, places, valid)
    return keys.flatten(1), values.flatten(1)
