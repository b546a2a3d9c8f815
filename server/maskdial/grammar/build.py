"""llguidance's tokenizer and matchers, within limits on time, memory and stack."""

import json
import threading
from collections.abc import Callable, Sequence
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
    """A model's tokens as llguidance reads them; without ``spellings``, each is the text of its
    id wherever it stands.
    """

    tokenizer: LLTokenizer
    spellings: Spellings | None = None


def build_tokenizer(tokenizer_json: str, eos_token_ids: Sequence[int]) -> Tokens:
    """Reads the vocabulary of a ``tokenizer.json``.

    llguidance requires an end-of-sequence token within the vocabulary. If the model has none there,
    one more special token is added.

    Raises:
        ValidationError: the file does not say what text its tokens stand for: it has no decoder, or
            one of an unknown kind.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    if isinstance(backend.decoder, decoders.WordPiece | decoders.Metaspace):
        return _spelled(Tokenizer(backend, SpecialTokens()), eos_token_ids)
    known = sorted(eos_token_ids)
    while known:
        try:
            return Tokens(LLTokenizer(tokenizer_json, eos_token=known))
        except ValueError:  # out of range, or an unreadable file, which fails again below
            known.pop()
    backend.add_special_tokens([_END])
    try:
        return Tokens(LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(_END)))
    except ValueError as error:
        kind = type(backend.decoder).__name__
        decoder = "no decoder" if backend.decoder is None else f"a decoder of the kind {kind}"
        raise ValidationError(
            f"this model cannot follow a grammar: its tokenizer has {decoder}, so it is not known "
            "what text its tokens stand for; leave the grammar out"
        ) from error


def _spelled(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Tokens:
    """The tokens of a WordPiece or Metaspace vocabulary, which llguidance cannot read.

    Their decoders spell a token by itself, but the first one of a text without its space, or with
    its mark of a continued word.
    """
    size = tokenizer.vocab_size
    ends = [token_id for token_id in eos_token_ids if token_id < size]
    special = sorted({*tokenizer.special_ids, *ends})
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
    if not ends:
        ends = [len(texts)]
        special.append(len(texts))
        texts.append(_END.encode())
    wrapper = TokenizerWrapper(_Texts(texts, special, ends[0]))
    return Tokens(LLTokenizer(wrapper, eos_token=ends), Spellings(first, within))


@dataclass(frozen=True, slots=True)
class _Texts:
    """What llguidance asks of a tokenizer."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        """It divides only texts that are forced, and none are."""
        return []


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

    if tokens.spellings is not None and grammar.lstrip().startswith("{"):
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


def _limits() -> LLParserLimits:
    """What one mask and one grammar may cost.

    A typical mask takes well under 1 ms and most hostile ones under 50 ms. The worst known take
    0.3 s with 50,000 tokens, a few times until they reach a limit. An enumeration of 10,000 random
    words needs the initial lexer fuel.
    """
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=300_000,
        step_max_items=10_000,
        max_lexer_states=30_000,
        max_grammar_size=12_000,
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
