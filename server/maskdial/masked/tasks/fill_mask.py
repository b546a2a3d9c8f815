"""Fill-mask: the best tokens for every mask of a text.

Scores, order and texts follow transformers' FillMaskPipeline, with two differences on purpose: a
target that is not one token is refused instead of shortened to its first, and equal scores come in
the order of their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError, ValidationError
from maskdial.models.tokenizer import Tokenizer

MASK_ALIASES = ("[MASK]", "<mask>")


@dataclass(frozen=True, slots=True)
class Filling:
    """One token for one mask: its probability, id and text, and the text with the mask filled."""

    score: float
    token: int
    token_str: str
    sequence: str


def write_masks(text: str, tokenizer: Tokenizer) -> str:
    """The text with every ``[MASK]`` and ``<mask>`` written as the model's own mask token.

    Raises:
        ValidationError: the model has no mask token.
    """
    for alias in MASK_ALIASES:
        text = text.replace(alias, _mask_token(tokenizer))
    return text


def mask_positions(input_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Where the masks are among a text's token ids, in order.

    Raises:
        ValidationError: there is none, or the model has no mask token.
    """
    mask_token = _mask_token(tokenizer)
    positions = tuple(i for i, each in enumerate(input_ids) if each == tokenizer.mask_token_id)
    if not positions:
        raise ValidationError(f"the text has no mask; write {mask_token} where a word is missing")
    return positions


def check_masks_kept(text: str, input_ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Checks that a text's masks are all among the tokens that were kept of it.

    Args:
        text: the whole text, its masks written as `write_masks` does.
        input_ids: what was kept, special tokens and all.

    Raises:
        ValidationError: a mask was cut off.
    """
    num_masks = text.count(_mask_token(tokenizer))
    num_cut = num_masks - sum(each == tokenizer.mask_token_id for each in input_ids)
    if num_cut > 0:
        raise ValidationError(
            f"{num_cut} of the text's {num_masks} masks would be cut off with what is too long; "
            'shorten the text, or cut its other end with "truncation_direction"'
        )


def resolve_targets(targets: str | Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of target words, each once, ascending.

    A target is looked up as the vocabulary spells it (``"Ġcapital"``), then tokenized
    (``" capital"``).

    Raises:
        ValidationError: there are no targets, or one is not exactly one token of the vocabulary.
    """
    if isinstance(targets, str):
        targets = [targets]
    if not targets:
        raise ValidationError("`targets` is empty; give at least one word, or leave it out")
    return tuple(sorted({_target_id(target, tokenizer) for target in targets}))


def check_top_k(top_k: int, vocab_size: int) -> None:
    """Checks the number of fillings to return.

    Raises:
        ValidationError: it is not in 1..vocab_size.
    """
    if not 1 <= top_k <= vocab_size:
        raise ValidationError(
            f"`top_k` must be between 1 and {vocab_size} (the vocabulary), not {top_k}"
        )


def fill_mask(
    logits: NDArray[np.float32],
    input_ids: Sequence[int],
    positions: Sequence[int],
    tokenizer: Tokenizer,
    *,
    top_k: int = 5,
    target_ids: Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> list[list[Filling]]:
    """The best fillings of each mask, best first; equal ones by token id.

    Scores are a softmax over the whole vocabulary, also when only ``target_ids`` are ranked. A
    text's only mask is filled in a ``sequence`` without special tokens; with several masks they are
    kept, so that the other masks can be seen.

    Args:
        logits: (num_masks, vocab_size) float32, a row for each of ``positions``.
        input_ids: the text's token ids.
        positions: the masks' positions in it.
        top_k: how many fillings per mask; with ``target_ids`` at most as many as they are.
        target_ids: the only tokens to rank, see `resolve_targets`.
        pad_token_id: left out of every ``sequence``.

    Raises:
        ValidationError: top_k is out of range, or a target is beyond the model's vocabulary.
        InferenceError: the logits are not numbers.
    """
    vocab_size = logits.shape[-1]
    check_top_k(top_k, vocab_size)
    candidates = None
    if target_ids is not None:
        candidates = np.unique(np.asarray(target_ids, np.int64))
        if candidates[-1] >= vocab_size:
            raise ValidationError(
                f"a target's token id is {candidates[-1]}, but the model knows only {vocab_size}"
            )
    fillings = []
    for row, position in zip(logits, positions, strict=True):
        tokens, scores = _best_tokens(row, top_k, candidates)
        texts = (
            _filled(input_ids, position, token, tokenizer, pad_token_id, len(positions) == 1)
            for token in tokens
        )
        fillings.append(
            [
                Filling(score, token, tokenizer.decode([token], skip_special_tokens=False), text)
                for score, token, text in zip(scores, tokens, texts, strict=True)
            ]
        )
    return fillings


def _mask_token(tokenizer: Tokenizer) -> str:
    if tokenizer.mask_token is None:
        raise ValidationError("this model has no mask token, so it cannot fill blanks")
    return tokenizer.mask_token


def _target_id(target: str, tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(target)
    if token_id is not None:
        return token_id
    encoding = tokenizer.encode(target, add_special_tokens=False)
    if len(encoding.ids) > 1:
        pieces = ", ".join(repr(token) for token in encoding.tokens)
        raise ValidationError(
            f"the target {target!r} is not one token: it splits into {pieces}; "
            "targets must be single tokens of the model's vocabulary"
        )
    # One special token, not asked for by its name, stands for a word that is unknown.
    if not encoding.ids or encoding.ids[0] in tokenizer.special_ids:
        raise ValidationError(f"the target {target!r} is not in the model's vocabulary")
    return encoding.ids[0]


def _best_tokens(
    logits: NDArray[np.float32], top_k: int, candidates: NDArray[np.int64] | None
) -> tuple[list[int], list[float]]:
    """The top_k tokens, of ``candidates`` or all, and their probabilities among all."""
    largest = logits.max()
    with np.errstate(invalid="ignore"):  # infinities are caught below
        total = np.exp(logits - largest).sum(dtype=np.float64)
    if not np.isfinite(total):
        raise InferenceError("the model's logits are not finite numbers for this text")
    values = logits if candidates is None else logits[candidates]
    best = _largest(values, min(top_k, len(values)))
    scores = np.exp(values[best].astype(np.float64) - float(largest)) / total
    tokens = best if candidates is None else candidates[best]
    return tokens.tolist(), scores.tolist()


def _largest(values: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The indices of the k largest values, largest first, equal ones by index, without a sort of
    all values."""
    kth = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > kth)
    equal = np.flatnonzero(values == kth)[: k - len(above)]
    chosen = np.concatenate([above, equal])
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _filled(
    input_ids: Sequence[int],
    position: int,
    token: int,
    tokenizer: Tokenizer,
    pad_token_id: int | None,
    skip_special_tokens: bool,
) -> str:
    ids = [*input_ids[:position], token, *input_ids[position + 1 :]]
    kept = [each for each in ids if each != pad_token_id]
    return tokenizer.decode(kept, skip_special_tokens=skip_special_tokens)
