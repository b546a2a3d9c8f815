"""Score: how likely a model finds a text, token by token.

A masked model gives a pseudo-log-likelihood: each token is masked in turn, and the
log-probabilities of the true ones are added up (Salazar et al. 2020, arXiv:1910.14659).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError
from maskdial.masked.request import MaskedInput

Method = Literal["causal", "pseudo"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token, and the natural logarithm of its probability; None where it is not scored."""

    id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """A text's score: the sum of its tokens' log-probabilities.

    ``perplexity`` is the exponential of minus their mean, None where no token is scored.
    """

    tokens: tuple[TokenScore, ...]
    log_likelihood: float
    perplexity: float | None
    method: Method


@dataclass(frozen=True, slots=True)
class Masking:
    """A text with one token masked: what it is the text's number ``text`` of, and where."""

    text: int
    position: int
    target: int
    input: MaskedInput


def scored_positions(
    input_ids: Sequence[int], added: Sequence[int], special_ids: Collection[int]
) -> tuple[int, ...]:
    """The positions of a text's own tokens, without special ones.

    Args:
        input_ids: the text's token ids.
        added: 1 for each of them that the tokenizer put around the text.
        special_ids: tokens that say nothing: a mask, a word that is not in the vocabulary.
    """
    return tuple(
        position
        for position, (token_id, is_added) in enumerate(zip(input_ids, added, strict=True))
        if not is_added and token_id not in special_ids
    )


def maskings(
    text: int, whole: MaskedInput, positions: Sequence[int], mask_token_id: int
) -> Iterator[Masking]:
    """The text with each of the positions masked, one after the other."""
    ids = whole.input_ids
    for position in positions:
        masked = (*ids[:position], mask_token_id, *ids[position + 1 :])
        yield Masking(
            text, position, ids[position], MaskedInput(masked, (position,), whole.token_type_ids)
        )


def waves(
    entries: Iterable[Masking], *, max_tokens: int, max_entries: int
) -> Iterator[list[Masking]]:
    """The entries in groups of about one pass, so that other requests' texts come in between.

    A group has at most ``max_entries``, and at most ``max_tokens`` padded tokens or one entry.
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
    """The natural logarithm of a token's probability under the softmax of all logits.

    Args:
        logits: float32 (vocab_size,).
        token_id: the token.

    Raises:
        InferenceError: the logits are not numbers.
    """
    largest = logits.max()
    with np.errstate(invalid="ignore"):  # infinities are caught below
        total = np.exp(logits - largest).sum(dtype=np.float64)
    if not np.isfinite(total):
        raise InferenceError("the model's logits are not finite numbers for this text")
    return float(logits[token_id]) - float(largest) - float(np.log(total))


def summarize(tokens: Sequence[TokenScore], method: Method) -> Score:
    """A text's score from its tokens'."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    log_likelihood = float(np.sum(logprobs)) if logprobs else 0.0
    perplexity = None
    if logprobs:
        with np.errstate(over="ignore"):  # infinite, for a text that the model all but rules out
            perplexity = float(np.exp(np.float64(-log_likelihood / len(logprobs))))
    return Score(tuple(tokens), log_likelihood, perplexity, method)
