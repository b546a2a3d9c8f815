"""Sample: what became of one request."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The task of a request."""

    GENERATE = "generate"
    FILL_MASK = "fill-mask"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed.

    ``error_type`` is the server's, or ``connection_failed``, ``stream_ended``, ``bad_reply``,
    ``client_timeout`` (over --timeout) or ``unfinished`` (still waiting when the run was ended).
    ``status`` is None where no HTTP status came.
    """

    error_type: str
    status: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. All times are seconds from the run's start.

    ``intended`` is when the schedule wanted it to start, and what every latency is measured from;
    ``sent`` is when it did start (None: never), ``ended`` when its reply was complete or it failed,
    ``tokens`` when each generated token came.
    """

    kind: Kind
    intended: float
    sent: float | None
    ended: float
    tokens: tuple[float, ...]
    failure: Failure | None
