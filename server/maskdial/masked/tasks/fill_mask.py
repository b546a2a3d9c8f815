"""Fill-mask: the best tokens for every mask of a text.

Scores, order and texts follow transformers' FillMaskPipeline, with two deliberate differences: a
target that is not a single token is refused instead of shortened to its first one, and ties are in
the order of token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.elementary import exp
from maskdial.engine.logits import largest_indices, log_normalizer
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    masked_input,
    read_texts,
)

MASK_ALIASES = ("[MASK]", "<mask>")

_MAX_FILLINGS = 10_000
_SECONDS_PER_FILLING = 30e-6  # each decodes the whole text


@dataclass(frozen=True, slots=True)
class Filling:
    """One token for one mask: its probability, id and text, and the text with the mask filled."""

    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, slots=True)
class FillMaskRequest(TaskRequest[list[list[list[Filling]]]]):
    """Texts whose masks to fill. ``targets``: the only words to score, one token each."""

    task: ClassVar[str] = "fill-mask"
    head: ClassVar[TaskName] = "fill-mask"

    texts: Sequence[str]
    truncation: Truncation = REFUSE
    top_k: int = 5
    targets: Sequence[str] | None = None

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds(self.texts)

    def check(self, model: TaskModel) -> None:
        vocab_size = model.manifest.vocab_size
        if not 1 <= self.top_k <= vocab_size:
            raise ValidationError(
                f"must be between 1 and {vocab_size} (the vocabulary), not {self.top_k}",
                field="top_k",
            )

    def read(self, model: TaskModel) -> Reading[list[list[list[Filling]]]]:
        """The answer has, for each text, for each of its masks, the fillings, best first."""
        tokenizer = model.tokenizer
        target_ids = None
        if self.targets is not None:
            target_ids = resolve_targets(self.targets, tokenizer, model.manifest.vocab_size)
        texts = [write_masks(text, tokenizer) for text in self.texts]
        encodings, num_truncated = read_texts(
            model, [(text, None) for text in texts], self.truncation
        )
        inputs = []
        for index, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
            with about("texts", index):
                if num_truncated:
                    check_masks_kept(text, encoding.ids, tokenizer)
                inputs.append(masked_input(encoding, mask_positions(encoding.ids, tokenizer)))
        per_mask = self.top_k if target_ids is None else min(self.top_k, len(target_ids))
        num_fillings = _count_fillings(inputs, per_mask)

        def answer(results: Sequence[MaskedResult]) -> list[list[list[Filling]]]:
            return [
                fill_mask(
                    result.logits,
                    given.input_ids,
                    given.rows,
                    tokenizer,
                    top_k=self.top_k,
                    target_ids=target_ids,
                    pad_token_id=model.manifest.special_tokens.pad,
                )
                for given, result in zip(inputs, results, strict=True)
            ]

        return Reading(inputs, answer, num_truncated, num_fillings * _SECONDS_PER_FILLING)


def write_masks(text: str, tokenizer: Tokenizer) -> str:
    """The text with every ``[MASK]`` and ``<mask>`` written as the model's own mask token.

    Raises:
        ValidationError: the model has no mask token.
    """
    for alias in MASK_ALIASES:
        text = text.replace(alias, _mask_token(tokenizer))
    return text


def mask_positions(input_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The positions of the masks among a text's token ids, in order.

    Raises:
        ValidationError: there is none, or the model has no mask token.
    """
    mask_token = _mask_token(tokenizer)
    positions = tuple(i for i, each in enumerate(input_ids) if each == tokenizer.mask_token_id)
    if not positions:
        raise ValidationError(f"the text has no mask; write {mask_token} where a word is missing")
    return positions


def check_masks_kept(text: str, input_ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Refuses to truncate a mask.

    Args:
        text: the whole text, its masks written as `write_masks` does.
        input_ids: what is left of it, with special tokens.

    Raises:
        ValidationError: a mask was cut off.
    """
    num_masks = text.count(_mask_token(tokenizer))
    num_cut = num_masks - sum(each == tokenizer.mask_token_id for each in input_ids)
    if num_cut > 0:
        raise ValidationError(
            f"{num_cut} of the text's {num_masks} masks would be truncated; shorten the text, or "
            'cut its other end with "truncation_direction"'
        )


def resolve_targets(
    targets: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[int, ...]:
    """The token ids of target words, without duplicates, ascending.

    A target is looked up as the vocabulary spells it (``"Ġcapital"``), then tokenized
    (``" capital"``).

    Raises:
        ValidationError: a target is not exactly one token of the model's vocabulary.
    """
    return tuple(sorted({_target_id(target, tokenizer, vocab_size) for target in targets}))


def fill_mask(
    logits: NDArray[np.float32],
    input_ids: Sequence[int],
    positions: Sequence[int],
    tokenizer: Tokenizer,
    *,
    top_k: int,
    target_ids: Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> list[list[Filling]]:
    """The best fillings of each mask, best first; ties by token id.

    Scores are a softmax over the whole vocabulary, also if only ``target_ids`` are ranked. The
    ``sequence`` of a text with one mask has no special tokens; with several masks they are kept, so
    that the other masks stay visible.

    Args:
        logits: (num_masks, vocab_size) float32, a row for each of ``positions``.
        input_ids: the text's token ids.
        positions: the positions of its masks.
        top_k: fillings per mask; at most as many as there are ``target_ids``.
        target_ids: the only tokens to rank, see `resolve_targets`.
        pad_token_id: left out of every ``sequence``.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    candidates = None if target_ids is None else np.unique(np.asarray(target_ids, np.int64))
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
        raise ValidationError("this model has no mask token, so it cannot fill masks")
    return tokenizer.mask_token


def _count_fillings(inputs: Sequence[MaskedInput], per_mask: int) -> int:
    num_masks = sum(len(given.rows) for given in inputs)
    if num_masks * per_mask > _MAX_FILLINGS:
        raise ValidationError(
            f"{num_masks * per_mask:,} answers for {num_masks} masks; one request may ask for at "
            f"most {_MAX_FILLINGS:,}",
            field="top_k",
        )
    return num_masks * per_mask


def _target_id(target: str, tokenizer: Tokenizer, vocab_size: int) -> int:
    token_id = tokenizer.token_to_id(target)
    if token_id is None:
        encoding = tokenizer.encode(target, add_special_tokens=False)
        if len(encoding.ids) > 1:
            pieces = ", ".join(repr(token) for token in encoding.tokens)
            raise ValidationError(
                f"the target {target!r} is not a single token of the model's vocabulary: it "
                f"splits into {pieces}",
                field="targets",
            )
        # A single special token that was not asked for by name stands for an unknown word.
        known = encoding.ids and encoding.ids[0] not in tokenizer.special_ids
        token_id = encoding.ids[0] if known else None
    if token_id is None or token_id >= vocab_size:
        raise ValidationError(
            f"the target {target!r} is not in the model's vocabulary", field="targets"
        )
    return token_id


def _best_tokens(
    logits: NDArray[np.float32], top_k: int, candidates: NDArray[np.int64] | None
) -> tuple[list[int], list[float]]:
    """The top_k tokens, of ``candidates`` or all, and their probabilities among all."""
    largest, total = log_normalizer(logits)
    values = logits if candidates is None else logits[candidates]
    best = largest_indices(values, min(top_k, len(values)))
    scores = exp(values[best].astype(np.float64) - largest) / total
    tokens = best if candidates is None else candidates[best]
    return tokens.tolist(), scores.tolist()


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
