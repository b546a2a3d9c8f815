"""Pseudo-log-likelihood: how likely a masked model finds a text, token by token.

Each token is masked in turn, and the log-probabilities of the true ones are summed (Salazar et al.
2020, arXiv:1910.14659).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.engine.logits import log_normalizer
from maskdial.masked.request import MaskedInput


@dataclass(frozen=True, slots=True)
class Masking:
    """A text with one token masked; ``text`` is the text's index, ``target`` the token's id."""

    text: int
    position: int
    target: int
    input: MaskedInput


def scored_positions(
    input_ids: Sequence[int], added: Sequence[int], special_ids: Collection[int]
) -> tuple[int, ...]:
    """The positions of a text's own tokens, without special tokens.

    Args:
        input_ids: the text's token ids.
        added: 1 for each special token that the tokenizer added.
        special_ids: tokens that are not scored: the mask, the unknown token.
    """
    return tuple(
        position
        for position, (token_id, is_added) in enumerate(zip(input_ids, added, strict=True))
        if not is_added and token_id not in special_ids
    )


def maskings(
    text: int, whole: MaskedInput, positions: Sequence[int], mask_token_id: int
) -> Iterator[Masking]:
    """The text with each of the positions masked in turn."""
    ids = whole.input_ids
    for position in positions:
        masked = (*ids[:position], mask_token_id, *ids[position + 1 :])
        yield Masking(
            text, position, ids[position], MaskedInput(masked, (position,), whole.token_type_ids)
        )


def waves(
    entries: Iterable[Masking], *, max_tokens: int, max_entries: int
) -> Iterator[list[Masking]]:
    """The entries in groups of about one pass, so that other requests can run in between.

    A group has at most ``max_entries``, and at most ``max_tokens`` padded tokens unless it is one
    entry.
    """
    wave: list[Masking] = []
    longest = 0
    for entry in entries:
        grown = max(longest, len(entry.input.input_ids))
        if wave and (len(wave) == max_entries or grown * (len(wave) + 1) > max_tokens):
            yield wave
            wave, grown = [], len(entry.input.input_ids)
        wave.append(entry)
        longest = grown
    if wave:
        yield wave


def log_probability(logits: NDArray[np.float32], token_id: int) -> float:
    """A token's natural log-probability under the softmax of all logits.

    Args:
        logits: float32 (vocab_size,).
        token_id: the token.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    largest, total = log_normalizer(logits)
    return float(logits[token_id]) - largest - math.log(total)
