"""Checks of texts and token ids against a model, before anything is tokenized or run."""

from collections.abc import Sequence
from typing import Protocol

from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError

_SECONDS_PER_CHARACTER = 0.5e-6


class NamedModel(Protocol):
    """A model's name, and what it is."""

    @property
    def name(self) -> str: ...
    @property
    def manifest(self) -> Manifest: ...


class ReadingModel(NamedModel, Protocol):
    """A model of either family, as far as its texts are concerned."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def auto_truncate(self) -> bool: ...


def check_ids(ids: Sequence[int], model: NamedModel) -> None:
    """Refuses token ids that the model does not have.

    Raises:
        ValidationError: there is one; the message has the range.
    """
    vocab_size = model.manifest.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise ValidationError(
            f"model {model.name!r} has token ids from 0 to {vocab_size - 1}, not {wrong}"
        )


def check_media(ids: Sequence[int], model: ReadingModel) -> None:
    """Refuses tokens that stand for images or sound, which the model was exported without.

    Raises:
        ValidationError: there is one; the message has its spelling.
    """
    media = model.manifest.media_tokens
    if media and not set(media).isdisjoint(ids):
        token = model.tokenizer.id_to_token(next(each for each in ids if each in media))
        raise ValidationError(
            f"{token!r} stands for an image, a video or sound, and model {model.name!r} reads text "
            "only; leave it out"
        )


def tokenizing_seconds(texts: Sequence[str]) -> float:
    """Estimate of how long it takes to tokenize some texts."""
    return sum(map(len, texts)) * _SECONDS_PER_CHARACTER


def check_characters(text: str, max_length: int, model: ReadingModel) -> None:
    """Refuses a text that has too many tokens however it is tokenized.

    Raises:
        ValidationError: it does.
    """
    if model.tokenizer.exceeds(text, max_length):
        raise ValidationError(
            f"the text has {len(text):,} characters; model {model.name!r} takes at most "
            f"{max_length} tokens; shorten it"
        )
