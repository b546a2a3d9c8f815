"""Speculation: which draft tokens the next pass verifies, and what became of them."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from maskdial.causal.drafts.head import HeadDrafts
from maskdial.causal.drafts.model import DraftModel
from maskdial.causal.drafts.policy import (
    Budget,
    Credit,
    Guess,
    Option,
    PassCosts,
    Rates,
    Record,
    count_right,
)
from maskdial.causal.drafts.sources import Answers, Proposer, Reader
from maskdial.causal.plan import Plan
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind, ModelMetrics

_log = logging.getLogger(__name__)

MAX_PASS_DRAFTS = 64
"""Draft tokens of one pass, for all its sequences."""

_OBSERVE_EVERY = 4  # passes without drafts: some are enough to know their time
_LOOK_SHARE = 0.005  # of the time of passes
_LOOK_DECAY, _MOST_SKIPPED = 0.95, 15
_FEW_UNREAD, _PASSES_TO_REPAY = 4, 32


@dataclass(slots=True)
class _Guesses:
    """Those for one text: of the proposers, and of the draft model, if there is one."""

    proposed: tuple[Guess, ...]
    written: Guess | None


@dataclass(frozen=True, slots=True)
class _Verified:
    """A draft that is in a pass, and the length of its text before it."""

    sequence: Sequence
    kind: DraftKind
    token_ids: tuple[int, ...]
    num_tokens: int


class Speculation:
    """Proposes draft tokens and learns how many of them pay. Used on the engine's thread.

    Only the number of passes depends on it: what is drawn does not. So a text for which looking
    for draft tokens fails goes on without them.

    Args:
        proposers: where draft tokens come from. The one whose first token is likeliest to be right
            is taken, of equal ones the first.
        max_drafts: maximum number of draft tokens of a sequence, at least 1.
        max_length: tokens of prompt and text together.
        together: whether one pass can verify the drafts of several sequences, beside the steps of
            others. If not, only a sequence that runs alone has drafts.
        metrics: the model's instruments.
        answers: the last of the proposers, which learns from texts that end.
        model: drafts where it is likelier right than the proposers.
        costs: of the model's passes. Default: as they are measured.
    """

    def __init__(
        self,
        proposers: Iterable[Proposer],
        *,
        max_drafts: int,
        max_length: int,
        together: bool,
        metrics: ModelMetrics,
        answers: Answers | None = None,
        model: DraftModel | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        self._together = together
        self._answers, self._model = answers, model
        self._proposers = (*proposers, *([] if answers is None else [answers]))
        self._max_drafts = max_drafts
        self._max_length = max_length
        self._metrics = metrics
        self._costs = costs or PassCosts()
        self._overall: dict[tuple[DraftKind, bool], Rates] = defaultdict(Rates.overall)
        """By the kind of the draft tokens, and whether texts are greedy: what is drawn is seldom
        what a model thinks likeliest.
        """
        self._guesses: WeakKeyDictionary[Sequence, _Guesses] = WeakKeyDictionary()
        self._verified: list[_Verified] = []
        self._num_to_skip = 0
        """Steps to come in which nobody looks for draft tokens."""
        self._seconds_per_look = 0.0
        """What looking took in the latest steps that did."""
        self._num_vain = 0
        """How often that gave none since it last gave some, or since a text began."""
        self._num_plain = 0
        """Passes without drafts since the last one with some."""
        self._credit = Credit()
        """For asking a draft model that does not pay."""

    @property
    def keep_hidden(self) -> Callable[[tuple[Sequence, ...]], None] | None:
        """What is to be called after each pass, with the sequences that it read tokens of."""
        return self._model.keep if isinstance(self._model, HeadDrafts) else None

    def draft(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """The draft tokens for each sequence of a plan that decodes; () if there are none."""
        self._verified = []
        if plan.prefills or plan.awaiting_mask:  # a text begins, which may repeat its prompt
            self._num_to_skip = self._num_vain = 0
        if self._num_to_skip:
            self._num_to_skip -= 1
            return ()
        sequences = plan.decoding
        if not sequences or not (self._together or self._runs_alone(plan)):
            return ()
        drafts = self._draft(plan)
        if self._verified:
            self._num_vain = 0
            return tuple(drafts)
        if all(sequence.grammar is None for sequence in sequences):
            self._num_to_skip = self._find_skip(len(sequences))
        self._num_vain += 1
        return ()

    def _find_skip(self, num_sequences: int) -> int:
        """For how many steps nobody looks for draft tokens after none were found.

        At first for none, then for more and more, until looking takes a small share of the passes'
        time. No token is missed: who looks later reads those that have come since.
        """
        allowed = _LOOK_SHARE * self._costs.seconds(num_sequences)
        most = int(self._seconds_per_look / allowed) if allowed else 0
        return min(self._num_vain, most, _MOST_SKIPPED)

    def _draft(self, plan: Plan) -> list[tuple[int, ...]]:
        """As `draft`, of a plan with sequences that decode."""
        sequences = plan.decoding
        began = time.perf_counter()
        guesses = [self._look(sequence) for sequence in sequences]
        self._note_look(time.perf_counter() - began)
        asked = self._model if self._credit.wakes(len(sequences)) else None
        if asked is None and not any(guesses):
            return []
        reads = bool(plan.prefills)
        budget = Budget(self._costs, len(sequences), reads=reads, most=MAX_PASS_DRAFTS)
        drafts: list[tuple[int, ...]] = [()] * len(sequences)
        if asked is None:
            self._spend(sequences, guesses, drafts, budget)
        else:
            written = [self._guesses[sequence].written for sequence in sequences]
            sure = [
                guess if guess and own and guess.first_rate >= own.first_rate else None
                for guess, own in zip(guesses, written, strict=True)
            ]
            self._spend(sequences, sure, drafts, budget)
            self._write(asked, sequences, written, drafts, budget)
            self._spend(sequences, guesses, drafts, budget)
        return drafts

    def note(self, plan: Plan, seconds: float) -> None:
        """Takes in a step whose tokens were appended: the passes and that took so many seconds."""
        if self._model is not None:
            self._credit.earn(seconds, self._model.costs.per_step)
        self._num_plain = 0 if plan.drafts else self._num_plain + 1
        if self._num_plain % _OBSERVE_EVERY:
            return
        blocks = any(sequence.block_text is not None for sequence in plan.decoding)
        if not plan.prefills and plan.decoding and not blocks:
            self._costs.observe(len(plan.decoding), sum(map(len, plan.drafts)), seconds)
        for each in self._verified:
            come = each.sequence.token_ids[each.num_tokens :].tolist()
            # The last token of a pass is one that a step would have given as well.
            gained = len(come) - (each.sequence.held_logits is None)
            num_right = min(count_right(come, each.token_ids), max(gained, 0))
            self._metrics.draft_tokens[each.kind].inc(len(each.token_ids))
            self._metrics.accepted_draft_tokens[each.kind].inc(num_right)
        self._verified = []

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Takes in the texts of sequences that have finished."""
        if self._answers is None:
            return
        for sequence in sequences:
            try:
                self._answers.learn(sequence)
            except Exception:  # its reader gets the text nevertheless
                _log.exception("an answer could not be kept for speculation")

    def _note_look(self, seconds: float) -> None:
        """Takes in what looking took; that a text's first look reads its prompt says nothing."""
        mean = self._seconds_per_look or seconds
        latest = min(seconds, 2 * mean)
        self._seconds_per_look = _LOOK_DECAY * mean + (1 - _LOOK_DECAY) * latest

    def _look(self, sequence: Sequence) -> Guess | None:
        """The likeliest guess of the proposers, after comparing the last ones with the text."""
        try:
            return self._find(sequence)
        except Exception:
            _log.exception("looking for draft tokens failed; their text goes on without them")
            self._guesses[sequence] = _Guesses((), None)
            return None

    def _find(self, sequence: Sequence) -> Guess | None:
        guesses = self._guesses.get(sequence)
        if guesses is None:
            guesses = self._guesses[sequence] = self._begin(sequence)
        best, best_rate = None, 0.0
        for guess in guesses.proposed:
            if guess.token_ids:
                guess.check(sequence)
            token_ids = guess.propose(sequence, self._max_drafts)
            if token_ids and sequence.grammar is not None:
                token_ids = token_ids[: sequence.grammar.num_allowed(token_ids)]
            if not token_ids:
                guess.record.interrupt()
                continue
            guess.expect(sequence.num_tokens, token_ids)
            if guess.first_rate > best_rate:
                best, best_rate = guess, guess.first_rate
        written = guesses.written
        if written is not None and written.token_ids:
            written.check(sequence)
        return best

    def _begin(self, sequence: Sequence) -> _Guesses:
        """Who guesses for a sequence; nobody where beams or whole blocks are written."""
        if sequence.search is not None or sequence.block_text is not None:
            return _Guesses((), None)
        readers = [(each.kind, each.reader(sequence)) for each in self._proposers]
        return _Guesses(
            tuple(
                self._guess(sequence, kind, reader)
                for kind, reader in readers
                if reader is not None
            ),
            None if self._model is None else self._guess(sequence, self._model.kind, None),
        )

    def _guess(self, sequence: Sequence, kind: DraftKind, reader: Reader | None) -> Guess:
        overall = self._overall[kind, sequence.params.greedy]
        return Guess(kind, reader, Record(overall, by_model=reader is None))

    def _spend(
        self,
        sequences: tuple[Sequence, ...],
        guesses: list[Guess | None],
        drafts: list[tuple[int, ...]],
        budget: Budget,
    ) -> None:
        """Has the next pass verify what the proposers guess, of sequences that have no drafts."""
        options = [
            None if guess is None or draft else self._option(sequence, guess, len(guess.token_ids))
            for sequence, guess, draft in zip(sequences, guesses, drafts, strict=True)
        ]
        if any(options):
            for i, size in enumerate(budget.spend(options)):
                guess = guesses[i]
                if size and guess is not None:
                    drafts[i] = self._verify(sequences[i], guess, guess.token_ids[:size])

    def _verify(
        self, sequence: Sequence, guess: Guess, token_ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Notes that the next pass verifies some draft tokens."""
        self._verified.append(_Verified(sequence, guess.kind, token_ids, sequence.num_tokens))
        return token_ids

    def _option(
        self, sequence: Sequence, guess: Guess, most: int, unread: float = 0
    ) -> Option | None:
        """At most so many draft tokens, and no more than are still wanted; None if that is none."""
        wanted = sequence.params.max_new_tokens - sequence.num_generated - 1
        limit = min(most, wanted, self._max_length - sequence.num_tokens - 1)
        return Option(guess.first_rate, guess.record.rate, limit, unread) if limit > 0 else None

    def _runs_alone(self, plan: Plan) -> bool:
        return len(plan.rows) == 1 and not (plan.awaiting_mask or plan.prefills or plan.encoding)

    def _write(
        self,
        model: DraftModel,
        sequences: tuple[Sequence, ...],
        guesses: list[Guess | None],
        drafts: list[tuple[int, ...]],
        budget: Budget,
    ) -> None:
        """Has the draft model write for sequences that have no drafts, as far as it pays."""
        options = [
            None
            if guess is None or draft or not model.serves(sequence)
            else self._option(
                sequence, guess, self._max_drafts, _priced(model.num_unread(sequence))
            )
            for sequence, guess, draft in zip(sequences, guesses, drafts, strict=True)
        ]
        sizes = budget.write(options, model.costs)
        able = [i for i, each in enumerate(options) if each is not None]
        if able and not any(sizes):
            probed = min(able, key=lambda i: model.num_unread(sequences[i]))
            if self._credit.sleep(len(sequences), model.seconds_to_read(sequences[probed])):
                sizes[probed] = 1
        else:
            self._credit.stay_awake()
        wanted = [i for i, size in enumerate(sizes) if size]
        if not wanted:
            return
        texts = model.propose([sequences[i] for i in wanted], [sizes[i] for i in wanted])
        for i, token_ids in zip(wanted, texts, strict=True):
            sequence, guess = sequences[i], guesses[i]
            if guess is not None and token_ids:
                guess.expect(sequence.num_tokens, token_ids)
                drafts[i] = self._verify(sequence, guess, token_ids)


def _priced(num_unread: int) -> float:
    """For how many tokens a draft model's reading counts: a text's beginning is read once, for all
    the passes after it.
    """
    return min(num_unread, _FEW_UNREAD) + max(num_unread - _FEW_UNREAD, 0) / _PASSES_TO_REPAY
