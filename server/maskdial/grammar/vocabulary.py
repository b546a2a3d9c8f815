"""Vocabulary: a model's tokens as llguidance knows them."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from maskdial.grammar.build import build_tokenizer


class Vocabulary:
    """Turns llguidance's masks into the sampler's.

    Args:
        tokenizer_json: the content of the model's ``tokenizer.json``.
        vocab_size: the width of the model's logits; it may exceed the tokenizer's vocabulary.
        eos_token_ids: the model's end-of-sequence tokens, possibly none, in ascending order.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.tokens = build_tokenizer(tokenizer_json, eos_token_ids)
        self._reader = self.tokens.tokenizer
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._end = self._reader.eos_token
        self._vocab_size = vocab_size
        spelled = self.tokens.spellings
        num_tokens = self._reader.vocab_size if spelled is None else len(spelled.within)
        self._num_text = min(vocab_size, num_tokens)
        special = [i for i in range(self._num_text) if self._is_special(i)]
        self._special = np.array(special, np.intp)

    def text_id(self, token_id: int, *, first: bool) -> int:
        """Which of llguidance's texts a token stands for; -1 for none.

        ``first`` is whether the text begins with it.
        """
        spelled = self.tokens.spellings
        if spelled is None or not 0 <= token_id < self._num_text:
            return token_id
        return int((spelled.first if first else spelled.within)[token_id])

    def text_ids(self, token_ids: Sequence[int], *, first: bool) -> list[int]:
        """Those of tokens in a row, without a first one that has no text."""
        if self.tokens.spellings is None:
            return list(token_ids)
        ids = [
            self.text_id(token_id, first=first and index == 0)
            for index, token_id in enumerate(token_ids)
        ]
        return ids[1:] if ids and ids[0] < 0 else ids

    def _is_special(self, token_id: int) -> bool:
        return bool(self._reader.is_special_token(self.text_id(token_id, first=False)))

    def num_bytes(self, token_ids: Sequence[int]) -> int:
        """How many bytes a text of tokens has."""
        return len(self._reader.decode_bytes(self.text_ids(token_ids, first=True)))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """How many bytes of text each token has behind others, int64 (vocab_size,)."""
        lengths = np.zeros(self._vocab_size, np.int64)
        lengths[: self._num_text] = [len(text) for text in self._texts()]
        return lengths

    @cached_property
    def has_letters(self) -> NDArray[np.bool_]:
        """Which tokens have a letter or a digit, or bytes that are no ASCII, bool (vocab_size,)."""
        found = np.zeros(self._vocab_size, np.bool_)
        found[: self._num_text] = [
            not text.isascii() or any(map(str.isalnum, text.decode())) for text in self._texts()
        ]
        return found

    def _texts(self) -> Iterator[bytes]:
        ids = (self.text_id(token_id, first=False) for token_id in range(self._num_text))
        return (self._reader.decode_bytes([text_id]) for text_id in ids)

    def unpack(self, mask: bytes, *, first: bool, with_special: bool) -> NDArray[np.bool_]:
        """A mask of one bit per text, lowest bit first, as read-only bool (vocab_size,).

        ``first`` is whether the text begins here. Special tokens other than end-of-sequence are
        masked out unless ``with_special``.
        """
        bits = np.frombuffer(mask, np.uint8)
        texts = np.unpackbits(bits, count=self._reader.vocab_size, bitorder="little").view(np.bool_)
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[: self._num_text] = self._of_texts(texts, first=first)
        if not with_special:
            allowed[self._special] = False
        allowed[self.eos_token_ids] = bool(texts[self._end])
        allowed.flags.writeable = False
        return allowed

    def _of_texts(self, texts: NDArray[np.bool_], *, first: bool) -> NDArray[np.bool_]:
        spelled = self.tokens.spellings
        if spelled is None:
            return texts[: self._num_text]
        within = texts[spelled.within[: self._num_text]]
        if not first:
            return within
        # A token without text, such as a single space, may come first if another may follow it.
        goes_on = np.delete(within, self._special).any()
        ids = spelled.first[: self._num_text]
        return np.where(ids < 0, goes_on, texts[ids])

    def has_text(self, allowed: NDArray[np.bool_]) -> bool:
        """Whether a mask, uint32 (ceil(vocab_size / 32),), allows any token but an end-of-sequence
        token.
        """
        num_ends = np.count_nonzero(allowed[self.eos_token_ids])
        return bool(np.count_nonzero(allowed) > num_ends)

    def may_follow(self, token_id: int, *, with_special: bool) -> bool:
        """Whether a grammar can allow a token: one of text, or a special one ``with_special``."""
        return 0 <= token_id < self._num_text and (with_special or token_id not in self._special)
