"""Streams: what their tokens' times say about a decode step."""

from collections.abc import Sequence

from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

Times = list[float]
"""When a stream was asked for, then when each of its tokens came, in seconds from any start."""

_PROMPT_CHUNK = 128
_SETTLING = 2


def num_lead(work: Work) -> int:
    """Tokens that the first stream may write before the last one has read its prompt, and some."""
    return work.batch * -(-work.length // _PROMPT_CHUNK) + 2 * _SETTLING


def decode_seconds(streams: Sequence[Times], num_steps: int) -> float:
    """The time of one step while all streams run: the mean of the first ``num_steps`` such steps.

    Raises:
        LoadTestError: a stream ended before the last one had begun.
    """
    begun = max(times[_SETTLING] for times in streams)
    ended = min(times[-1] for times in streams)
    together = [time for time in streams[0][1:] if begun <= time <= ended][: num_steps + 1]
    if len(together) < 2:
        raise LoadTestError(f"{len(streams)} streams did not run together")
    return (together[-1] - together[0]) / (len(together) - 1)
