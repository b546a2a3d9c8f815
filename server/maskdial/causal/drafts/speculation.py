"""Speculation: which draft tokens the next pass verifies, and what became of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from maskdial.causal.drafts.answers import Answers
from maskdial.causal.drafts.budget import PassCosts, choose, pass_clock
from maskdial.causal.drafts.draft import NO_DRAFT, Draft, Proposer
from maskdial.causal.drafts.head import HeadDrafts
from maskdial.causal.drafts.model import DraftModel
from maskdial.causal.drafts.record import LONGEST_PAUSE, Record
from maskdial.causal.plan import Plan
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind, ModelMetrics

MAX_PASS_DRAFTS = 64
"""Draft tokens of one pass, for all its sequences."""

_FIRST_RATE, _MOST_AT_FIRST = 0.5, 0.75
_OVERALL_DECAY = 0.98
_LOOK_SHARE, _LOOK_SHARE_OF_GAIN = 0.005, 0.05  # of the time of passes
_LOOK_DECAY, _GAIN_DECAY = 0.98, 0.95
_LONGEST_WAIT, _LOOKS_A_WAIT = 16, 4  # tokens
_PROBE_SHARE = 0.005
_MOST_CREDIT = 100.0  # steps of the draft model


_Records = dict[DraftKind, Record]


class _Overall:
    """The share of right ones among the latest draft tokens of a kind, of all sequences."""

    def __init__(self) -> None:
        self._right, self._tested = 2 * _FIRST_RATE, 2.0

    @property
    def rate(self) -> float:
        return self._right / self._tested

    def note(self, num_right: int, num_wrong: int) -> None:
        self._right = _OVERALL_DECAY * self._right + num_right
        self._tested = _OVERALL_DECAY * self._tested + num_right + num_wrong


@dataclass(slots=True)  # frozen ones take three times as long to make, for each text in each step
class _Offer:
    """Draft tokens that a sequence may have.

    Attributes:
        record: of their kind.
        draft: the tokens.
        limit: how many there are.
        written: whether the draft model is yet to write them.
    """

    record: Record
    draft: Draft
    limit: int
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Verified:
    """A draft that is in a pass, and the length of its text before it."""

    sequence: Sequence
    draft: Draft
    num_tokens: int


class Speculation:
    """Proposes draft tokens and learns how many of them pay. Used on the engine's thread.

    Only the number of passes depends on it: what is drawn does not.

    Args:
        proposers: where draft tokens come from; the first one that has some is asked.
        max_drafts: maximum number of draft tokens of a sequence, at least 1.
        max_length: tokens of prompt and text together.
        together: whether one pass can verify the drafts of several sequences, beside the steps of
            others. If not, only a sequence that runs alone has drafts.
        metrics: the model's instruments.
        answers: the last of the proposers, which learns from texts that end.
        model: drafts what no proposer has drafts for.
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
        self._unwritten = NO_DRAFT if model is None else Draft((), model.kind)
        self._proposers = (*proposers, *([] if answers is None else [answers]))
        self._max_drafts = max_drafts
        self._max_length = max_length
        self._metrics = metrics
        self._costs = costs or PassCosts()
        self._overall: dict[DraftKind, _Overall] = defaultdict(_Overall)
        self._records: WeakKeyDictionary[Sequence, _Records] = WeakKeyDictionary()
        self._verified: tuple[_Verified, ...] = ()
        self._wait = 1
        self._steps_to_skip = 0
        self._skips = False
        self._seconds_per_look = 0.0
        self._gain = 0.0  # the share of the latest tokens that drafts gave
        self._credit = 0.0  # seconds that may be spent on asking the draft model again

    @property
    def keep_hidden(self) -> Callable[[Iterable[Sequence]], None] | None:
        """What is to be called after each pass, with the sequences that it read tokens of."""
        return self._model.keep if isinstance(self._model, HeadDrafts) else None

    def draft(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """The draft tokens for each sequence of a plan that decodes; () if there are none."""
        self._verified = ()
        self._skips = self._steps_to_skip > 0
        if self._skips:
            self._steps_to_skip -= 1
            return ()
        sequences = plan.decoding
        if not sequences or not (self._together or self._runs_alone(plan)):
            return ()
        self._wait = self._find_wait(len(sequences))
        offers = self._offers(sequences)
        found = any(offer is not None and not offer.written for offer in offers)
        drafts = self._draft(plan, offers) if any(offers) else ()
        if not (found or drafts):
            self._steps_to_skip = self._wait // _LOOKS_A_WAIT
        return drafts

    def _draft(self, plan: Plan, offers: list[_Offer | None]) -> tuple[tuple[int, ...], ...]:
        """As `draft`, of what each sequence may have."""
        sequences = plan.decoding
        num_rows = len(sequences) + sum(prefill.num_tokens for prefill in plan.prefills)
        sizes = self._choose(sequences, offers, num_rows)
        written: dict[Sequence, tuple[int, ...]] = {}
        if self._model is not None:
            wanted = {
                sequence: size
                for sequence, offer, size in zip(sequences, offers, sizes, strict=True)
                if offer is not None and offer.written and size
            }
            if wanted:
                written = self._write(self._model, wanted)
        drafts = []
        for sequence, offer, size in zip(sequences, offers, sizes, strict=True):
            draft = NO_DRAFT
            if offer is not None and offer.written:
                draft = Draft(written.get(sequence, ()), offer.draft.kind)
            elif offer is not None and size:
                draft = Draft(offer.draft.token_ids[:size], offer.draft.kind)
            elif offer is not None:
                offer.record.untried = sequence.num_tokens, offer.draft.token_ids[0]
            drafts.append(draft)
        self._verified = tuple(
            _Verified(sequence, draft, sequence.num_tokens)
            for sequence, draft in zip(sequences, drafts, strict=True)
            if draft
        )
        return tuple(draft.token_ids for draft in drafts) if self._verified else ()

    def note(self, plan: Plan, seconds: float) -> None:
        """Takes in a step whose passes took so many seconds, and whose tokens were appended."""
        if self._model is not None:
            most = _MOST_CREDIT * self._model.seconds_per_token
            self._credit = min(self._credit + _PROBE_SHARE * seconds, most)
        if self._skips:  # some passes without drafts are enough to know their time
            return
        blocks = any(sequence.block_text is not None for sequence in plan.decoding)
        if not plan.prefills and plan.decoding and not blocks:
            self._costs.observe(len(plan.decoding), sum(map(len, plan.drafts)), seconds)
        num_gained = 0
        for each in self._verified:
            sequence, draft = each.sequence, each.draft
            new = sequence.token_ids[each.num_tokens :].tolist()
            num_new, size = len(new), len(draft)
            num_right = 0
            for token_id, guess in zip(new, draft.token_ids, strict=False):
                if token_id != guess:
                    break
                num_right += 1
            num_wrong = int(num_right < min(num_new, size))
            record = self._record(self._records_of(sequence), draft.kind)
            self._learn(record, draft.kind, num_right, num_wrong)
            # The last token of a pass is one that a step would have given as well.
            gained = num_new if sequence.held_logits is not None else max(num_new - 1, 0)
            self._metrics.draft_tokens[draft.kind].inc(size)
            self._metrics.accepted_draft_tokens[draft.kind].inc(min(num_right, gained))
            num_gained += min(num_right, gained)
        if plan.decoding:
            gain = num_gained / (len(plan.decoding) + num_gained)
            self._gain = _GAIN_DECAY * self._gain + (1 - _GAIN_DECAY) * gain
        self._verified = ()

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Takes in the texts of sequences that have finished."""
        if self._answers is not None:
            for sequence in sequences:
                self._answers.learn(sequence)

    def _choose(
        self, sequences: tuple[Sequence, ...], offers: list[_Offer | None], num_rows: int
    ) -> list[int]:
        """How many draft tokens each sequence has verified."""
        writing = [i for i, offer in enumerate(offers) if offer is not None and offer.written]
        extra = [0.0] * len(offers)
        if self._model is not None:
            for i in writing:
                extra[i] = self._model.seconds_per_token / len(writing)
        sizes = choose(
            [0.0 if offer is None else offer.record.rate for offer in offers],
            [0 if offer is None else offer.limit for offer in offers],
            self._costs,
            num_rows,
            MAX_PASS_DRAFTS,
            extra,
        )
        if self._model is not None:
            idle = [sequences[i] for i in writing if not sizes[i]]
            if idle:
                # Nothing else tells whether the draft model has become right.
                probed = min(idle, key=self._model.num_unread)
                cost = self._model.seconds_to_read(probed)
                if cost <= self._credit:
                    self._credit -= cost
                    sizes[sequences.index(probed)] = 1
        return sizes

    def _write(
        self, model: DraftModel, wanted: dict[Sequence, int]
    ) -> dict[Sequence, tuple[int, ...]]:
        """Has the draft model write as many draft tokens as were chosen."""
        written = dict(zip(wanted, model.propose(list(wanted), list(wanted.values())), strict=True))
        for sequence, token_ids in written.items():
            if token_ids and sequence.grammar is not None:
                written[sequence] = token_ids[: sequence.grammar.num_allowed(token_ids)]
        return written

    def _runs_alone(self, plan: Plan) -> bool:
        return len(plan.rows) == 1 and not (plan.awaiting_mask or plan.prefills or plan.encoding)

    def _room(self, sequence: Sequence) -> int:
        """The number of draft tokens that are still wanted."""
        if sequence.search is not None or sequence.block_text is not None:
            return 0
        return min(
            self._max_drafts,
            sequence.params.max_new_tokens - sequence.num_generated - 1,
            self._max_length - sequence.num_tokens - 1,
        )

    def _find_wait(self, num_sequences: int) -> int:
        """After how many tokens a text without drafts is looked at again.

        Looking at each one so often takes a small share of the passes' time, a larger one while
        drafts are right.
        """
        share = _LOOK_SHARE + _LOOK_SHARE_OF_GAIN * self._gain
        allowed = share * self._costs.seconds(num_sequences)
        if not allowed:
            return 1
        return min(1 + int(num_sequences * self._seconds_per_look / allowed), _LONGEST_WAIT)

    def _offers(self, sequences: tuple[Sequence, ...]) -> list[_Offer | None]:
        """The draft tokens that each sequence may have; looks only where it is time to."""
        looks = [
            sequence.num_tokens >= sequence.look_at or sequence.grammar is not None
            for sequence in sequences
        ]
        num_looks = sum(looks)
        if not num_looks and self._model is None:
            return []
        # A text's first look reads its prompt: it comes once, however rare the others are.
        first = any(sequence not in self._records for sequence in sequences)
        began = pass_clock()
        offers = list(map(self._offer, sequences, looks))
        if num_looks and not first:
            seconds = (pass_clock() - began) / num_looks
            mean = self._seconds_per_look or seconds
            latest = min(seconds, 4 * mean)
            self._seconds_per_look = _LOOK_DECAY * mean + (1 - _LOOK_DECAY) * latest
        return offers

    def _offer(self, sequence: Sequence, looks: bool) -> _Offer | None:
        """The draft tokens of the first proposer that has some, or of the draft model."""
        if not looks and self._model is None:
            return None
        room = self._room(sequence)
        if room < 1:
            return None
        records = self._records_of(sequence)
        offer = self._look(sequence, records, room) if looks else None
        if self._model is not None and self._model.serves(sequence):
            record = self._record(records, self._model.kind)
            if offer is None or offer.record.rate < record.rate:
                if offer is not None:
                    offer.record.untried = sequence.num_tokens, offer.draft.token_ids[0]
                return _Offer(record, self._unwritten, room, written=True)
        return offer

    def _look(self, sequence: Sequence, records: _Records, room: int) -> _Offer | None:
        """The draft tokens of the first proposer that has some."""
        num_tokens = sequence.num_tokens
        look_at = num_tokens + LONGEST_PAUSE
        for proposer in self._proposers:
            if not proposer.serves(sequence):
                continue
            record = self._record(records, proposer.kind)
            # What a grammar forces is found without looking for it.
            if num_tokens < record.resume_at and proposer.kind != "grammar":
                look_at = min(look_at, record.resume_at)
                continue
            if record.untried is not None:
                position, token_id = record.untried
                record.untried = None
                num_right = int(sequence.token_ids[position] == token_id)
                self._learn(record, proposer.kind, num_right, 1 - num_right)
                if not num_right:
                    record.pause(num_tokens)
                    look_at = min(look_at, record.resume_at)
                    continue
            token_ids = proposer.propose(sequence, room)
            if token_ids and sequence.grammar is not None:
                token_ids = token_ids[: sequence.grammar.num_allowed(token_ids)]
            if token_ids:
                return _Offer(record, Draft(token_ids, proposer.kind), len(token_ids))
            record.wait(num_tokens, self._wait)
            look_at = min(look_at, record.resume_at)
        sequence.look_at = look_at
        return None

    def _learn(self, record: Record, kind: DraftKind, num_right: int, num_wrong: int) -> None:
        """Takes in what became of a sequence's draft tokens."""
        record.note(num_right, num_wrong)
        self._overall[kind].note(num_right, num_wrong)

    def _records_of(self, sequence: Sequence) -> _Records:
        records = self._records.get(sequence)
        if records is None:
            records = self._records[sequence] = {}
        return records

    def _record(self, records: _Records, kind: DraftKind) -> Record:
        record = records.get(kind)
        if record is None:
            # Other texts may repeat themselves more than this one.
            record = records[kind] = Record(min(self._overall[kind].rate, _MOST_AT_FIRST))
        return record
