"""Constrained output: which tokens a grammar allows next, by llguidance."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from maskdial.causal.grammar.build import build_matcher, build_tokenizer
from maskdial.causal.grammar.check import GrammarChecker
from maskdial.causal.grammar.source import (
    GrammarKind,
    GrammarValue,
    grammar_error,
    parse_grammar,
)
from maskdial.errors import OverloadedError, ValidationError

__all__ = ["Grammar", "GrammarCompiler", "GrammarKind", "GrammarMatcher", "GrammarValue"]

_MAX_VERDICTS = 1024
_MAX_COMPILING = 32
_NUM_MASK_THREADS = 2


class GrammarCompiler:
    """Turns grammars into ``Grammar`` for one model. Thread-safe.

    A grammar is tried in a child process first (see ``GrammarChecker``), and the verdict kept.
    What was compiled is not: llguidance's copies share a lexer, which grows with use up to a
    limit, so that one request's grammar could fail by what others did with it.

    Args:
        tokenizer_json: the content of the model's ``tokenizer.json``.
        vocab_size: the width of the model's logits; it may exceed the tokenizer's vocabulary.
        eos_token_ids: the model's end-of-sequence tokens, possibly none.
    """

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._vocabulary: _Vocabulary | None = None
        self._checker: GrammarChecker | None = None
        # What is wrong with a grammar, or None, by the hash of its text, the oldest first.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        # One at a time, so that hostile grammars take one core at most and no thread of others.
        self._compiling = ThreadPoolExecutor(1, "maskdial-grammar-compile")
        self._masking = ThreadPoolExecutor(_NUM_MASK_THREADS, "maskdial-grammar-mask")
        self._lock = threading.Lock()
        self._num_compiling = 0

    def submit(self, kind: GrammarKind, value: GrammarValue) -> "Future[Grammar]":
        """Has a grammar compiled; ``asyncio.wrap_future`` waits for it without a thread.

        Args:
            kind: what ``value`` is.
            value: as ``parse_grammar`` takes it.

        Returns:
            The grammar to come. It fails with ``ValidationError`` where the value is no such
            grammar, or one that is too large or too complex.

        Raises:
            OverloadedError: too many grammars wait to be compiled.
        """
        with self._lock:
            if self._num_compiling >= _MAX_COMPILING:
                raise OverloadedError(
                    f"{self._num_compiling} grammars wait to be compiled, the most there may be."
                )
            self._num_compiling += 1
        grammar = self._compiling.submit(self._compile, kind, value)
        grammar.add_done_callback(self._compiled)
        return grammar

    def close(self) -> None:
        """Ends the threads and the child process; grammars in use can no longer be prepared."""
        self._compiling.shutdown(cancel_futures=True)
        self._masking.shutdown(cancel_futures=True)
        if self._checker is not None:
            self._checker.close()

    def _compiled(self, _: "Future[Grammar]") -> None:
        with self._lock:
            self._num_compiling -= 1

    def _compile(self, kind: GrammarKind, value: GrammarValue) -> "Grammar":
        source = parse_grammar(kind, value)
        if self._vocabulary is None or self._checker is None:
            # Some tenths of a second, which models that nobody constrains need not pay.
            self._vocabulary = _Vocabulary(
                self._tokenizer_json, self._vocab_size, self._eos_token_ids
            )
            self._checker = GrammarChecker(self._tokenizer_json, self._eos_token_ids)
        self._check(source, self._checker)
        matcher, mask = build_matcher(self._vocabulary.tokenizer, source)
        # Only grammars written by the server may contain special tokens: the tags of tool calls.
        with_special = kind == "structural"
        first = self._vocabulary.unpack(mask, with_special=with_special)
        if not self._vocabulary.has_text(first):
            raise grammar_error("no text of this model matches it, or only the empty one")
        return Grammar(matcher, first, self._vocabulary, self._masking, with_special=with_special)

    def _check(self, source: str, checker: GrammarChecker) -> None:
        key = hashlib.sha256(source.encode()).digest()
        if key not in self._verdicts:
            try:
                checker.check(source)
            except ValidationError as error:
                self._verdicts[key] = error.message
            else:
                self._verdicts[key] = None
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise ValidationError(verdict)


class Grammar:
    """A compiled grammar, for the sequences of one request. Thread-safe."""

    def __init__(
        self,
        matcher: LLMatcher,
        first: NDArray[np.bool_],
        vocabulary: "_Vocabulary",
        executor: ThreadPoolExecutor,
        *,
        with_special: bool,
    ) -> None:
        self._matcher = matcher
        self._first = first
        self._vocabulary = vocabulary
        self._executor = executor
        self._with_special = with_special
        self._lock = threading.Lock()

    def matcher(self) -> "GrammarMatcher":
        """A matcher at the start of the grammar."""
        with self._lock:
            copy = self._matcher.deep_copy()
        return GrammarMatcher(
            copy,
            self._first,
            self._vocabulary,
            self._executor,
            with_special=self._with_special,
        )


class GrammarMatcher:
    """One sequence's place in a grammar. For one thread at a time.

    ``finished`` says that nothing but an end-of-sequence token can follow. It is set by ``accept``
    or, where only the mask shows it, by ``allowed``.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        first: NDArray[np.bool_],
        vocabulary: "_Vocabulary",
        executor: ThreadPoolExecutor,
        *,
        with_special: bool,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._executor = executor
        self._with_special = with_special
        self._pending: Future[NDArray[np.bool_]] | None = None
        self._allowed: NDArray[np.bool_] | None = first
        self.finished = False

    def prepare(self) -> None:
        """Starts computing the next mask on another thread."""
        if self._allowed is None and self._pending is None:
            self._pending = self._executor.submit(self._compute)

    @property
    def ready(self) -> bool:
        """Whether ``allowed`` answers without computing or waiting."""
        return self._allowed is not None or (self._pending is not None and self._pending.done())

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow, as read-only (vocab_size,); waits for it.

        End-of-sequence tokens are allowed exactly where the text may end. All is False only when a
        finished grammar meets a model without such tokens.

        Raises:
            ValidationError: the grammar became too complex, or no token of this model can go on.
        """
        if self._allowed is None:
            pending, self._pending = self._pending, None
            self._allowed = self._compute() if pending is None else pending.result()
            if not self._vocabulary.has_text(self._allowed):
                if not self._matcher.is_accepting():
                    raise grammar_error("no token of this model can follow here")
                self.finished = True
        return self._allowed

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
            ValidationError: the token is not allowed, or the grammar became too complex. The
                matcher cannot be used any more.
        """
        if self._pending is not None:
            wait([self._pending])
        self._pending = self._allowed = None
        if token_id in self._vocabulary.eos_token_ids:
            if not self._matcher.is_accepting():
                raise ValidationError("The text may not end here by its grammar.")
            self.finished = True
            return
        if self.finished or not self._vocabulary.may_follow(
            token_id, with_special=self._with_special
        ):
            raise ValidationError(f"The grammar does not allow token {token_id} here.")
        if not self._matcher.consume_token(token_id):
            raise grammar_error(self._matcher.get_error())
        self.finished = self._matcher.is_stopped()

    def _compute(self) -> NDArray[np.bool_]:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise grammar_error(self._matcher.get_error())
        return self._vocabulary.unpack(mask, with_special=self._with_special)


class _Vocabulary:
    """A model's tokens as llguidance knows them, and its masks as the sampler takes them."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.tokenizer = build_tokenizer(tokenizer_json, eos_token_ids)
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._end = self.tokenizer.eos_token
        self._vocab_size = vocab_size
        self._num_text = min(vocab_size, self.tokenizer.vocab_size)
        self._special = np.array(
            [i for i in range(self._num_text) if self.tokenizer.is_special_token(i)], np.intp
        )

    def unpack(self, mask: bytes, *, with_special: bool) -> NDArray[np.bool_]:
        """A mask of one bit a token, the lowest first, as (vocab_size,)."""
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
        """Whether a grammar may contain a token: text, and possibly special tokens."""
        return 0 <= token_id < self._num_text and (with_special or token_id not in self._special)
