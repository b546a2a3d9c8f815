"""Tokenizer: text to token ids and back, over a ``tokenizers`` file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from maskdial.bundle import SpecialTokens
from maskdial.errors import BundleError


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tokenized text (or pair), special tokens included, without padding.

    ``offsets`` are (start, end) in characters of the text that each token came from.
    """

    ids: list[int]
    type_ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """A model's tokenizer. Its methods may be called from several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.mask_token_id = special.mask
        self.mask_token = None if special.mask is None else backend.id_to_token(special.mask)

    @classmethod
    def from_file(cls, path: Path, special: SpecialTokens) -> "Tokenizer":
        """Reads ``tokenizer.json``.

        Raises:
            BundleError: the file is not a tokenizer.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise BundleError(f"{path} is not a readable tokenizer: {error}") from error
        return cls(backend, special)

    def encode(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True
    ) -> Encoding:
        """Tokenizes a text, or a pair of texts as one input."""
        encoding = self._backend.encode(text, pair, add_special_tokens=add_special_tokens)
        return Encoding(encoding.ids, encoding.type_ids, encoding.tokens, encoding.offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some token ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """What one token says alone, special tokens spelled out."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry as it is spelled in the vocabulary."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token, empty for an id that has none."""
        return self._backend.id_to_token(token_id) or ""

    def decoder(self, prompt_ids: Sequence[int]) -> "IncrementalDecoder":
        """A decoder for the tokens that follow a prompt."""
        return IncrementalDecoder(self._backend, prompt_ids)


class IncrementalDecoder:
    """Turns a sequence's new tokens into text piece by piece, never half a character.

    New tokens are decoded together with the few before them, so a SentencePiece word keeps its
    leading space (the scheme of text-generation-inference and vLLM). ``tokenizers``' DecodeStream
    does the same but cannot give back what it holds when a text ends within a character.
    """

    # Enough tokens before the first new one that decoders, which look one piece back, and an
    # unfinished character of four byte tokens come out as they would after the whole prompt.
    _CONTEXT = 6

    def __init__(self, backend: tokenizers.Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._backend = backend
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._known = len(self._ids)
        self._known_text = self._decode()

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that it completes, possibly none."""
        self._ids.append(token_id)
        text = self._decode()
        if len(text) <= len(self._known_text) or text.endswith("\ufffd"):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """The text still held back: an unfinished character, as U+FFFD."""
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        new = text[len(self._known_text) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._known_text = self._decode()
        return new

    def _decode(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=True)
