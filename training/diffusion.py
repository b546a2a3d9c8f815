"""Masked diffusion: the hybrid trained on, with shares of hidden tokens from 0 to 1.

A model that has seen 15% of the words hidden repeats itself where most of a text is. Here half of
the masked rows draw their own share (the objective of LLaDA, Nie et al. 2025, arXiv:2502.09992), of
whole words or of single tokens, in the whole row or in one gap: that is what unmasking passes read.
The others hide 15% of their words, for single blanks, and the causal rows stay as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.hybrid import (
    EVALUATED_SHARE,
    LEARNING_RATE,
    MATRIX_LEARNING_RATE,
    HybridObjective,
)
from training.pretrain import Plan
from training.settings import Settings

STARTED_AT = 0.5
"""Trained weights need no short texts first: lengths and books are those of the second half."""
RATE = 0.7
"""Peak learning rates, relative to those of a model that starts anew."""
DECAY = 0.9
WORDS_SHARE = 0.5
"""Share of the masked rows that hide whole words; the others hide tokens one by one."""
GAP_SHARE = 0.5
"""Share of the masked rows in which one gap alone is hidden; half of the gaps end the row."""
LIGHT_SHARE = 0.5
"""Share of the masked rows that hide `EVALUATED_SHARE` of their words, wherever they are."""


class DiffusionObjective(HybridObjective):
    """The hybrid's objective, half of whose masked rows hide any share of their tokens.

    Each row's loss is the mean over its hidden tokens. So rows count alike, whatever their share,
    as under the weight 1 / share of the likelihood bound.
    """

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        return super().batch_loss(STARTED_AT + (1.0 - STARTED_AT) * progress)

    def hide(self, windows: Tensor, share: float) -> Tensor:
        """`[rows, length]` bool; `share` is not used.

        The shares of the rows are spread evenly over 0 to 1, which makes the loss less noisy.
        """
        rows, length = windows.shape
        shares = (torch.rand(1) + torch.randperm(rows) / rows) % 1.0
        by_word = torch.rand(rows, 1) < WORDS_SHARE
        units = torch.where(by_word, self.word_numbers(windows), torch.arange(length))
        drawn = torch.rand(rows, length + 1).gather(1, units)
        drawn[~draw_gaps(rows, length)] = 2.0
        chosen = drawn <= torch.maximum(shares[:, None], drawn.min(1, keepdim=True).values)
        light = slice(round(rows * LIGHT_SHARE))  # the rows' order is random
        chosen[light] = self.choose_words(windows[light], EVALUATED_SHARE)
        return chosen

    def token_weights(self, predicted: Tensor, num_causal: int) -> Tensor:
        """`[rows, length]` float32: the weight of each token's loss, in a row 1 / rows together."""
        counts = predicted.sum(1, keepdim=True).clamp(min=1)
        return (1.0 / (counts * len(predicted))).expand(predicted.shape)


def draw_gaps(rows: int, length: int) -> Tensor:
    """`[rows, length]` bool: what may be hidden, which is never the first token.

    Sizes of gaps are spread evenly over their logarithms.
    """
    sizes = ((length - 1.0) ** torch.rand(rows, 1)).round()
    starts = 1.0 + (torch.rand(rows, 1) * (length - sizes)).floor()
    starts = torch.where(torch.rand(rows, 1) < 0.5, starts, length - sizes)
    everywhere = torch.rand(rows, 1) >= GAP_SHARE
    positions = torch.arange(length)
    in_gap = (positions >= starts) & (positions < starts + sizes)
    return (in_gap | everywhere) & (positions > 0)


def plan(settings: Settings) -> Plan:
    """How trained weights are trained on."""
    return Plan(
        settings.minutes,
        RATE * LEARNING_RATE,
        matrix_learning_rate=RATE * MATRIX_LEARNING_RATE,
        decay=DECAY,
        bf16=settings.bf16,
    )
