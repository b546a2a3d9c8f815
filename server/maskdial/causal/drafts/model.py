"""DraftModel: draft tokens of a smaller model with the same vocabulary."""

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.policy import StepCosts, pass_clock
from maskdial.causal.executor import Cache, DecodeAndPrefill
from maskdial.causal.sequence import Sequence
from maskdial.errors import DeviceLostError
from maskdial.metrics import DraftKind
from maskdial.runtime.logits import Logits, SummarizedLogits
from maskdial.runtime.piece import Piece

_log = logging.getLogger(__name__)


class DraftRunner(Protocol):
    """What it needs of a model; `maskdial.runtime.runner` describes the methods."""

    @property
    def cache(self) -> Cache: ...
    @property
    def decode_and_prefill(self) -> DecodeAndPrefill | None: ...
    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Logits: ...


@dataclass(slots=True)
class Place:
    """A sequence's slot in the draft model's cache, and what is in it.

    Attributes:
        slot: its number.
        num_read: tokens of the text that the slot holds.
        first: how many come before them in the text.
        drafted: the draft tokens that it holds after them.
    """

    slot: int
    num_read: int = 0
    first: int = 0
    drafted: tuple[int, ...] = ()


class DraftModel:
    """Writes the likeliest tokens, for all sequences at once, over a cache of its own.

    A prompt is read when its sequence first decodes, some tokens in each step; until the draft
    model has read it all, the sequence has no drafts. Draft tokens that were right stay in the
    cache.

    Args:
        runner: of a model without recurrent layers, with the shared pass of the kernels.
        slots: sequences that run at once.
        max_length: tokens of a slot.
        chunk_tokens: of prompts, read between two steps.
        name: the model's, for messages.
    """

    kind: DraftKind = "model"

    def __init__(
        self, runner: DraftRunner, *, slots: int, max_length: int, chunk_tokens: int, name: str
    ) -> None:
        self._runner = runner
        self._max_length = max_length
        self._chunk_tokens = chunk_tokens
        self._name = name
        self._free = list(range(slots))
        self._places: dict[Sequence, Place] = {}
        self.costs = StepCosts()

    def num_unread(self, sequence: Sequence) -> int:
        """Tokens of a text that it has not read, at least 1; about, after drafts of its own."""
        place = self._places.get(sequence)
        num_read = 0 if place is None else place.num_read + len(place.drafted)
        return max(sequence.num_tokens - num_read, 1)

    def seconds_to_read(self, sequence: Sequence) -> float:
        """About how long it takes to read the next chunk of a text, and to write a draft token."""
        num_tokens = min(self.num_unread(sequence), self._chunk_tokens)
        return self.costs.per_step + num_tokens * self.costs.per_token

    def serves(self, sequence: Sequence) -> bool:
        """Whether a sequence fits into its context."""
        return sequence.num_tokens < self._max_length

    def propose(
        self, sequences: SequenceOf[Sequence], sizes: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """What probably follows the newest token of each sequence, as far as grammars allow it.

        Args:
            sequences: that decode, at least one.
            sizes: how many draft tokens each may have, at least 1.

        Returns:
            At most so many for each; none where the text has not been read, or a pass failed.

        Raises:
            DeviceLostError: the device is gone.
        """
        self._release()
        try:
            return self._propose(sequences, sizes)
        except DeviceLostError:  # of the model itself as well
            raise
        except Exception:  # the texts go on without drafts
            _log.exception("a pass of draft model %r failed", self._name)
            for sequence in list(self._places):
                self._leave(sequence)
            return [()] * len(sequences)

    def _propose(
        self, sequences: SequenceOf[Sequence], sizes: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        found: dict[Sequence, list[int]] = {}
        wanted = dict(zip(sequences, sizes, strict=True))
        began = pass_clock()
        first, num_read = self._read([each for each in sequences if self.serves(each)])
        began = self._note(began, num_read)
        for sequence, token_id in first.items():
            room = self._max_length - sequence.num_tokens
            wanted[sequence] = min(wanted[sequence], room)
            found[sequence] = [token_id]
        while going := [s for s, tokens in found.items() if len(tokens) < wanted[s]]:
            for sequence, token_id in self._step(going, found).items():
                found[sequence].append(token_id)
            began = self._note(began, len(going))
        for sequence, token_ids in found.items():
            # The last one is in no slot yet.
            self._places[sequence].drafted = tuple(token_ids[:-1])
        return [_allowed(s, tuple(found.get(s, ())[: wanted[s]])) for s in sequences]

    def _note(self, began: float, num_tokens: int) -> float:
        """Takes in a step that has read so many tokens; when it ended."""
        ended = pass_clock()
        if num_tokens:
            self.costs.observe(num_tokens, ended - began)
        return ended

    def _read(self, sequences: SequenceOf[Sequence]) -> tuple[dict[Sequence, int], int]:
        """Reads what the slots lack, up to the newest tokens.

        Returns:
            The first draft token of each sequence that is read to its end, and how many tokens were
            read.
        """
        pieces, left, ended = [], self._chunk_tokens, []
        for sequence in sequences:
            place = self._enter(sequence)
            if place is None:
                continue
            text, start = self._text(sequence, place), place.num_read
            token_ids = text[start : start + max(left, 0)]
            if not len(token_ids):
                continue
            left -= len(token_ids)
            pieces.append(self._piece(sequence, place, token_ids, start))
            place.num_read += len(token_ids)
            ended.append(sequence if place.num_read == len(text) else None)
        if not pieces:
            return {}, 0
        pairs = zip(ended, self._run(pieces), strict=True)
        first = {sequence: token_id for sequence, token_id in pairs if sequence is not None}
        return first, self._chunk_tokens - left

    def _step(
        self, sequences: SequenceOf[Sequence], found: dict[Sequence, list[int]]
    ) -> dict[Sequence, int]:
        """The next draft token of each sequence."""
        ordered = sorted(sequences, key=lambda each: self._places[each].slot)
        rows = np.array([self._places[each].slot for each in ordered], np.int64)
        token_ids, lengths = np.zeros(rows[-1] + 1, np.int64), np.ones(rows[-1] + 1, np.int64)
        token_ids[rows] = [found[each][-1] for each in ordered]
        lengths[rows] = [each.num_tokens + len(found[each]) - 1 for each in ordered]
        best = _best(self._runner.decode(token_ids, lengths, rows))
        return dict(zip(ordered, best, strict=True))

    def _text(self, sequence: Sequence, place: Place) -> NDArray[np.int64]:
        """The tokens to read of a sequence, from the first one of its slot on."""
        return sequence.token_ids

    def _piece(
        self, sequence: Sequence, place: Place, token_ids: NDArray[np.int64], start: int
    ) -> Piece:
        """Tokens of a sequence that follow the first ``start`` ones of its slot."""
        return Piece.of(place.slot, token_ids, start)

    def _run(self, pieces: list[Piece]) -> list[int]:
        """The likeliest token after each piece."""
        together = self._runner.decode_and_prefill
        assert together is not None, "a draft model has the shared pass"
        none = np.empty(0, np.int64)
        return _best(together(none, none, none, pieces))

    def _enter(self, sequence: Sequence) -> Place | None:
        """A sequence's place, its wrong draft tokens forgotten; None if no slot is free."""
        place = self._places.get(sequence)
        if place is None:
            if not self._free:
                return None
            place = self._places[sequence] = Place(self._free.pop(0))
        self._return(sequence, place)
        return place

    def _return(self, sequence: Sequence, place: Place) -> None:
        """Finds what a slot has of a text now."""
        following = sequence.token_ids[place.num_read :].tolist()
        pairs = enumerate(zip(place.drafted, following, strict=False))
        num_right = next((i for i, (one, other) in pairs if one != other), None)
        if num_right is None:
            num_right = min(len(place.drafted), len(following))
        # The newest token is read again, for its logits.
        place.num_read = min(place.num_read + num_right, sequence.num_tokens - 1)
        place.drafted = ()

    def _release(self) -> None:
        """Frees the slots of sequences that have ended."""
        for sequence in [each for each in self._places if each.slot < 0]:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        slot = self._places.pop(sequence).slot
        self._runner.cache.release_pages(slot)
        self._free.append(slot)
        self._free.sort()


def _allowed(sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Draft tokens, as far as the sequence's grammar allows them."""
    if sequence.grammar is None or not token_ids:
        return token_ids
    return token_ids[: sequence.grammar.num_allowed(token_ids)]


def _best(logits: Logits) -> list[int]:
    """The likeliest token of each row."""
    if isinstance(logits, SummarizedLogits):
        return [int(each) for each in logits.best]
    return [int(each) for each in np.asarray(logits).argmax(-1)]
