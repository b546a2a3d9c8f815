"""Tokenizer: text to token ids and back, using a ``tokenizers`` file."""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Encoding

from maskdial.bundle.manifest import Side, SpecialTokens, Tokenization
from maskdial.errors import BundleError, ValidationError

TextOrIds = str | Sequence[int]
"""What a model reads: text to tokenize, or token ids."""

_MAX_SHORT_TEXT = 1000  # characters; about 0.5 ms
_MAX_WORDS = 1000  # about 0.5 ms
_MAX_SHORT_IDS = 2000  # about 0.3 ms
# WordPiece reads words of more than 100 characters as one unknown token.
_MIN_LONGEST_TOKEN = 100
# Unicode's own normal forms make a character at most 18 characters.
_MAX_GROWTH = 100
_MOST_SPACES = 8  # characters in a row that may belong to no token
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_PLAIN = Tokenization()
_LEADING_CODE = re.compile(">>.*?<<", re.DOTALL)


class Tokenizer:
    """A model's tokenizer. Its methods may be called from several threads at once.

    Decoding never fails: ids without a token, such as the padding of a model's vocabulary, decode
    to nothing.

    Args:
        backend: what ``tokenizer.json`` describes.
        special: the ids of special tokens.
        settings: what the file does not say.

    Raises:
        BundleError: `tokenizers` cannot run the decoder on every token, or the normalizer makes
            long texts of short ones.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        settings: Tokenization = _PLAIN,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._unprocessed = _without_post_processor(backend)
        stages = list(_stages(backend.decoder))
        if any(stage["type"] == "Strip" and stage["stop"] > 0 for stage in stages):
            # On tokens shorter than what it strips, tokenizers 0.23 panics, which kills the thread.
            raise BundleError("the tokenizer's decoder strips the ends of tokens (Strip with stop)")
        # Decoders in the wild that contain ByteLevel contain nothing else that changes text.
        if _growth(backend) > _MAX_GROWTH:
            raise BundleError(
                "the tokenizer's normalizer may make a text more than "
                f"{_MAX_GROWTH} times as long (Replace)"
            )
        self._byte_level = any(stage["type"] == "ByteLevel" for stage in stages)
        self._trims_offsets = any(map(_trims_offsets, _stages(backend.post_processor)))
        self._byte_fallback = any(stage["type"] == "ByteFallback" for stage in stages)
        self.vocab_size: int = backend.get_vocab_size()
        vocabulary = backend.get_vocab()  # that of Gemma takes half a second
        self._longest_token = max(_MIN_LONGEST_TOKEN, *map(len, vocabulary))
        ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
        self._has_token = np.zeros(ids.max(initial=-1) + 1, np.bool_)
        self._has_token[ids] = True
        added = backend.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Pieces that continue a word are marked in the vocabulary (``##``), not by spaces.
        self.marks_subwords = bool(getattr(backend.model, "continuing_subword_prefix", None))
        self._leading_code = settings.leading_code
        self.mask_token_id = special.mask
        self.mask_token = None if special.mask is None else backend.id_to_token(special.mask)

    @classmethod
    def from_file(
        cls, path: Path, special: SpecialTokens, settings: Tokenization = _PLAIN
    ) -> "Tokenizer":
        """Reads ``tokenizer.json``.

        Raises:
            BundleError: the file is not a tokenizer, or its decoder cannot be used.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise BundleError(f"{path} is not a readable tokenizer: {error}") from error
        return cls(backend, special, settings)

    def exceeds(self, text: str, max_length: int) -> bool:
        """Whether a text is longer than ``max_length`` tokens of the longest kind.

        Such texts are refused without tokenizing them, as in vLLM: that takes a second and hundreds
        of megabytes for a text of 2 MB.
        """
        return self.least_tokens(text) > max_length

    def least_tokens(self, text: str) -> int:
        """The tokens of a text if they were all of the longest kind."""
        return -(-len(text) // self._longest_token)

    def encode(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True
    ) -> Encoding:
        """Tokenizes a text, or a pair of texts as one input.

        Raises:
            ValidationError: one of the tokenizer's regular expressions gives up on the text.
        """
        if self._begins_with_code(text) is None:
            return _encode(self._backend, text, pair, add_special_tokens=add_special_tokens)
        second = None if pair is None else _encode(self._unprocessed, pair)
        return self._backend.post_process(self._split(text), second, add_special_tokens)

    def _begins_with_code(self, text: str) -> re.Match[str] | None:
        return _LEADING_CODE.match(text) if self._leading_code else None

    def _split(self, text: str) -> Encoding:
        """Tokenizes what `post_process` is still to see: it trims offsets whenever it is called."""
        code = self._begins_with_code(text)
        if code is None:
            return _encode(self._unprocessed, text)
        rest = _encode(self._unprocessed, text[code.end() :])
        return Encoding.merge([self._one_token(code[0]), rest], growing_offsets=True)

    def _one_token(self, text: str) -> Encoding:
        """A text as a single token, the unknown one if it is none of the vocabulary."""
        known = self._backend.token_to_id(text)
        token_id = self.unknown_id if known is None else known
        one = Encoding()
        state = json.loads(one.__getstate__()) | {
            "ids": [token_id],
            "type_ids": [0],
            "tokens": [self.id_to_token(token_id)],
            "words": [None],
            "offsets": [(0, len(text))],
            "special_tokens_mask": [0],
            "attention_mask": [1],
        }
        one.__setstate__(json.dumps(state).encode())
        return one

    def encode_cut(
        self,
        text: str,
        pair: str | None = None,
        *,
        max_length: int,
        direction: Side = "right",
    ) -> tuple[Encoding, int]:
        """Tokenizes a text or a pair, truncated so that it fits with its special tokens.

        The longer text of a pair is truncated first (``longest_first`` in transformers).

        Args:
            text: the text, or the first one of a pair.
            pair: the second text of a pair.
            max_length: in tokens, larger than the number of special tokens.
            direction: the end at which tokens are cut off.

        Returns:
            The encoding, and how many tokens were cut off.

        Raises:
            ValidationError: as `encode`.
        """
        first = self._split(text)
        room = max_length - self.num_special_tokens(pair=pair is not None)
        if pair is None:
            excess = max(len(first) - room, 0)
            return self._backend.post_process(shorten(first, room, direction)), excess
        second = _encode(self._unprocessed, pair)
        excess = len(first) + len(second) - room
        if excess > 0:
            limits = longest_first(len(first), len(second), room)
            first, second = map(shorten, (first, second), limits, (direction, direction))
        return self._backend.post_process(first, second), max(excess, 0)

    def offsets(self, text: str, encoding: Encoding) -> list[int]:
        """Where the tokens of a text begin in it, in characters, as it was before normalization.

        Tokens with parts of one character begin where the character does. Special tokens that were
        put before or after the text begin at its ends.
        """
        offsets = []
        outside = 0  # where special tokens are
        described = zip(encoding.ids, spans(encoding), encoding.special_tokens_mask, strict=True)
        for token_id, (start, _), is_special in described:
            if is_special:
                offsets.append(outside)
                continue
            if self._trims_offsets:  # the library leaves out the spaces that a token begins with
                token = self.id_to_token(token_id)
                start -= len(token) - len(token.lstrip("Ġ "))
            offsets.append(max(start, 0))
            outside = len(text)
        return offsets

    def num_special_tokens(self, *, pair: bool) -> int:
        """The number of special tokens that are added to a text, or to a pair."""
        return int(self._backend.num_special_tokens_to_add(pair))

    def encode_words(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokenizes words, each by itself, without special tokens; token ids, int64.

        Returns:
            The tokens' ids, and the place of each one's word; a word may have no tokens.

        Raises:
            ValidationError: as `encode`.
        """
        ids: list[NDArray[np.int64]] = []
        places: list[NDArray[np.int64]] = []
        # Not all at once: `Encoding.word_ids` holds the GIL until it has made all of them.
        for first in range(0, len(words), _MAX_WORDS):
            batch = [list(words[first : first + _MAX_WORDS])]
            try:
                # As in `encode`: a batch releases the GIL.
                (encoding,) = self._unprocessed.encode_batch(batch, is_pretokenized=True)
            except BaseException as error:
                raise _refused(error) from error
            ids.append(np.array(encoding.ids, np.int64))
            places.append(first + np.array(encoding.word_ids, np.int64))
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *ids]), np.concatenate([none, *places])

    def encode_each(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokenizes short texts, each as one by itself, without special tokens; token ids, int64.

        A word is tokenized as one within a text by `encode_words`, and as a text here.

        Returns:
            The tokens' ids, and the place of each one's text; a text may have no tokens.

        Raises:
            ValidationError: as `encode`.
        """
        ids: list[int] = []
        counts: list[int] = []
        for first in range(0, len(texts), _MAX_WORDS):
            try:
                encodings = self._unprocessed.encode_batch(list(texts[first : first + _MAX_WORDS]))
            except BaseException as error:
                raise _refused(error) from error
            for encoding in encodings:
                ids += encoding.ids
                counts.append(len(encoding))
        return np.array(ids, np.int64), np.repeat(np.arange(len(texts)), counts)

    def ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before a text, and those after it."""
        text = self._backend.post_process(self._one_token(self.id_to_token(0)))
        at = text.special_tokens_mask.index(0)
        return text.ids[:at], text.ids[at + 1 :]

    def join(self, first: Encoding, second: Encoding) -> Encoding:
        """Makes a pair, with special tokens, of two texts that were tokenized without them."""
        return self._backend.post_process(first, second)

    def windows(self, text: str, *, max_length: int, stride: int) -> list[Encoding]:
        """Tokenizes a text in overlapping windows, each with the special tokens of a text.

        Use the windows' ids only: post-processors trim the offsets of each window's first token, so
        offsets must come from an encoding of the whole text.

        Args:
            text: the text.
            max_length: length of a window in tokens, special tokens included.
            stride: number of tokens that neighboring windows share.

        Raises:
            ValidationError: a window has no room for more than the stride.
        """
        windowed = self._split(text)
        room = max_length - self.num_special_tokens(pair=False)
        if room <= stride:
            raise ValidationError(
                f"windows of {max_length} tokens have room for {max(room, 0)} tokens of the text, "
                f"which must be more than the stride of {stride}"
            )
        return [self._backend.post_process(each) for each in split_up(windowed, room, stride)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a list of token ids."""
        if len(ids) <= _MAX_SHORT_IDS:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        # As in `encode`: a batch releases the GIL.
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """The text of a single token; special tokens are spelled out."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, previous_id: int | None = None) -> bytes:
        """What a token adds to a text, in UTF-8; it may be only a part of a character.

        Args:
            token_id: the token.
            previous_id: the last token before it that is not special; None at the start of a text,
                where SentencePiece drops a word's leading space.
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

    @functools.cached_property
    def spellings(self) -> tuple[bytes, ...]:
        """The UTF-8 of every token within a text, by id; some are only a part of a character.

        The first time, a vocabulary of 150,000 tokens takes about a second.
        """
        return tuple(self.token_bytes(token_id, 0) for token_id in range(self.vocab_size))

    def decode_tokens(self, tokens: Sequence[str]) -> str:
        """The text of tokens, given as they are spelled in the vocabulary."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @property
    def unknown_id(self) -> int:
        """The id of the unknown token; -1 if the vocabulary has none."""
        names = (getattr(self._backend.model, "unk_token", None), "<unk>", "[UNK]")
        ids = (self._backend.token_to_id(name) for name in names if name is not None)
        return next((token_id for token_id in ids if token_id is not None), -1)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as it is spelled in the vocabulary; None if there is none."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token; empty for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def ids_without_token(self, vocab_size: int) -> frozenset[int]:
        """The ids below ``vocab_size``, a model's, that are no token's."""
        gaps = np.flatnonzero(~self._has_token[:vocab_size]).tolist()
        return frozenset([*gaps, *range(len(self._has_token), vocab_size)])

    def is_text(self, token_id: int) -> bool:
        """Whether a token is in the vocabulary and not special; only such tokens become text."""
        return token_id not in self.special_ids and self._backend.id_to_token(token_id) is not None

    def decoder(self, prompt_ids: Sequence[int]) -> "IncrementalDecoder":
        """A decoder for the tokens that follow a prompt."""
        return IncrementalDecoder(self, prompt_ids)


class TokenSpeller:
    """Spells a sequence's tokens one by one, each as it reads after the previous one.

    The texts of a text's own tokens join to the text, unless a character is spread over several.

    Args:
        tokenizer: the model's.
        prompt_ids: tokens before the first one to spell.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._previous_id = next((i for i in reversed(prompt_ids) if tokenizer.is_text(i)), None)

    def spell(self, token_id: int) -> bytes:
        """The UTF-8 of a token in this place, possibly only a part of a character."""
        return self._tokenizer.token_bytes(token_id, self._previous_id)

    def text(self, token_id: int) -> str:
        """The text of a token in this place, with U+FFFD for a part of a character."""
        return self.spell(token_id).decode(errors="replace")

    def advance(self, token_id: int) -> None:
        """Moves to the place after a token."""
        if self._tokenizer.is_text(token_id):
            self._previous_id = token_id


def _encode(
    backend: tokenizers.Tokenizer,
    text: str,
    pair: str | None = None,
    *,
    add_special_tokens: bool = False,
) -> Encoding:
    try:
        if len(text) + len(pair or "") <= _MAX_SHORT_TEXT:
            return backend.encode(text, pair, add_special_tokens=add_special_tokens)
        # Unlike `encode`, a batch of one releases the GIL, so other threads run meanwhile.
        batch = [text if pair is None else (text, pair)]
        return backend.encode_batch(batch, add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        raise _refused(error) from error


def _refused(error: BaseException) -> ValidationError:
    """What a panic of the library is to a client; other errors are raised again.

    It is no `Exception`, so nothing else would turn it into a reply.
    """
    if type(error).__name__ != "PanicException":
        raise error
    return ValidationError("the model's tokenizer cannot split this text")


def spans(encoding: Encoding, tokens: Iterable[int] | None = None) -> Iterator[tuple[int, int]]:
    """Where tokens are in the text, start and end in characters; (0, 0) for special ones.

    `Encoding.offsets` holds the GIL until it has made all of them, half a second for 2 MB.

    Args:
        encoding: of the text.
        tokens: by their places in the encoding; all if None.
    """
    for place in range(len(encoding)) if tokens is None else tokens:
        found = encoding.token_to_chars(place)
        yield (0, 0) if found is None else found


def tokens_before(encoding: Encoding, borders: Iterable[int]) -> tuple[int, ...]:
    """How many whole tokens there are before places in the text; without places at its end.

    Args:
        encoding: of the text.
        borders: the places, in characters.
    """
    found = set()
    for border in borders:
        for place in range(border, border + _MOST_SPACES):
            token = encoding.char_to_token(place)
            if token is not None:
                found.add(token)
                break
    return tuple(sorted(found))


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text of a pair to keep, if together they exceed the room.

    The longer text is truncated until both are equally long, then both are.
    """
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def shorten(encoding: Encoding, limit: int, direction: Side) -> Encoding:
    """As `cut_tokens`, of a text that nothing else needs any more: it is changed in place.

    For a text of megabytes, that is the difference between a tenth of a second and several, within
    which nothing else runs; and so is to leave the rest behind.
    """
    if len(encoding) <= limit:
        return encoding
    encoding.truncate(limit, direction=direction)
    return _without_the_rest(encoding)


def split_up(encoding: Encoding, length: int, stride: int) -> list[Encoding]:
    """A text in pieces of ``length`` tokens, which share ``stride`` tokens with their neighbors.

    The encoding is changed in place. Each piece is without the others: whatever is done with one
    that has them is done with all, and nothing else runs meanwhile.
    """
    if len(encoding) <= length:
        return [encoding]
    encoding.truncate(length, stride)
    return [_without_the_rest(encoding), *encoding.overflowing]


def _without_the_rest(encoding: Encoding) -> Encoding:
    """A text that was truncated, without what was cut off."""
    return _made_of(
        {
            "ids": encoding.ids,
            "type_ids": encoding.type_ids,
            "tokens": encoding.tokens,
            "words": encoding.word_ids,
            "offsets": encoding.offsets,
            "special_tokens_mask": encoding.special_tokens_mask,
            "attention_mask": encoding.attention_mask,
        }
    )


def cut_tokens(encoding: Encoding, limit: int, direction: Side) -> Encoding:
    """A text's first ``limit`` tokens, or its last ones if ``direction`` is left.

    `Encoding.truncate` would change the encoding in place, and keep the rest in it.
    """
    if len(encoding) <= limit:
        return encoding
    kept = slice(limit) if direction == "right" else slice(len(encoding) - limit, None)
    fields = json.loads(encoding.__getstate__())
    state = {
        name: values[kept] if isinstance(values, list) else values
        for name, values in fields.items()
    }
    return _made_of(state)


def _made_of(state: dict[str, Any]) -> Encoding:
    made = Encoding()
    made.__setstate__(json.dumps(state | {"overflowing": [], "sequence_ranges": {}}).encode())
    return made


class IncrementalDecoder:
    """Turns a sequence's new tokens into text piece by piece, never into half a character.

    Tokens become bytes. Python's incremental decoder turns these into text as soon as a character
    is complete, and invalid bytes into U+FFFD (as section 3.9 of the Unicode standard recommends).
    So at most three bytes are held back, and the cost of a token does not depend on the length of
    the text. If all bytes are valid, the pieces join to the result of `Tokenizer.decode`. If some
    are not, a ByteFallback decoder drops their neighbors too, which a stream may have sent already.

    Others (text-generation-inference, vLLM, ``tokenizers``' DecodeStream) decode a window of tokens
    until its text does not end with U+FFFD. That holds text back as long as every token ends within
    a character, and fails if the window begins within one.
    """

    # A character has at most four bytes, and a token at least one.
    _MAX_UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._previous_id: int | None = None
        self._prompt_marks = ""
        told = (token_id for token_id in reversed(prompt_ids) if tokenizer.is_text(token_id))
        for token_id in reversed(list(islice(told, self._MAX_UNFINISHED))):
            self.push(token_id)
        self._prompt_marks = self._utf8.getstate()[0].decode(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that it completes, which may be empty.

        A character that began in the prompt is returned as a whole when it is complete.
        """
        if not self._tokenizer.is_text(token_id):
            return ""
        new = self._tokenizer.token_bytes(token_id, self._previous_id)
        self._previous_id = token_id
        return self._without_prompt(self._utf8.decode(new))

    def num_broken_by(self, token_id: int) -> int:
        """How many U+FFFD come before the text of the next token: one if it breaks a character off.

        A character that began in the prompt is in the prompt's text.
        """
        unfinished, _ = self._utf8.getstate()
        if not unfinished or self._prompt_marks or not self._tokenizer.is_text(token_id):
            return 0
        new = self._tokenizer.token_bytes(token_id, self._previous_id)
        return len((unfinished + new[:1]).decode(errors="replace")) - 1

    def flush(self) -> str:
        """The text that is still held back: U+FFFD for an unfinished character."""
        return self._without_prompt(self._utf8.decode(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        if text:
            # A character that began in the prompt and was never completed is in the prompt's text.
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


def _without_post_processor(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, which adds no tokens and trims no offsets; the two share their model."""
    bare = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        bare.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        bare.pre_tokenizer = backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    for special, group in groupby(added, key=lambda each: each[1].special):
        tokens = [token for _, token in group]
        _ = bare.add_special_tokens(tokens) if special else bare.add_tokens(tokens)
    # The library numbers them on from the model's, in the order in which they come.
    assert bare.get_added_tokens_decoder() == backend.get_added_tokens_decoder()
    return bare


def _growth(backend: tokenizers.Tokenizer) -> float:
    """How many times as long the normalizer's replacements may make a text, at most."""
    growth = 1.0
    pending = [] if backend.normalizer is None else [json.loads(backend.normalizer.__getstate__())]
    while pending:
        stage = pending.pop()
        pending += stage.get("normalizers", ())
        if stage["type"] == "Replace":
            text = stage["pattern"].get("String")
            # A regular expression may match nothing before each character.
            new = len(stage["content"])
            growth *= max(1, new / len(text)) if text else 1 + new
    return growth


def _stages(part: Any) -> Iterator[dict[str, Any]]:
    """The stages of a decoder or post-processor as ``tokenizer.json`` describes them, in order."""
    if part is None:
        return
    pending = [json.loads(part.__getstate__())]
    while pending:
        stage = pending.pop(0)
        if stage["type"] == "Sequence":
            pending = [*stage.get("decoders", ()), *stage.get("processors", ()), *pending]
        else:
            yield stage


def _trims_offsets(stage: dict[str, Any]) -> bool:
    return stage["type"] in ("ByteLevel", "RobertaProcessing") and bool(stage["trim_offsets"])
