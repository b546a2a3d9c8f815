"""Place: where a text stands in a grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from maskdial.grammar.source import grammar_error
from maskdial.grammar.vocabulary import Vocabulary


class Place:
    """Where a text stands in a grammar: llguidance's parser, which reads a model's tokens. For one
    thread at a time.

    Args:
        matcher: llguidance's, of this object's own.
        vocabulary: the model's.
        first: whether the text begins here, so that the next token is spelled as the first one.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, first: bool) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.first = first

    def copy(self) -> "Place":
        """The same place, for another text that goes on from it."""
        return Place(self._matcher.deep_copy(), self._vocabulary, first=self.first)

    @property
    def may_end(self) -> bool:
        """Whether the grammar accepts the text."""
        return bool(self._matcher.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> bytes:
        """Of what may follow, for `Vocabulary.unpack`.

        Raises:
            ValidationError: the grammar became too complex.
        """
        mask: bytes = self._matcher.compute_bitmask()
        error = self._matcher.get_error()
        if error.startswith("NoExtensionBias"):
            return bytes(len(mask))  # no token of this model has a text that may follow
        if error:
            raise grammar_error(error)
        return mask

    def unpack(self, mask: bytes, *, with_special: bool) -> NDArray[np.bool_]:
        """The tokens of this place's mask, read-only bool (vocab_size,)."""
        return self._vocabulary.unpack(mask, first=self.first, with_special=with_special)

    def forced(self) -> tuple[int, ...]:
        """The tokens of the text that has to follow, as the tokenizer divides it, if it knows."""
        return tuple(self._matcher.compute_ff_tokens())

    def read(self, token_id: int) -> None:
        """Goes on by a token.

        Raises:
            ValidationError: the grammar does not allow it, or became too complex. The place is of
                no use afterwards.
        """
        text_id = self._vocabulary.text_id(token_id, first=self.first)
        if text_id >= 0 and not self._matcher.consume_token(text_id):
            raise grammar_error(self._matcher.get_error())
        self.first = False

    def read_all(self, token_ids: Sequence[int]) -> bool:
        """Goes on by tokens, and says whether it could. If not, the place is of no use."""
        text_ids = self._vocabulary.text_ids(token_ids, first=self.first)
        self.first = self.first and not token_ids
        return int(self._matcher.try_consume_tokens(text_ids)) == len(text_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of some tokens, from the first, may follow."""
        text_ids = self._vocabulary.text_ids(token_ids, first=self.first)
        num_textless = len(token_ids) - len(text_ids)
        return num_textless + (int(self._matcher.validate_tokens(text_ids)) if text_ids else 0)

    def error(self) -> str:
        """What llguidance says is wrong; empty if nothing is."""
        return str(self._matcher.get_error())
