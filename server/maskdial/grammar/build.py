"""llguidance's tokenizer and matchers, within limits on time, memory and stack."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from maskdial.errors import ValidationError
from maskdial.grammar.source import grammar_error

T = TypeVar("T")

# llguidance follows a chain of rules or references by recursion, some kilobytes of stack per link.
# This reserves address space; only what is used becomes memory.
_STACK_BYTES = 256 * 1024 * 1024
_stack_lock = threading.Lock()


def build_tokenizer(tokenizer_json: str, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Reads the vocabulary of a ``tokenizer.json``.

    llguidance requires an end-of-sequence token within the vocabulary. If the model has none there,
    one more special token is added.

    Raises:
        ValidationError: the file does not say what text its tokens stand for: it has no decoder, or
            one that llguidance does not know.
    """
    known = sorted(eos_token_ids)
    while known:
        try:
            return LLTokenizer(tokenizer_json, eos_token=known)
        except ValueError:  # out of range, or an unreadable file, which fails again below
            known.pop()
    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    name = "<|end of grammar|>"
    backend.add_special_tokens([name])
    try:
        return LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(name))
    except ValueError as error:
        kind = type(backend.decoder).__name__
        decoder = "no decoder" if backend.decoder is None else f"a decoder of the kind {kind}"
        raise ValidationError(
            f"this model cannot follow a grammar: its tokenizer has {decoder}, so it is not known "
            "what text its tokens stand for; leave the grammar out"
        ) from error


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> tuple[LLMatcher, bytes]:
    """Compiles a grammar. llguidance's limits do not bound every grammar; see `GrammarChecker`.

    Returns:
        The matcher at its start, and the mask of the first token: one bit per token, lowest bit
        first.

    Raises:
        ValidationError: the grammar is wrong, matches nothing, or is over a limit.
    """

    def build() -> tuple[LLMatcher, bytes]:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
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
