"""Control tokens in what a request says, read as the text that they are.

As transformers does it (``apply_chat_template`` with ``sanitize_control_tokens``): they are marked
before a template is rendered, and the parts between marks are tokenized one by one.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from maskdial.errors import ValidationError

_START, _END = "\U000f0000", "\U000f0001"  # of a marked token; private-use characters


class ControlTokens:
    """Marks control tokens, and tokenizes texts with marks. Thread-safe.

    Args:
        backend: a tokenizer without truncation and padding.
        writes: the literal texts of the template, which may contain added tokens that are not
            special.
        named: control tokens beside the special ones; None for those that the template writes.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, writes: str, named: Sequence[str] | None
    ) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()

        def controls(token: tokenizers.AddedToken) -> bool:
            if named is not None:
                return token.content in named
            return token.content in writes and not token.content.isspace()

        self._found = _any_of(
            [token.content for token in added if token.special or controls(token)]
        )
        everything = _any_of([token.content for token in added]).pattern
        self._marks = re.compile(f"{_START}({everything}){_END}|[{_START}{_END}]")
        self._newline = backend.encode("\n", add_special_tokens=False).ids

    def marked(self, value: Any) -> Any:
        """A value of JSON whose texts have their control tokens marked; keys stay as they are."""
        if isinstance(value, str):
            return self._found.sub(f"{_START}\\g<0>{_END}", self.unmarked(value))
        if isinstance(value, dict):
            return {key: self.marked(each) for key, each in value.items()}
        return [self.marked(each) for each in value] if isinstance(value, list) else value

    @staticmethod
    def unmarked(text: str) -> str:
        """A rendered text without the marks."""
        return text.replace(_START, "").replace(_END, "")

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text, with no token before or after it.

        Raises:
            ValidationError: a marked token has no other spelling.
        """
        first, *others = self._marks.split(text)
        ids = self._encode(first)
        for place, piece in enumerate(others):
            if not piece:
                continue
            if place % 2:
                ids += self._within(piece, self._encode)
                continue
            spelled = self._within(piece, self._encode_plain)
            if self._backend.token_to_id(piece) in spelled:
                raise ValidationError(
                    f"contains the control token {piece!r}, which the tokenizer knows no other "
                    "spelling of; leave it out"
                )
            ids += spelled
        return ids

    def _within(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """A piece as it reads in the middle of a text: SentencePiece puts a space before others."""
        ids = encode(f"\n{piece}")
        before = len(self._newline)
        return ids[before:] if ids[:before] == self._newline else encode(piece)

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> list[int]:
        """Without the added tokens, which the library matches before all else."""
        normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text]
        if pre_tokenizer is not None:
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._backend.model.tokenize(word)]


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest one first; of none, nothing."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
