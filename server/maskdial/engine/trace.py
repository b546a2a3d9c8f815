"""Trace: which work of the engines belongs to the request that is being handled.

Nothing is noted unless the request is traced; then its span tells when the work was done.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a text went through an engine, and how long it was.

    Times are in `time.perf_counter` seconds, 0 for what never happened. Texts with the same
    ``prompt`` shared its ``input_tokens``, of which ``cached_tokens`` came from the prefix cache.
    Masked models generate no tokens.
    """

    prompt: object
    input_tokens: int
    arrived_at: float
    started_at: float
    ended_at: float
    first_token_at: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""


class Work(Protocol):
    """A text in an engine."""

    @property
    def timeline(self) -> Timeline:
        """What has happened to it so far."""
        ...


work_of_request: ContextVar[list[Work] | None] = ContextVar("work_of_request", default=None)
"""That of the request which is being handled; None if it is not traced."""


def note(*work: Work) -> None:
    """Notes that work is done for the request which is being handled."""
    noted = work_of_request.get()
    if noted is not None:
        noted.extend(work)
