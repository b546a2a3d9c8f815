"""Work: what every entrant is asked to do, and what its time means."""

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal

Family = Literal["causal", "masked"]
Provider = Literal["cpu", "cuda"]
Load = Literal["small", "large", "many"]
Kind = Literal["prefill", "decode", "generate", "pass", "read"]
SHORT_CONTEXT = 96
LONG_CONTEXT = 1000
CONCURRENCY = (1, 2, 4, 8, 16)
LARGE_CONCURRENCY = (1, 8, 64)
MANY_CONCURRENCY = (1, 64, 256)
USUAL_LOAD: dict[Provider, Load] = {"cpu": "small", "cuda": "large"}


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement; its result is always a time in seconds.

    Attributes:
        kind: ``prefill``: one prompt until its first new token. ``decode``: one step of ``batch``
            texts, each after a prompt. ``generate``: ``batch`` prompts until the last text is
            complete. ``pass``: ``batch`` texts through a masked model. ``read``: a buffer, once.
        batch: texts at a time.
        length: tokens of each prompt or text; MiB of the buffer.
        repeats: steps, passes or reads to average over.
        least: for ragged texts, the fewest tokens of one, while ``length`` is the most; 0 if all
            have ``length``.
        new_tokens: for ``generate``, the most new tokens of a text, while ``least`` is the fewest.
        per_second: whether to report texts or tokens per second.
    """

    kind: Kind
    batch: int
    length: int
    repeats: int = 1
    least: int = 0
    new_tokens: int = 0
    per_second: bool = False

    @property
    def name(self) -> str:
        lengths = f"{self.least} to {self.length:,}" if self.least else f"{self.length:,}"
        if self.kind == "prefill":
            return f"prefill, {lengths} tokens"
        if self.kind == "decode":
            return f"decode, batch {self.batch}, context {lengths}+"
        if self.kind == "generate":
            new = f"{self.least} to {self.new_tokens:,}"
            return f"generate, batch {self.batch}, {lengths} tokens, then {new} new ones"
        if self.kind == "pass":
            return f"{self.batch} x {lengths}"
        return f"read {self.length} MiB"

    @property
    def unit(self) -> str:
        """The unit of `value`."""
        if self.per_second:
            return "texts/s" if self.kind == "pass" else "tok/s"
        return {"prefill": "tok/s", "decode": "ms/step", "pass": "ms", "read": "GB/s"}[self.kind]

    @property
    def texts(self) -> tuple[tuple[int, int], ...]:
        """Tokens of each prompt or text, and of what is generated after it; always the same."""
        rng = random.Random(0)
        if not self.least:
            return ((self.length, self.new_tokens),) * self.batch
        return tuple(
            (
                rng.randint(self.least, self.length),
                rng.randint(self.least, self.new_tokens) if self.new_tokens else 0,
            )
            for _ in range(self.batch)
        )

    def value(self, seconds: float) -> float:
        """Converts a time into `unit`."""
        if self.kind == "generate":
            return sum(new for _, new in self.texts) / seconds
        if self.per_second:
            return self.batch / seconds
        if self.kind == "prefill":
            return self.length / seconds
        if self.kind == "read":
            return self.length * 2**20 / seconds / 1e9
        return 1000 * seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Room:
    """The most texts at once, and the most tokens of a text with its prompt."""

    batch: int
    context: int


def _large_causal(batches: tuple[int, ...], most: int) -> tuple[Work, ...]:
    """Decode steps of so many texts, and the most of them at once with ragged lengths."""
    return (
        Work("read", 1, 4096, 8),
        Work("prefill", 1, 512),
        Work("prefill", 1, 1000),
        *(Work("decode", batch, SHORT_CONTEXT, 64, per_second=True) for batch in batches),
        Work("generate", most, 512, least=16, new_tokens=256, per_second=True),
    )


_LARGE_MASKED = (
    Work("pass", 1, 128, 50),
    Work("pass", 32, 128, 20, per_second=True),
    Work("pass", 32, 128, 20, least=16, per_second=True),
)

WORK: dict[Load, dict[Family, tuple[Work, ...]]] = {
    "small": {
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
    },
    "large": {
        "causal": _large_causal(LARGE_CONCURRENCY, 64),
        "masked": _LARGE_MASKED,
    },
    "many": {"causal": _large_causal(MANY_CONCURRENCY, 256), "masked": _LARGE_MASKED},
}
"""In the order of the table. Weights are read at batch 1, where memory bandwidth is the limit."""

ROOM: dict[Load, Room] = {"small": Room(16, 1152), "large": Room(64, 1024), "many": Room(256, 1024)}
