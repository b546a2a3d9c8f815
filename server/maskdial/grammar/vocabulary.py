"""Vocabulary: a model's tokens as llguidance knows them."""

from collections.abc import Iterator
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
        self.tokenizer = build_tokenizer(tokenizer_json, eos_token_ids)
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._end = self.tokenizer.eos_token
        self._vocab_size = vocab_size
        self._num_text = min(vocab_size, self.tokenizer.vocab_size)
        self._special = np.array(
            [i for i in range(self._num_text) if self.tokenizer.is_special_token(i)], np.intp
        )

    @cached_property
    def num_bytes(self) -> NDArray[np.int64]:
        """How many bytes of text each token has, (vocab_size,)."""
        lengths = np.zeros(self._vocab_size, np.int64)
        lengths[: self._num_text] = [len(text) for text in self._texts()]
        return lengths

    @cached_property
    def has_letters(self) -> NDArray[np.bool_]:
        """Which tokens have a letter or a digit, or bytes that are no ASCII, (vocab_size,)."""
        found = np.zeros(self._vocab_size, np.bool_)
        found[: self._num_text] = [
            not text.isascii() or any(map(str.isalnum, text.decode())) for text in self._texts()
        ]
        return found

    def _texts(self) -> Iterator[bytes]:
        return (self.tokenizer.decode_bytes([token]) for token in range(self._num_text))

    def unpack(self, mask: bytes, *, with_special: bool) -> NDArray[np.bool_]:
        """A mask of one bit per token, lowest bit first, as read-only bool (vocab_size,).

        Special tokens other than end-of-sequence are masked out unless ``with_special``.
        """
        bits = np.frombuffer(mask, np.uint8)
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[: self._num_text] = np.unpackbits(bits, count=self._num_text, bitorder="little")
        if not with_special:
            allowed[self._special] = False
        allowed[self.eos_token_ids] = bool(bits[self._end >> 3] >> (self._end & 7) & 1)
        allowed.flags.writeable = False
        return allowed

    def has_text(self, allowed: NDArray[np.bool_]) -> bool:
        """Whether a mask allows any token but an end-of-sequence token."""
        num_ends = np.count_nonzero(allowed[self.eos_token_ids])
        return bool(np.count_nonzero(allowed) > num_ends)

    def may_follow(self, token_id: int, *, with_special: bool) -> bool:
        """Whether a grammar can allow a token: one of text, or a special one ``with_special``."""
        return 0 <= token_id < self._num_text and (with_special or token_id not in self._special)
