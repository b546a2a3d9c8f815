"""Tokenizer: text to token ids and back, over a ``tokenizers`` file."""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import Encoding

from maskdial.errors import BundleError, ValidationError
from maskdial.models.bundle import SpecialTokens

TextOrIds = str | Sequence[int]
"""What a model reads: text to tokenize, or token ids."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer. Its methods may be called from several threads at once.

    Decoding never fails: ids that have no token, such as those a model's vocabulary is padded with,
    say nothing.

    Raises:
        BundleError: the decoder is one that `tokenizers` cannot run on every token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        stages = list(_decoder_stages(backend))
        if any(stage["type"] == "Strip" and stage["stop"] > 0 for stage in stages):
            # tokenizers 0.23 panics, which kills a thread, on tokens shorter than what is cut off.
            raise BundleError("the tokenizer's decoder strips the ends of tokens (Strip with stop)")
        # Sequences that hold ByteLevel in the wild hold nothing else that changes text.
        self._byte_level = any(stage["type"] == "ByteLevel" for stage in stages)
        self._byte_fallback = any(stage["type"] == "ByteFallback" for stage in stages)
        self.vocab_size: int = backend.get_vocab_size()
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        # Pieces that continue a word are marked in the vocabulary (``##``), not by spaces.
        self.marks_subwords = bool(getattr(backend.model, "continuing_subword_prefix", None))
        self.mask_token_id = special.mask
        self.mask_token = None if special.mask is None else backend.id_to_token(special.mask)

    @classmethod
    def from_file(cls, path: Path, special: SpecialTokens) -> "Tokenizer":
        """Reads ``tokenizer.json``.

        Raises:
            BundleError: the file is not a tokenizer, or not one that can be used.
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
        return self._backend.encode(text, pair, add_special_tokens=add_special_tokens)

    def encode_cut(
        self,
        text: str,
        pair: str | None = None,
        *,
        max_length: int,
        direction: Literal["left", "right"] = "right",
    ) -> Encoding:
        """Tokenizes a text or a pair and cuts tokens off until it fits, special tokens and all.

        The longer text of a pair is cut first (``longest_first`` in transformers).

        Args:
            max_length: in tokens, more than the special tokens take.
            direction: the end that is cut off.
        """
        first = self._backend.encode(text, add_special_tokens=False)
        room = max_length - self._backend.num_special_tokens_to_add(pair is not None)
        if pair is None:
            first.truncate(room, direction=direction)
            return self._backend.post_process(first)
        second = self._backend.encode(pair, add_special_tokens=False)
        limits = longest_first(len(first), len(second), room)
        for encoding, limit in zip((first, second), limits, strict=True):
            encoding.truncate(limit, direction=direction)
        return self._backend.post_process(first, second)

    def num_special_tokens(self, *, pair: bool) -> int:
        """How many tokens are added to a text, or to a pair."""
        return int(self._backend.num_special_tokens_to_add(pair))

    def join(self, first: Encoding, second: Encoding) -> Encoding:
        """Makes a pair, special tokens and all, of two texts that were tokenized without them."""
        return self._backend.post_process(first, second)

    def windows(self, text: str, *, max_length: int, stride: int) -> list[Encoding]:
        """Tokenizes a text in windows that overlap, each with the special tokens of a text.

        Their ids count; offsets are those of the whole text's own encoding, since post-processors
        trim the first token of every window.

        Args:
            max_length: of a window, in tokens, special ones among them.
            stride: tokens that neighbouring windows share.

        Raises:
            ValidationError: the windows have no room for more than the stride.
        """
        windowed = self._backend.encode(text, add_special_tokens=False)
        room = max_length - self.num_special_tokens(pair=False)
        if room <= stride:
            raise ValidationError(
                f"windows of {max_length} tokens have room for {max(room, 0)} of the text, which "
                f"must be more than the stride of {stride}"
            )
        windowed.truncate(room, stride)
        whole = self._backend.post_process(windowed)
        return [whole, *whole.overflowing]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some token ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """What one token says alone, special tokens spelled out."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, previous_id: int | None = None) -> bytes:
        """What a token adds to a text, as UTF-8: possibly only a part of a character.

        Args:
            token_id: the token.
            previous_id: the last token before it that is not special, None at a text's start, where
                SentencePiece drops a word's leading space.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if self._byte_fallback and (spelling := _BYTE_TOKEN.fullmatch(token)):
            byte = bytes.fromhex(spelling[1])
            if previous_id is not None or not byte.isascii():
                return byte
        if previous_id is None:
            return self.token_text(token_id).encode()
        # Every decoder of `tokenizers` looks back no further than one token.
        text = self.decode([previous_id, token_id], skip_special_tokens=False)
        return text[len(self.token_text(previous_id)) :].encode()

    def decode_tokens(self, tokens: Sequence[str]) -> str:
        """The text of tokens as they are spelled in the vocabulary."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @property
    def unknown_id(self) -> int:
        """The id of the token for what the vocabulary does not have; -1 where there is none."""
        names = (getattr(self._backend.model, "unk_token", None), "<unk>", "[UNK]")
        ids = (self._backend.token_to_id(name) for name in names if name is not None)
        return next((token_id for token_id in ids if token_id is not None), -1)

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry as it is spelled in the vocabulary."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token, empty for an id that has none."""
        return self._backend.id_to_token(token_id) or ""

    def is_text(self, token_id: int) -> bool:
        """Whether a token is in the vocabulary and not special: only such tokens make text."""
        return token_id not in self.special_ids and self._backend.id_to_token(token_id) is not None

    def decoder(self, prompt_ids: Sequence[int]) -> "IncrementalDecoder":
        """A decoder for the tokens that follow a prompt."""
        return IncrementalDecoder(self, prompt_ids)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of either text of a pair to keep when both are too long for the room:
    the longer is cut until they are equal, then both are.
    """
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def cut_tokens(encoding: Encoding, limit: int, direction: Literal["left", "right"]) -> Encoding:
    """A text's first ``limit`` tokens, or its last where the left end is cut off.

    `Encoding.truncate` changes its encoding, and keeps the rest in it to be copied with it.
    """
    if len(encoding) <= limit:
        return encoding
    kept = slice(limit) if direction == "right" else slice(len(encoding) - limit, None)
    fields = json.loads(encoding.__getstate__())
    state = {
        name: values[kept] if isinstance(values, list) else values
        for name, values in fields.items()
    }
    cut = Encoding()
    cut.__setstate__(json.dumps(state | {"overflowing": [], "sequence_ranges": {}}).encode())
    return cut


class IncrementalDecoder:
    """Turns a sequence's new tokens into text piece by piece, never half a character.

    Tokens become bytes, and Python's incremental decoder makes text of them as soon as they are a
    character, or U+FFFD when they are none (as section 3.9 of the Unicode standard recommends). So
    at most three bytes are held back, and a token costs the same however long the text is. Where
    all bytes are valid, the pieces join to what `Tokenizer.decode` says; where some are not, a
    ByteFallback decoder gives up their neighbours too, which a stream may have shown already.

    Others (text-generation-inference, vLLM, ``tokenizers``' DecodeStream) decode a window of tokens
    until its text does not end with U+FFFD. That holds text back while every token ends within a
    character, and goes wrong when the window begins within one.
    """

    # A character has at most four bytes, and a token at least one.
    _MOST_UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._previous_id: int | None = None
        self._prompt_marks = ""
        told = (token_id for token_id in reversed(prompt_ids) if tokenizer.is_text(token_id))
        for token_id in reversed(list(islice(told, self._MOST_UNFINISHED))):
            self.push(token_id)
        self._prompt_marks = self._utf8.getstate()[0].decode(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that it completes, possibly none.

        A character that the prompt began is returned whole when it is completed.
        """
        if not self._tokenizer.is_text(token_id):
            return ""
        new = self._tokenizer.token_bytes(token_id, self._previous_id)
        self._previous_id = token_id
        return self._without_prompt(self._utf8.decode(new))

    def flush(self) -> str:
        """The text still held back: an unfinished character, as U+FFFD."""
        return self._without_prompt(self._utf8.decode(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        if text:
            # What the prompt began and nothing completed is in the prompt's text already.
            text = text.removeprefix(self._prompt_marks)
            self._prompt_marks = ""
        return text


def _byte_alphabet() -> dict[str, int]:
    """The characters that spell bytes in byte-level vocabularies (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_ALPHABET.__getitem__, token))
    except KeyError:  # an added token, spelled as it is
        return token.encode()


def _decoder_stages(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    """The decoder's parts as ``tokenizer.json`` describes them, in order."""
    if backend.decoder is None:
        return
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        stage = pending.pop(0)
        if stage["type"] == "Sequence":
            pending = stage["decoders"] + pending
        else:
            yield stage
