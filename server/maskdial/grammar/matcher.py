"""Grammar and GrammarMatcher: which tokens a compiled grammar allows next, by llguidance."""

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from maskdial.errors import MaskdialError, ValidationError
from maskdial.grammar.fixed_length import FixedLength
from maskdial.grammar.masks import MaskThreads, Pending
from maskdial.grammar.memory import Hold
from maskdial.grammar.place import Place
from maskdial.grammar.source import grammar_error
from maskdial.grammar.vocabulary import Vocabulary

Mask = NDArray[np.bool_]
"""Which tokens may follow, read-only bool (vocab_size,)."""


class Grammar:
    """A compiled grammar, for the sequences of one request. Thread-safe.

    Args:
        matcher: at the start of the grammar.
        mask: of what may begin a text, for `Vocabulary.unpack`.
        vocabulary: the model's.
        threads: where masks are computed.
        with_special: whether the grammar may speak of special tokens.
        warnings: a sentence for each constraint of the request's schemas that is not enforced.
        hold: keeps the grammar's memory counted, until it and its matchers are gone.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        mask: bytes,
        vocabulary: Vocabulary,
        threads: MaskThreads,
        *,
        with_special: bool,
        warnings: Sequence[str],
        hold: Hold,
    ) -> None:
        self.warnings = tuple(warnings)
        self._matcher = matcher
        self._mask = mask
        self._vocabulary = vocabulary
        self._threads = threads
        self._with_special = with_special
        self._hold = hold
        self._lock = threading.Lock()

    def matcher(self, *, first: bool = False) -> "GrammarMatcher":
        """A matcher at the start of the grammar.

        ``first`` is whether the text begins there: no token that is text comes before it.

        Raises:
            ValidationError: no token of this model can begin it.
        """
        place = self._start(first=first)
        allowed = place.unpack(self._mask, with_special=self._with_special)
        if not self._vocabulary.has_text(allowed):
            raise grammar_error("no token of this model can begin its text")
        return GrammarMatcher(
            place,
            allowed,
            self._vocabulary,
            self._threads,
            with_special=self._with_special,
            hold=self._hold,
        )

    def fixed_length(self, excluded: Collection[int]) -> FixedLength:
        """The grammar for texts of given numbers of tokens, without the ``excluded`` ones."""
        return FixedLength(
            self._start(first=True),
            self._vocabulary,
            self._threads,
            excluded=excluded,
            hold=self._hold,
        )

    def _start(self, *, first: bool) -> Place:
        with self._lock:
            copy = self._matcher.deep_copy()
        return Place(copy, self._vocabulary, first=first)


@dataclass(frozen=True, slots=True)
class _Found:
    """What is computed of a place in a grammar: its mask, and the tokens of the text that has to
    follow there, as the tokenizer would divide it.
    """

    mask: Mask
    forced: tuple[int, ...]


@dataclass(slots=True)
class _Ahead:
    """The places after draft tokens, of which ``num_passed`` were accepted."""

    token_ids: tuple[int, ...]
    places: Pending[list[_Found]]
    num_passed: int = 0


class GrammarMatcher:
    """One sequence's place in a grammar. For one thread at a time.

    ``finished`` says that only an end-of-sequence token can follow. `accept` sets it, or, where
    only the mask shows it, `allowed`.
    """

    def __init__(
        self,
        place: Place,
        allowed: Mask,
        vocabulary: Vocabulary,
        threads: MaskThreads,
        *,
        with_special: bool,
        hold: Hold,
    ) -> None:
        self._place = place
        self._vocabulary = vocabulary
        self._threads = threads
        self._with_special = with_special
        self._hold = hold
        self._pending: Pending[_Found] | None = None
        self._ahead: _Ahead | None = None
        self._allowed: Mask | None = allowed
        self.forced: tuple[int, ...] = ()
        """Tokens that probably follow, because their text has to; those that are known."""
        self.finished = False

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        """Starts computing the next mask on another thread, and those after draft tokens.

        ``drafts`` are tokens that the grammar allows, as `num_allowed` says.
        """
        if drafts and self._ahead is None:
            copy = self._place.copy()
            self._ahead = _Ahead(drafts, self._threads.submit(partial(self._walk, copy, drafts)))
        if self._allowed is None and self._pending is None and not self._is_ahead:
            self._pending = self._threads.submit(partial(self._find, self._place))

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of some tokens, from the first, the grammar allows to follow.

        An end-of-sequence token is not counted as one. Call it before `prepare`.
        """
        if self._pending is not None or self._ahead is not None:
            return 0
        ends = self._vocabulary.eos_token_ids
        for index, token_id in enumerate(token_ids):
            special = not self._vocabulary.may_follow(token_id, with_special=self._with_special)
            if special or token_id in ends:
                token_ids = token_ids[:index]
                break
        return self._place.num_allowed(token_ids)

    @property
    def ready(self) -> bool:
        """Whether `allowed` returns at once."""
        if self._allowed is not None:
            return True
        pending = self._awaited
        return pending is not None and pending.ready

    def wait(self, seconds: float) -> None:
        """Waits until the next mask is there, at most so long."""
        pending = self._awaited
        if self._allowed is None and pending is not None:
            pending.wait(seconds)

    def allowed(self) -> Mask:
        """Which tokens may follow, as read-only bool (vocab_size,); waits for the mask.

        End-of-sequence tokens are allowed exactly where the text may end. All are False only if
        the grammar is finished and the model has no such tokens.

        Raises:
            ValidationError: the grammar became too complex, the mask takes too long, or no token of
                this model can follow.
        """
        if self._allowed is None:
            found = self._found()
            self._allowed = found.mask
            self.forced = self.forced or found.forced
            if not self._vocabulary.has_text(self._allowed):
                if not self._place.may_end:
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
        self._pass(token_id)
        if token_id in self._vocabulary.eos_token_ids:
            if not self._place.may_end:
                raise ValidationError("the grammar does not allow the text to end here")
            self.finished = True
            return
        may_follow = self._vocabulary.may_follow(token_id, with_special=self._with_special)
        if self.finished or not may_follow:
            raise ValidationError(f"the grammar does not allow token {token_id} here")
        self._place.read(token_id)
        self.finished = self._place.must_end

    def matches(self, token_ids: Iterable[int]) -> bool:
        """Whether some tokens are a whole text of the grammar. The matcher is of no use then."""
        try:
            for token_id in token_ids:
                self.accept(token_id)
        except ValidationError:
            return False
        return self._place.may_end

    def _pass(self, token_id: int) -> None:
        """Keeps what is known of the places after a token, if it is the one that was expected."""
        self.forced = self.forced[1:] if self.forced[:1] == (token_id,) else ()
        ahead = self._ahead
        if ahead is None:
            return
        if ahead.token_ids[ahead.num_passed :][:1] == (token_id,):
            ahead.num_passed += 1
        else:
            self._ahead = None

    @property
    def _is_ahead(self) -> bool:
        """Whether the next mask is one of those after draft tokens."""
        return self._ahead is not None and self._ahead.num_passed > 0

    @property
    def _awaited(self) -> "Pending[_Found] | Pending[list[_Found]] | None":
        """What the next mask will be found in."""
        return self._ahead.places if self._ahead is not None and self._is_ahead else self._pending

    def _found(self) -> _Found:
        """Waits for what is computed of the next token's place."""
        ahead, self._ahead = (self._ahead, None) if self._is_ahead else (None, self._ahead)
        if ahead is not None:
            try:
                found = ahead.places.result()[ahead.num_passed - 1]
            except (MaskdialError, IndexError):
                pass  # together the masks took too long; each by itself may not
            else:
                if ahead.num_passed < len(ahead.token_ids):
                    self._ahead = ahead
                return found
        self.prepare()
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.result()

    def _walk(self, place: Place, token_ids: tuple[int, ...]) -> list[_Found]:
        """The places after each of some tokens."""
        places = []
        for token_id in token_ids:
            if not place.read_all([token_id]) or place.must_end:
                break
            places.append(self._find(place))
        return places

    def _find(self, place: Place) -> _Found:
        allowed = place.unpack(place.mask(), with_special=self._with_special)
        return _Found(allowed, place.forced())
