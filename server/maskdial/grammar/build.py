"""llguidance's tokenizer and matchers, within limits on time, memory and stack."""

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import decoders

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError
from maskdial.grammar.source import grammar_error

T = TypeVar("T")

# llguidance follows a chain of rules or references by recursion, some kilobytes of stack per link.
# This reserves address space; only what is used becomes memory.
_STACK_BYTES = 256 * 1024 * 1024
_stack_lock = threading.Lock()


_END = "<|end of grammar|>"
# Of no meaning, and a token by itself in every vocabulary that has tokens for bytes.
_BEFORE = "\x02"

# A JSON schema has no option against forced tokens, but a lexer takes it from any of its grammars.
_NOT_FORCED = {"name": "not_forced", "lark_grammar": 'start: "."\n%llguidance {"no_forcing": true}'}


@dataclass(frozen=True, slots=True)
class Spellings:
    """Which of llguidance's texts each token of a model stands for, int (number of tokens,).

    ``first`` is a token's where a text begins, -1 if it has none there; ``within`` behind others.
    """

    first: NDArray[np.intp]
    within: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A model's tokens as llguidance reads them.

    Attributes:
        tokenizer: the vocabulary.
        names: the ids of added tokens such as ``<think>``, which Lark grammars may name.
        spellings: None if each token is the text of its id wherever it stands.
    """

    tokenizer: LLTokenizer
    names: Mapping[str, int]
    spellings: Spellings | None = None


def build_tokenizer(tokenizer_json: str, eos_token_ids: Sequence[int]) -> Tokens:
    """Reads the vocabulary of a ``tokenizer.json``.

    The tokens that the file calls special are those that no text contains. llguidance's own reader
    adds every added token of the form ``<...>``, so that a grammar could not write Qwen's
    ``<tool_call>``, which is text to its tokenizer.

    llguidance requires an end-of-sequence token within the vocabulary. If the model has none there,
    one more special token is added.

    Raises:
        ValidationError: the file does not say what text its tokens stand for: it has no decoder, or
            one of an unknown kind.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer = Tokenizer(backend, SpecialTokens())
    special = set(tokenizer.special_ids)
    spellings = None
    if isinstance(backend.decoder, decoders.WordPiece | decoders.Metaspace):
        special.update(each for each in eos_token_ids if each < tokenizer.vocab_size)
        texts, spellings = _spelled(tokenizer, sorted(special))
    else:
        texts = _texts(backend)
    ends = sorted(each for each in eos_token_ids if each < len(texts))
    if not ends:
        ends = [len(texts)]
        texts.append(_END.encode())
    divide = _undivided if spellings is not None else _Divider(backend, texts, special)
    wrapper = TokenizerWrapper(_Texts(texts, sorted({*special, *ends}), ends[0], divide))
    added = backend.get_added_tokens_decoder()
    names = {token.content: token_id for token_id, token in added.items()}
    return Tokens(LLTokenizer(wrapper, eos_token=ends), names, spellings)


def _texts(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The UTF-8 of every token of a byte-level vocabulary or of one with tokens for bytes, by id.

    Raises:
        ValidationError: llguidance does not know the decoder.
    """
    try:
        read = LLTokenizer(backend.to_str(), eos_token=[0])
    except ValueError as error:
        kind = type(backend.decoder).__name__
        decoder = "no decoder" if backend.decoder is None else f"a decoder of the kind {kind}"
        raise ValidationError(
            f"this model cannot follow a grammar: its tokenizer has {decoder}, so it is not known "
            "what text its tokens stand for; leave the grammar out"
        ) from error
    return [read.decode_bytes([token_id]) for token_id in range(read.vocab_size)]


def _spelled(tokenizer: Tokenizer, special: Sequence[int]) -> tuple[list[bytes], Spellings]:
    """The texts of a WordPiece or Metaspace vocabulary, which llguidance cannot read.

    Their decoders spell a token by itself, but the first one of a text without its space, or with
    its mark of a continued word.
    """
    size = tokenizer.vocab_size
    texts = list(tokenizer.spellings)
    for token_id in special:
        texts[token_id] = tokenizer.id_to_token(token_id).encode()
    first, within = np.arange(size), np.arange(size)
    known: dict[bytes, int] = {}
    for token_id in np.delete(within, special).tolist():
        if not (text := texts[token_id]):
            continue  # llguidance makes it a special token
        within[token_id] = known.setdefault(text, token_id)
        if within[token_id] != token_id:
            texts[token_id] = b""  # it takes time in the square of the number of equal texts
    for token_id in np.delete(first, special).tolist():
        text = tokenizer.token_bytes(token_id)
        first[token_id] = known.setdefault(text, len(texts)) if text else -1
        if first[token_id] == len(texts):
            texts.append(text)
    return texts, Spellings(first, within)


@dataclass(frozen=True, slots=True)
class _Texts:
    """What llguidance asks of a tokenizer."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    divide: Callable[[bytes], list[int]]
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        """Divides a text that is forced into tokens."""
        return self.divide(text)


def _undivided(text: bytes) -> list[int]:
    """Where a token has two texts, none is forced; see _NOT_FORCED."""
    return []


class _Divider:
    """Divides forced text as the model's tokenizer divides it within a text.

    Special tokens, which their own text does not stand for, are left out of it.

    Args:
        backend: the model's tokenizer, for this use alone.
        texts: of every token, by id.
        special: the ids of special tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, texts: Sequence[bytes], special: Collection[int]
    ) -> None:
        self._texts = texts
        self._known: dict[bytes, int] = {}
        for token_id, text in enumerate(texts):
            if text and token_id not in special:
                self._known.setdefault(text, token_id)
        self._longest = max(map(len, self._known), default=0)
        backend.encode_special_tokens = True
        self._backend = backend

    def __call__(self, text: bytes) -> list[int]:
        for start in ("", _BEFORE):
            ids = self._backend.encode(start + text.decode(), add_special_tokens=False).ids
            # Some tokenizers put a space before the first word, which must be another then.
            for first in range(min(len(ids), 4)):
                if b"".join(self._texts[each] for each in ids[first:]) == text:
                    return ids[first:]
        return self._greedily(text)

    def _greedily(self, text: bytes) -> list[int]:
        """Of a text that the normalizer would change: the longest tokens, from the left."""
        ids: list[int] = []
        place = 0
        while place < len(text):
            ends = range(min(len(text), place + self._longest), place, -1)
            end = next((end for end in ends if text[place:end] in self._known), None)
            if end is None:
                return ids
            ids.append(self._known[text[place:end]])
            place = end
        return ids


def build_matcher(tokens: Tokens, grammar: str) -> tuple[LLMatcher, bytes]:
    """Compiles a grammar. llguidance's limits do not bound every grammar; see `GrammarChecker`.

    Args:
        tokens: the model's.
        grammar: in llguidance's format.

    Returns:
        The matcher at its start, and the mask of the first token: one bit per token, lowest bit
        first.

    Raises:
        ValidationError: the grammar is wrong, matches nothing, or is over a limit.
    """

    if not grammar.lstrip().startswith("{"):
        grammar = _with_ids(grammar, tokens.names)
    elif tokens.spellings is not None:
        parts = json.loads(grammar)
        grammar = json.dumps({**parts, "grammars": [*parts["grammars"], _NOT_FORCED]})

    def build() -> tuple[LLMatcher, bytes]:
        matcher = LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=_limits())
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            error = matcher.get_error()
            raise grammar_error("no text matches it" if "NoExtension" in error else error)
        return matcher, mask

    return _with_deep_stack(build)


# What Lark reads as one: a text, a regular expression, a comment, or the name of a special token.
# The unclosed ones match as well, or looking for their end would begin again at each sign.
_LARK = re.compile(r'"(?:\\.|[^"\\])*+"?|//[^\n]*|/(?:\\.|[^/\\])++/?|<[^<>\s\[\]]+>', re.DOTALL)


def _with_ids(lark: str, names: Mapping[str, int]) -> str:
    """A Lark grammar with the ids of the tokens that it names in place of the names."""

    def identified(match: re.Match[str]) -> str:
        return f"<[{names[match[0]]}]>" if match[0] in names else match[0]

    return _LARK.sub(identified, lark)


def _limits() -> LLParserLimits:
    """What one mask and one grammar may cost.

    A typical mask takes well under 1 ms and most hostile ones under 50 ms. The worst known take
    0.3 s with 50,000 tokens, a few times until they reach a limit. An enumeration of 10,000 random
    words needs the initial lexer fuel; 1,024 tools of three parameters need the size, and
    about a second.
    """
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=300_000,
        step_max_items=10_000,
        max_lexer_states=30_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def _with_deep_stack(function: Callable[[], T]) -> T:
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=call, name="maskdial-grammar-build", daemon=True)
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()
