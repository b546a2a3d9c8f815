"""HeadDrafts: draft tokens that are predicted by the model's hidden states."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.model import DraftModel, DraftRunner, Place
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind
from maskdial.runtime.piece import Piece

MAX_KEPT = 2048
"""Tokens of a text whose hidden states wait to be read; older ones are dropped."""

_SPARE = 64  # tokens to come without a new array


class HiddenStates(Protocol):
    """Who has the hidden states; `maskdial.runtime.runner` describes the method."""

    def hidden(self, slots: Iterable[int]) -> list[NDArray[np.float32]]: ...


class HeadRunner(DraftRunner, HiddenStates, Protocol):
    """What it needs of the head."""


class _Kept:
    """The hidden states of adjacent tokens of a text, which wait to be read.

    Attributes:
        start: the position of the first of them.
        end: that of the token after the last.
    """

    __slots__ = ("_base", "_rows", "end", "start")

    def __init__(self) -> None:
        self.start = self.end = self._base = 0
        self._rows = np.empty((0, 0), np.float32)
        """With room at both ends; the first one is of the position ``_base``."""

    def add(self, start: int, rows: NDArray[np.float32]) -> None:
        """Adds those of the tokens from a position on; what is kept of these is replaced."""
        if start > self.end or not len(self._rows):
            # Those between come from the prefix cache, or from another's prompt.
            self.start = self.end = self._base = start
        end = start + len(rows)
        if end <= self.start:  # recurrent layers have read them again
            self.end = self.start
            return
        self.end = end
        if start < self.start or end - self.start > MAX_KEPT:
            first = self.start = max(self.start, end - MAX_KEPT)
            rows = rows[max(first - start, 0) :]
            start = max(start, first)
        if end - self._base > len(self._rows):
            self._make_room(rows.shape[1])
        self._rows[start - self._base : end - self._base] = rows

    def _make_room(self, size: int) -> None:
        """Forgets those before the first one."""
        kept = self._rows[self.start - self._base :]
        room = min(2 * (self.end - self.start), MAX_KEPT) + _SPARE
        self._rows = np.empty((room, size), np.float32)
        if len(kept):
            self._rows[: len(kept)] = kept
        self._base = self.start

    def take(self, count: int) -> NDArray[np.float32]:
        """Removes the first ones, and returns them, valid until others are added."""
        first = self.start - self._base
        self.start += count
        return self._rows[first : first + count]


class HeadDrafts(DraftModel):
    """Predicts by what the model itself has computed, from the hidden states of a text's tokens.

    The head is a layer for multi-token prediction or an EAGLE-3 head.

    It reads each token together with the hidden state of the one before. Where the model has none
    yet, the head's takes its place, so it writes several draft tokens. A slot may begin later than
    its text: with the first token whose hidden state is there.

    Args:
        runner: of the head's graph, as of a draft model.
        main: of the model that it belongs to.
        slots: sequences that run at once.
        max_length: tokens of a slot.
        chunk_tokens: of prompts, read between two steps.
        name: the model's, for messages.
        kind: of the head.
        token_ids: int64 (num_columns,), what the columns of its logits stand for; None if each
            stands for the token of its number.
    """

    def __init__(
        self,
        runner: HeadRunner,
        main: HiddenStates,
        *,
        slots: int,
        max_length: int,
        chunk_tokens: int,
        name: str,
        kind: DraftKind,
        token_ids: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(
            runner, slots=slots, max_length=max_length, chunk_tokens=chunk_tokens, name=name
        )
        self.kind = kind
        self._head, self._main, self._token_ids = runner, main, token_ids
        self._kept: WeakKeyDictionary[Sequence, _Kept] = WeakKeyDictionary()
        self._last: dict[int, NDArray[np.float32]] = {}
        """By slot, its own hidden state of the last token."""

    def keep(self, sequences: SequenceOf[Sequence]) -> None:
        """Keeps the hidden states of the tokens that a pass of the model has just read."""
        hidden = self._main.hidden([sequence.slot for sequence in sequences])
        for sequence, rows in zip(sequences, hidden, strict=True):
            kept = self._kept.get(sequence)
            if kept is None:
                kept = self._kept[sequence] = _Kept()
            kept.add(sequence.num_computed, rows)

    def num_unread(self, sequence: Sequence) -> int:
        """See `DraftModel`."""
        return sequence.num_tokens - 1 - self._kept[sequence].start

    def serves(self, sequence: Sequence) -> bool:
        """Whether the hidden state before the newest token is there."""
        kept = self._kept.get(sequence)
        return kept is not None and kept.end >= sequence.num_tokens - 1 and super().serves(sequence)

    def _text(self, sequence: Sequence, place: Place) -> NDArray[np.int64]:
        return sequence.token_ids[place.first + 1 :]

    def _return(self, sequence: Sequence, place: Place) -> None:
        """Draft tokens are read again: by now, the model has the hidden states before them."""
        kept = self._kept[sequence]
        if place.first + place.num_read != kept.start:
            place.first, place.num_read = kept.start, 0

    def _piece(
        self, sequence: Sequence, place: Place, token_ids: NDArray[np.int64], start: int
    ) -> Piece:
        rows = self._kept[sequence].take(len(token_ids))
        return Piece.of(place.slot, token_ids, start)._replace(previous_hidden=rows)

    def _step(
        self, sequences: SequenceOf[Sequence], found: dict[Sequence, list[int]]
    ) -> dict[Sequence, int]:
        pieces = []
        for sequence in sequences:
            place, drafted = self._places[sequence], found[sequence]
            token_ids, start = np.array(drafted[-1:], np.int64), place.num_read + len(drafted) - 1
            piece = Piece.of(place.slot, token_ids, start)
            pieces.append(piece._replace(previous_hidden=self._last[place.slot]))
        return dict(zip(sequences, self._run(pieces), strict=True))

    def _run(self, pieces: list[Piece]) -> list[int]:
        best = super()._run(pieces)
        slots = [piece.slot for piece in pieces]
        for slot, rows in zip(slots, self._head.hidden(slots), strict=True):
            self._last[slot] = rows[-1:].copy()
        return best if self._token_ids is None else self._token_ids[best].tolist()
