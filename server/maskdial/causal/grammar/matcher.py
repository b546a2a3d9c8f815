"""Grammar and GrammarMatcher: which tokens a compiled grammar allows next, by llguidance."""

import threading
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from maskdial.causal.grammar.masks import MaskThreads, PendingMask
from maskdial.causal.grammar.memory import Hold
from maskdial.causal.grammar.source import grammar_error
from maskdial.causal.grammar.vocabulary import Vocabulary
from maskdial.errors import ValidationError


class Grammar:
    """A compiled grammar, for the sequences of one request. Thread-safe.

    Args:
        matcher: at the start of the grammar.
        first: which tokens may begin a text, read-only bool (vocab_size,).
        vocabulary: the model's.
        threads: where masks are computed.
        with_special: whether the grammar may speak of special tokens.
        warnings: a sentence for each constraint of the request's schemas that is not enforced.
        hold: keeps the grammar's memory counted, until it and its matchers are gone.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        first: NDArray[np.bool_],
        vocabulary: Vocabulary,
        threads: MaskThreads,
        *,
        with_special: bool,
        warnings: Sequence[str],
        hold: Hold,
    ) -> None:
        self.warnings = tuple(warnings)
        self._matcher = matcher
        self._first = first
        self._vocabulary = vocabulary
        self._threads = threads
        self._with_special = with_special
        self._hold = hold
        self._lock = threading.Lock()

    def matcher(self) -> "GrammarMatcher":
        """A matcher at the start of the grammar."""
        with self._lock:
            copy = self._matcher.deep_copy()
        return GrammarMatcher(
            copy,
            self._first,
            self._vocabulary,
            self._threads,
            with_special=self._with_special,
            hold=self._hold,
        )


class GrammarMatcher:
    """One sequence's place in a grammar. For one thread at a time.

    ``finished`` says that only an end-of-sequence token can follow. `accept` sets it, or, where
    only the mask shows it, `allowed`.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        first: NDArray[np.bool_],
        vocabulary: Vocabulary,
        threads: MaskThreads,
        *,
        with_special: bool,
        hold: Hold,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._threads = threads
        self._with_special = with_special
        self._hold = hold
        self._pending: PendingMask | None = None
        self._allowed: NDArray[np.bool_] | None = first
        self.finished = False

    def prepare(self) -> None:
        """Starts computing the next mask on another thread."""
        if self._allowed is None and self._pending is None:
            self._pending = self._threads.submit(self._compute)

    @property
    def ready(self) -> bool:
        """Whether `allowed` returns at once."""
        return self._allowed is not None or (self._pending is not None and self._pending.ready)

    def wait(self, seconds: float) -> None:
        """Waits until the next mask is there, at most so long."""
        if self._allowed is None and self._pending is not None:
            self._pending.wait(seconds)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow, as read-only bool (vocab_size,); waits for the mask.

        End-of-sequence tokens are allowed exactly where the text may end. All are False only if
        the grammar is finished and the model has no such tokens.

        Raises:
            ValidationError: the grammar became too complex, the mask takes too long, or no token of
                this model can follow.
        """
        if self._allowed is None:
            self.prepare()
            assert self._pending is not None
            pending, self._pending = self._pending, None
            self._allowed = pending.result()
            if not self._vocabulary.has_text(self._allowed):
                if not self._matcher.is_accepting():
                    raise grammar_error("no token of this model can follow here")
                self.finished = True
        return self._allowed

    def accept(self, token_id: int) -> None:
        """Advances by a token.

        Raises:
            ValidationError: the token is not allowed, or the grammar became too complex. The
                matcher is of no use afterwards.
        """
        if self._pending is not None:
            self._pending.result()
        self._pending = self._allowed = None
        if token_id in self._vocabulary.eos_token_ids:
            if not self._matcher.is_accepting():
                raise ValidationError("the grammar does not allow the text to end here")
            self.finished = True
            return
        may_follow = self._vocabulary.may_follow(token_id, with_special=self._with_special)
        if self.finished or not may_follow:
            raise ValidationError(f"the grammar does not allow token {token_id} here")
        if not self._matcher.consume_token(token_id):
            raise grammar_error(self._matcher.get_error())
        self.finished = self._matcher.is_stopped()

    def _compute(self) -> NDArray[np.bool_]:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise grammar_error(self._matcher.get_error())
        return self._vocabulary.unpack(mask, with_special=self._with_special)
