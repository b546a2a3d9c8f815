"""Plan: one step of the engine, as the scheduler decides it and the executor runs it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """Copies the first ``num_tokens`` of slot ``source`` to slot ``target``."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copies the first ``num_tokens`` of a slot to main memory, for a sequence that has left it."""

    sequence: Sequence
    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Copies ``num_tokens`` tokens of slot ``source``, from position ``start`` on, to ``target``.

    From 0 on, the source text is copied as well.
    """

    source: int
    target: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Writes a block of the prefix cache, or what was saved, to a slot from ``start`` on."""

    slot: int
    start: int
    block: NDArray[np.generic]
    states: NDArray[np.float32] | None = None
    """The states of recurrent layers after the block; with a prefix's last one only."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Writes the states of recurrent layers after a shared prompt to a slot that has its tokens."""

    slot: int
    states: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The next chunk of a prompt: ``num_tokens`` tokens from position ``start`` on."""

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it completes the prompt."""
        return self.start + self.num_tokens == self.sequence.num_prompt


@dataclass(frozen=True)
class Plan:
    """One step: copy the forks, the moves, the loads and the states, then decode, then prefill or
    encode.

    ``rows`` are the sequences of slots 0..n-1. Those that are still prefilling, or hold logits, or
    whose block at work waits for its turn, are dummy rows of the decode pass: it writes a token to
    a position that the row's next real token overwrites, and returns no logits for them.
    """

    forks: tuple[Fork, ...] = ()
    moves: tuple[Move | Save | Load, ...] = ()
    """In this order: a slot may be saved once something was moved to it, and before more is. What
    was saved is loaded here, as a sibling may start from the slot at once.
    """
    loads: tuple[Load, ...] = ()
    restores: tuple[Restore, ...] = ()
    awaiting_mask: tuple[Sequence, ...] = ()
    """Sequences whose next token is sampled from their held logits, without a pass.

    A sibling prefilled their shared prompt, or their grammar mask was not ready.
    """
    rows: tuple[Sequence, ...] = ()
    decoding_rows: tuple[int, ...] = ()
    """The rows that decode, as indices."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Draft tokens for the pass to verify, of each sequence that decodes; () if there are none."""
    prefills: tuple[Prefill, ...] = ()
    """One chunk of a prompt, or several whole prompts in adjoining slots, as one padded batch."""
    encoding: tuple[Sequence, ...] = ()
    """Sequences whose source texts the encoder reads, as one padded batch."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        copies = self.forks or self.moves or self.loads or self.restores
        return not (copies or self.awaiting_mask or self.rows or self.prefills or self.encoding)

    @cached_property
    def decoding(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from the decode pass."""
        return tuple(self.rows[row] for row in self.decoding_rows)
