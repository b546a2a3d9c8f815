"""How much of a GPU's KV cache holds tokens: slots of one length or several, or pages; simulated.

    python -m tools.cache_simulation

Prints two tables for docs/lab/gpu.md. Requests wait in a long queue, so memory is the limit.
Medians and means of their lengths are published; that they are lognormal, with the sigma below, is
assumed:

- ShareGPT, Alpaca: means in Kwon et al. 2023, "Efficient Memory Management for Large Language Model
  Serving with PagedAttention", section 6.1.
- Azure's traces of conversations and code: medians in Patel et al. 2024, "Splitwise", section III.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.runtime.providers.cuda import CudaProvider

CACHE_TOKENS = 440_000
"""Of an 8B Llama (128 KiB a token) in 57 GB: 90% of what its weights leave of 80 GB."""
PAGE = 256
MOST = 512
_SIGMA = 1.0
_STEPS = 6000
_WARM_UP = 2000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and outputs in tokens: medians of lognormal distributions."""

    name: str
    prompt: float
    output: float

    def draw(self, rng: np.random.Generator, context: int) -> tuple[int, int]:
        """One request's; a prompt leaves room for an output, which ends with the context."""
        prompt, output = (
            max(int(rng.lognormal(math.log(median), _SIGMA)), 1)
            for median in (self.prompt, self.output)
        )
        prompt = min(prompt, context - 1)
        return prompt, min(output, context - prompt)


def _of_mean(mean: float) -> float:
    """The median of a lognormal distribution."""
    return mean / math.exp(_SIGMA**2 / 2)


WORKLOADS = (
    Lengths("Alpaca", _of_mean(19.31), _of_mean(58.45)),
    Lengths("ShareGPT", _of_mean(161.31), _of_mean(337.99)),
    Lengths("Azure, conversation", 1020, 129),
    Lengths("Azure, code", 1500, 13),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Means over steps: texts at once, and the share of the cache that their tokens fill; and how
    often a text that had begun lost its memory, per text that ended.
    """

    running: float
    filled: float
    preempted: float


class Slots:
    """A cache of slots of some lengths, each of which has an equal part of the tokens.

    A text takes the shortest slot that is free and has room for one more token.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._free = {each: CACHE_TOKENS // len(lengths) // each for each in sorted(lengths)}

    def take(self, tokens: int) -> int:
        """The length of a slot for a text of so many tokens; 0 if none is free."""
        for length, number in self._free.items():
            if number and length > tokens:
                self._free[length] -= 1
                return length
        return 0

    def give(self, length: int) -> None:
        """Takes a slot back."""
        self._free[length] += 1


class Pages:
    """A cache of pages, of which a text has as many as it needs for one more token."""

    def __init__(self) -> None:
        self._free = CACHE_TOKENS // PAGE

    def take(self, tokens: int) -> int:
        """What pages for a text hold; 0 if there are not enough."""
        number = tokens // PAGE + 1
        if number > self._free:
            return 0
        self._free -= number
        return number * PAGE

    def give(self, length: int) -> None:
        """Takes pages back."""
        self._free += length // PAGE


def simulate(lengths: Lengths, context: int, cache: Slots | Pages, seed: int = 0) -> Result:
    """Steps of a token for each running text.

    Where a text outgrows its room and there is no other, it leaves, and goes on later from a copy.
    """
    rng = np.random.default_rng(seed)
    running: list[list[int]] = []  # tokens now, at the end, and in the cache
    waiting: list[list[int]] = []
    ended = preempted = 0
    counts, filled = [], []
    for step in range(_STEPS):
        for text in [text for text in running if text[0] >= text[2]]:
            cache.give(text[2])
            text[2] = cache.take(text[0])
            if not text[2]:
                running.remove(text)
                waiting.insert(0, text)
                preempted += step >= _WARM_UP
        while len(running) < MOST:
            if not waiting:
                prompt, output = lengths.draw(rng, context)
                waiting.append([prompt, prompt + output, 0])
            waiting[0][2] = cache.take(waiting[0][0])
            if not waiting[0][2]:
                break
            running.append(waiting.pop(0))
        for text in running:
            text[0] += 1
        if step >= _WARM_UP:
            counts.append(len(running))
            filled.append(sum(text[0] for text in running) / CACHE_TOKENS)
            ended += sum(text[0] >= text[1] for text in running)
        for text in [text for text in running if text[0] >= text[1]]:
            cache.give(text[2])
            running.remove(text)
    return Result(float(np.mean(counts)), float(np.mean(filled)), preempted / max(ended, 1))


def step_milliseconds(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of an 8B model in half precision on an H100: its weights (16 GB at 3 TB/s), or 16 GFLOP a row
    at 600 TFLOP/s, whichever takes longer.
    """
    return np.maximum(16 / 3, rows * 16 / 600)


def padding(sizes: Sequence[int], most: int = MOST) -> float:
    """How much longer steps of 1 to ``most`` rows, all alike likely, take padded to some sizes."""
    rows = np.arange(1, most + 1)
    padded = np.array(sorted(sizes))[np.searchsorted(sorted(sizes), rows)]
    return float(step_milliseconds(padded).sum() / step_milliseconds(rows).sum())


def tables() -> Iterator[str]:
    """Lines of Markdown."""
    kinds = ("slots of one length", "of a 16th, a quarter and the whole", f"pages of {PAGE}")
    yield f"| lengths | context | {' | '.join(kinds)} |"
    yield "|---|---|---|---|---|"
    for lengths in WORKLOADS:
        for context in (4096, 16_384):
            sizes = (context // 16, context // 4, context)
            caches = (Slots([context]), Slots(sizes), Pages())
            results = (simulate(lengths, context, cache) for cache in caches)
            cells = (
                f"{each.running:.0f} texts, {each.filled:.0%}, {each.preempted:.1%}"
                for each in results
            )
            yield f"| {lengths.name} | {context:,} | {' | '.join(cells)} |"
    yield ""
    yield "| captured sizes | number | time lost to padding |"
    yield "|---|---|---|"
    doubled: tuple[int, ...] = tuple(2**i for i in range(10))
    for name, batches in (
        ("doubled", doubled),
        ("the server's", CudaProvider.batch_sizes),
        ("every 16th beyond 8", (*doubled[:4], *range(16, MOST + 1, 16))),
    ):
        yield f"| {name} | {len(batches)} | {padding(batches) - 1:.1%} |"


if __name__ == "__main__":
    print("\n".join(tables()))
