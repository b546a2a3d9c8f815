"""Request: one request of the simulation, from its arrival to its one outcome."""

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """429: the queue of its replica was full."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the tokens that follow it. Times are in seconds since the start.

    Attributes:
        conversation: which one it belongs to; it has its beginning in common with its other turns.
        instructions: which ones it begins with; several conversations share them.
        num_instructions: tokens of those.
        num_prompt: tokens to read, the instructions and earlier turns among them.
        num_generated: tokens to generate.
        arrived: when the client sent it.
        num_cached: prompt tokens that the replica's prefix cache had.
        first_token: when the first token was there.
        ended: when it had its outcome.
        outcome: None as long as it is open.
    """

    conversation: int
    instructions: int
    num_instructions: int
    num_prompt: int
    num_generated: int
    arrived: float
    num_cached: int = 0
    first_token: float = 0.0
    ended: float = 0.0
    outcome: Outcome | None = None

    def end(self, outcome: Outcome, now: float) -> None:
        """Notes its outcome, which it gets once."""
        assert self.outcome is None, "a request has one outcome"
        self.outcome, self.ended = outcome, now

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.arrived

    @property
    def end_to_end(self) -> float:
        return self.ended - self.arrived
