"""Speculation: which draft tokens the next pass verifies, and what became of them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from maskdial.causal.drafts.answers import Answers
from maskdial.causal.drafts.budget import PassCosts, choose
from maskdial.causal.drafts.draft import NO_DRAFT, Draft, Proposer
from maskdial.causal.drafts.model import DraftModel
from maskdial.causal.drafts.record import Record
from maskdial.causal.plan import Plan
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind, ModelMetrics

MAX_PASS_DRAFTS = 64
"""Draft tokens of one pass, for all its sequences."""

_FIRST_RATE, _MOST_AT_FIRST = 0.5, 0.6
_PROBE_AFTER = 32  # tokens
_OVERALL_DECAY = 0.98


_TO_BE_WRITTEN = Draft(kind="model")


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
        self._proposers = (*proposers, *([] if answers is None else [answers]))
        self._max_drafts = max_drafts
        self._max_length = max_length
        self._metrics = metrics
        self._costs = costs or PassCosts()
        self._overall: dict[DraftKind, _Overall] = defaultdict(_Overall)
        self._records: WeakKeyDictionary[Sequence, dict[DraftKind, Record]] = WeakKeyDictionary()
        self._verified: tuple[_Verified, ...] = ()

    def draft(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """The draft tokens for each sequence of a plan that decodes; () if there are none."""
        self._verified = ()
        sequences = plan.decoding
        if not sequences or not (self._together or self._runs_alone(plan)):
            return ()
        rooms = [self._room(sequence) for sequence in sequences]
        proposed = [self._propose(*each) for each in zip(sequences, rooms, strict=True)]
        limits = [len(draft) for draft in proposed]
        extra = [0.0] * len(sequences)
        if self._model is not None:
            for i, (sequence, draft) in enumerate(zip(sequences, proposed, strict=True)):
                if not draft and rooms[i] > 0 and self._model.serves(sequence):
                    proposed[i], limits[i] = _TO_BE_WRITTEN, rooms[i]
            num_writing = sum(draft is _TO_BE_WRITTEN for draft in proposed)
            for i, draft in enumerate(proposed):
                if draft is _TO_BE_WRITTEN:
                    extra[i] = self._model.seconds_per_token / num_writing
        if not any(limits):
            return ()
        pairs = list(zip(sequences, proposed, strict=True))
        records = [self._record(sequence, draft.kind) for sequence, draft in pairs]
        rates = [record.rate for record in records]
        num_rows = len(sequences) + sum(prefill.num_tokens for prefill in plan.prefills)
        sizes = choose(rates, limits, self._costs, num_rows, MAX_PASS_DRAFTS, extra)
        if self._model is not None:
            for i, (sequence, record) in enumerate(zip(sequences, records, strict=True)):
                idle = sequence.num_tokens - record.resume_at
                if proposed[i] is _TO_BE_WRITTEN and not sizes[i] and idle >= _PROBE_AFTER:
                    sizes[i] = 1  # nothing else tells whether it has become right
            self._write(self._model, sequences, proposed, records, sizes)
        for sequence, draft, record, size in zip(sequences, proposed, records, sizes, strict=True):
            if draft and not size:
                record.untried = sequence.num_tokens, draft.token_ids[0]
        drafts = [
            Draft(draft.token_ids[:size], draft.kind)
            for draft, size in zip(proposed, sizes, strict=True)
        ]
        self._verified = tuple(
            _Verified(sequence, draft, sequence.num_tokens)
            for sequence, draft in zip(sequences, drafts, strict=True)
            if draft
        )
        return tuple(draft.token_ids for draft in drafts) if self._verified else ()

    def note(self, plan: Plan, seconds: float) -> None:
        """Takes in a step that has run, in so many seconds, and whose tokens were appended."""
        blocks = any(sequence.block_text is not None for sequence in plan.decoding)
        if not plan.prefills and plan.decoding and not blocks:
            num_rows = len(plan.decoding) + sum(map(len, plan.drafts))
            self._costs.observe(num_rows, seconds)
        for each in self._verified:
            sequence, draft = each.sequence, each.draft
            new = sequence.token_ids[each.num_tokens :]
            num_new, size = len(new), len(draft)
            wrong = np.flatnonzero(new[:size] != np.array(draft.token_ids[:num_new], np.int64))
            num_wrong = min(len(wrong), 1)
            num_right = int(wrong[0]) if num_wrong else min(num_new, size)
            record = self._record(sequence, draft.kind)
            record.note(num_right, num_wrong, sequence.num_tokens)
            self._overall[draft.kind].note(num_right, num_wrong)
            # The last token of a pass is one that a step would have given as well.
            gained = num_new if sequence.held_logits is not None else max(num_new - 1, 0)
            self._metrics.draft_tokens[draft.kind].inc(size)
            self._metrics.accepted_draft_tokens[draft.kind].inc(min(num_right, gained))
        self._verified = ()

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Takes in the texts of sequences that have finished."""
        if self._answers is not None:
            for sequence in sequences:
                self._answers.learn(sequence)

    def _write(
        self,
        model: DraftModel,
        sequences: tuple[Sequence, ...],
        proposed: list[Draft],
        records: list[Record],
        sizes: list[int],
    ) -> None:
        """Has the draft model write as many draft tokens as were chosen."""
        writing = [
            i
            for i, draft in enumerate(proposed)
            if draft is _TO_BE_WRITTEN and sequences[i].num_tokens >= records[i].resume_at
        ]
        written: list[tuple[int, ...]] = []
        if any(sizes[i] for i in writing):
            written = model.propose([sequences[i] for i in writing], [sizes[i] for i in writing])
        for i, draft in enumerate(proposed):
            if draft is _TO_BE_WRITTEN:
                proposed[i] = NO_DRAFT
        for i, token_ids in zip(writing, written, strict=False):
            grammar = sequences[i].grammar
            if token_ids and grammar is not None:
                token_ids = token_ids[: grammar.num_allowed(token_ids)]
            proposed[i] = Draft(token_ids, model.kind)

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

    def _propose(self, sequence: Sequence, room: int) -> Draft:
        """As many draft tokens as the first proposer has that has some."""
        num_tokens = sequence.num_tokens
        if room < 1:
            return NO_DRAFT
        for proposer in self._proposers:
            if not proposer.serves(sequence):
                continue
            record = self._record(sequence, proposer.kind)
            # What a grammar forces is found without looking for it.
            if num_tokens < record.resume_at and proposer.kind != "grammar":
                continue
            if record.untried is not None:
                position, token_id = record.untried
                record.untried = None
                num_right = int(sequence.token_ids[position] == token_id)
                record.note(num_right, 1 - num_right, num_tokens)
            token_ids = proposer.propose(sequence, room)
            if token_ids and sequence.grammar is not None:
                token_ids = token_ids[: sequence.grammar.num_allowed(token_ids)]
            if token_ids:
                return Draft(token_ids, proposer.kind)
            record.note_none(num_tokens)
        return NO_DRAFT

    def _record(self, sequence: Sequence, kind: DraftKind) -> Record:
        records = self._records.get(sequence)
        if records is None:
            records = self._records[sequence] = {}
        if kind not in records:
            # Other texts may repeat themselves more than this one.
            records[kind] = Record(min(self._overall[kind].rate, _MOST_AT_FIRST))
        return records[kind]
