"""Work: what every entrant is asked to do, and what its time means."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Family = Literal["causal", "masked"]
Kind = Literal["prefill", "decode", "pass", "read"]

SHORT_CONTEXT = 96
LONG_CONTEXT = 1000
CONCURRENCY = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement; its result is always a time in seconds.

    Attributes:
        kind: ``prefill``: one prompt until its first new token. ``decode``: one step of ``batch``
            texts, each after a prompt. ``pass``: ``batch`` texts through a masked model. ``read``:
            a buffer read once.
        batch: texts at a time.
        length: tokens of each prompt or text; MiB of the buffer.
        repeats: steps, passes or reads of which the mean is taken.
    """

    kind: Kind
    batch: int
    length: int
    repeats: int = 1

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill, {self.length:,} tokens"
        if self.kind == "decode":
            return f"decode, batch {self.batch}, context {self.length:,}+"
        if self.kind == "pass":
            return f"{self.batch} x {self.length}"
        return f"read {self.length} MiB"

    @property
    def unit(self) -> str:
        """What `value` counts."""
        return {"prefill": "tok/s", "decode": "ms/step", "pass": "ms", "read": "GB/s"}[self.kind]

    def value(self, seconds: float) -> float:
        """The time as people know it, in `unit`."""
        if self.kind == "prefill":
            return self.length / seconds
        if self.kind == "read":
            return self.length * 2**20 / seconds / 1e9
        return 1000 * seconds

    def tokens_per_second(self, seconds: float) -> float:
        """Throughput: new tokens of a decode step, else tokens read."""
        return self.batch * (1 if self.kind == "decode" else self.length) / seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


WORK: dict[Family, tuple[Work, ...]] = {
    "causal": (
        Work("read", 1, 512, 4),
        Work("prefill", 1, 512),
        Work("prefill", 1, 1000),
        *(Work("decode", batch, SHORT_CONTEXT, 32) for batch in CONCURRENCY),
        Work("decode", 4, LONG_CONTEXT, 16),
    ),
    "masked": (
        Work("pass", 1, 16, 24),
        Work("pass", 1, 128, 8),
        Work("pass", 8, 32, 5),
        Work("pass", 8, 128, 2),
    ),
}
"""In the order of the table. Weights are read at batch 1, which the memory's speed limits."""
