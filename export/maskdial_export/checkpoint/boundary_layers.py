"""The layers of GLiNER2.5's head that both ways of choosing spans share.

A text of n words has the boundaries 0 to n; a span is a pair of them, [start, end). One text is
computed at a time. Modules are named as in gliner2's checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Boundaries(nn.Module):
    """States of the boundaries, each of the words before and after it."""

    def __init__(
        self,
        hidden_size: int,
        dim: int,
        *,
        num_refinements: int,
        multiplier: float,
        num_attentions: int,
        num_heads: int,
        window: int,
    ) -> None:
        super().__init__()
        self.bos_state, self.eos_state = (nn.Parameter(torch.zeros(hidden_size)) for _ in range(2))
        self.left_projection = nn.Linear(hidden_size, dim)
        self.right_projection = nn.Linear(hidden_size, dim)
        self.output_projection = nn.Linear(2 * dim, dim)
        self.layer_norm = nn.LayerNorm(dim)
        self.attention_blocks = nn.ModuleList(
            _BoundaryAttention(dim, num_heads, window) for _ in range(num_attentions)
        )
        self.refinement_blocks = nn.ModuleList(
            _Refinement(dim, multiplier) for _ in range(num_refinements)
        )

    def forward(self, words: Tensor) -> Tensor:
        """Of words (num_words, hidden_size): (num_words + 1, dim)."""
        left = self.left_projection(torch.cat([self.bos_state[None], words]))
        right = self.right_projection(torch.cat([words, self.eos_state[None]]))
        states: Tensor = self.layer_norm(self.output_projection(torch.cat([left, right], dim=-1)))
        for block in (*self.attention_blocks, *self.refinement_blocks):
            states = block(states)
        return states


class Marginals(nn.Module):
    """How likely each boundary is the start or the end of a field's spans, and each word inside."""

    def __init__(self, hidden_size: int, dim: int) -> None:
        super().__init__()
        self.start_boundary_projection = nn.Linear(dim, dim)
        self.start_query_projection = nn.Linear(hidden_size, dim)
        self.end_boundary_projection = nn.Linear(dim, dim)
        self.end_query_projection = nn.Linear(hidden_size, dim)
        self.inside_text_projection = nn.Linear(hidden_size, dim)
        self.inside_query_projection = nn.Linear(hidden_size, dim)

    def forward(self, boundaries: Tensor, fields: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of starts and ends, (num_fields, num_boundaries) each."""
        scale = boundaries.shape[-1] ** -0.5
        start = self.start_query_projection(fields) @ self.start_boundary_projection(boundaries).T
        end = self.end_query_projection(fields) @ self.end_boundary_projection(boundaries).T
        return start * scale, end * scale

    def inside(self, words: Tensor, fields: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the words' logits before each boundary, (num_fields, num_boundaries), less their
        mean (num_fields, 1), so that float32 keeps them exact."""
        inside = self.inside_query_projection(fields) @ self.inside_text_projection(words).T
        inside = inside * self.inside_query_projection.out_features**-0.5
        mean = inside.mean(dim=-1, keepdim=True)
        sums = (inside - mean).cumsum(dim=-1)
        return functional.pad(sums, (1, 0)), mean


class ContentPooler(nn.Module):
    """The normalized mean of a span's words."""

    def __init__(self, hidden_size: int, dim: int) -> None:
        super().__init__()
        self.value_projection = nn.Linear(hidden_size, dim)
        self.layer_norm = nn.LayerNorm(dim)

    def forward(self, words: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Of spans of any shape: (..., dim)."""
        sums = functional.pad(self.value_projection(words).cumsum(dim=0), (0, 0, 1, 0))
        lengths = (ends - starts).clamp(min=1)[..., None].float()
        pooled: Tensor = self.layer_norm((sums[ends] - sums[starts]) / lengths)
        return pooled


class Rotary(nn.Module):
    """Rotates pairs of neighboring columns by the boundary's place; not at all without a base."""

    frequencies: Tensor | None

    def __init__(self, dim: int, base: float | None) -> None:
        super().__init__()
        frequencies = None
        if base is not None:
            frequencies = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Of (num_boundaries, dim)."""
        if self.frequencies is None:
            return states
        angles = torch.arange(states.shape[0])[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        even, odd = states[:, 0::2], states[:, 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def gate(self, columns: Tensor) -> Tensor:
        """A gate of the columns, of which rotated ones share those of a pair."""
        gate = torch.sigmoid(columns)
        return gate if self.frequencies is None else gate.repeat_interleave(2, dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Attention of (length, dim) with a bias (heads or 1, length, length)."""
    width = query.shape[-1] // heads
    query, key, value = (
        each.reshape(-1, heads, width).transpose(0, 1) for each in (query, key, value)
    )
    logits = (query @ key.transpose(-1, -2)) * width**-0.5
    if bias is not None:
        logits = logits + bias
    attended: Tensor = logits.softmax(dim=-1) @ value
    return attended.transpose(0, 1).flatten(-2)


def inside_evidence(sums: Tensor, mean: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The logits of the words within spans (num_fields, num_spans), of `Marginals.inside`."""
    lengths = ends - starts
    interval = sums.gather(1, ends) - sums.gather(1, starts) + mean * lengths
    return interval / lengths.clamp(min=1).float().sqrt()


def length_features(starts: Tensor, ends: Tensor, num_words: int) -> Tensor:
    """Three numbers (..., 3) that say how long spans are."""
    length = (ends - starts).clamp(min=1).float()
    return torch.stack([length.log1p(), length / num_words, length.rsqrt()], dim=-1)


class _BoundaryAttention(nn.Module):
    """Boundaries attend to each other, or to those at most ``window`` away; 0: to all."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm = nn.LayerNorm(dim)
        self.qkv_projection = nn.Linear(dim, 3 * dim)
        self.output_projection = nn.Linear(dim, dim)

    def forward(self, states: Tensor) -> Tensor:
        bias = None
        if self.window:
            places = torch.arange(states.shape[0])
            far = (places[:, None] - places[None]).abs() > self.window
            bias = torch.where(far, float("-inf"), 0.0)[None]
        query, key, value = self.qkv_projection(self.norm(states)).chunk(3, dim=-1)
        attended: Tensor = self.output_projection(attend(query, key, value, bias, self.heads))
        return states + attended


class _Refinement(nn.Module):
    """A SwiGLU beside its input."""

    def __init__(self, dim: int, multiplier: float) -> None:
        super().__init__()
        width = max(1, int(dim * multiplier))
        self.norm = nn.LayerNorm(dim)
        self.input_projection = nn.Linear(dim, 2 * width)
        self.output_projection = nn.Linear(width, dim)

    def forward(self, states: Tensor) -> Tensor:
        value, gate = self.input_projection(self.norm(states)).chunk(2, dim=-1)
        update: Tensor = self.output_projection(value * functional.silu(gate))
        return states + update
