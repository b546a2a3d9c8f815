"""Plan: one iteration of the engine, as the scheduler decides it and the executor runs it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """The first ``num_tokens`` of slot ``source`` are to be copied to slot ``target``."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """A block of the prefix cache is to be written to a slot, from position ``start`` on."""

    slot: int
    start: int
    block: NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The next piece of a prompt: ``num_tokens`` tokens from position ``start`` on."""

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.start + self.num_tokens == self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration: copy the moves and the loads, then decode, then prefill.

    ``rows`` are the sequences of slots 0..n-1. All of them decode, save those that are still
    reading their prompt in a hole or have a token to draw first: such a row runs along with a token
    of no meaning, written to a position that the row's next real token overwrites, and its logits
    are not asked for.
    """

    moves: tuple[Move, ...] = ()
    loads: tuple[Load, ...] = ()
    drawing: tuple[Sequence, ...] = ()
    """Sequences that need no pass for their next token: its logits are held.

    Another sequence read their prompt, or their grammar was late.
    """
    rows: tuple[Sequence, ...] = ()
    decoding_rows: tuple[int, ...] = ()
    """The rows that decode, as indices."""
    drafts: tuple[int, ...] = ()
    """Token ids guessed to follow, for the pass to check; only where one sequence runs alone."""
    prefills: tuple[Prefill, ...] = ()
    """One chunk of a prompt, or several whole prompts in adjoining slots, read together."""

    @property
    def decoding(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from the decode pass."""
        return tuple(self.rows[row] for row in self.decoding_rows)
