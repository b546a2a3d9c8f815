"""StepTimes: how long a step of the causal engine takes, from what was measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtests import LoadTestError
from loadtests.engine.steps import Row

Curve = tuple[tuple[int, float], ...]
"""Points (number, seconds), ascending; between and beyond them, straight lines."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time of a step, in seconds: that of its decode rows and that of the prompts it reads.

    Attributes:
        decode: a decode step by its rows, without what the attention to their context takes.
        decode_per_token: of a decode step, per token in the cache of its rows.
        prefill: the reading of a prompt's first tokens, by their number.
        prefill_per_pair: of reading, per token read and token in the cache before them.
        beside: what rows that decode add to a step that reads, by their number, without their
            context; empty if they add a decode step, as a pass of their own does.
        block_tokens: of a block of the prefix cache; prompts up to that may be read together.
        packs: whether prompts that are read together are not padded to the longest.
    """

    decode: Curve
    decode_per_token: float
    prefill: Curve
    prefill_per_pair: float
    beside: Curve = ()
    block_tokens: int = 1
    packs: bool = False

    @classmethod
    def from_rows(cls, rows: Sequence[Row], block_tokens: int, packs: bool) -> "StepTimes":
        """Separates the cost of the context from the others in rows of the section ``steps``.

        Raises:
            LoadTestError: there are no decode steps, or no prompts, among them.
        """
        decoding = sorted((row for row in rows if row.kind == "decode"), key=_size)
        reading = sorted((row for row in rows if row.kind == "prefill"), key=_size)
        if not decoding or not reading:
            raise LoadTestError("the step times need decode steps and prompts")
        per_token, per_pair = _per_context(decoding), _per_context(reading)
        prefill = _curve((row.tokens, row.mean_ms / 1e3 - per_pair * row.work) for row in reading)
        added: dict[int, list[float]] = {}
        for row in rows:
            if row.kind == "mixed":
                alone = _at(prefill, row.tokens) + per_token * row.rows * row.context
                added.setdefault(row.rows, []).append(row.mean_ms / 1e3 - alone)
        return cls(
            _curve((row.rows, row.mean_ms / 1e3 - per_token * row.work) for row in decoding),
            per_token,
            prefill,
            per_pair,
            beside=tuple((rows, max(fmean(each), 0.0)) for rows, each in sorted(added.items())),
            block_tokens=block_tokens,
            packs=packs,
        )

    @classmethod
    def read(cls, path: Path) -> "StepTimes":
        """Reads the report of ``loadtests engine --sections steps --output FILE``.

        Raises:
            LoadTestError: it is not such a report.
        """
        try:
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**row) for row in report["sections"]["steps"]["rows"]]
            return cls.from_rows(rows, int(report["query_block"]), bool(report["packs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise LoadTestError(
                f"{path} has no step times; write it with: loadtests engine --sections steps "
                "--output FILE"
            ) from error

    def decode_seconds(self, rows: int, context: int, steps: int = 1) -> float:
        """Some decode steps in succession, of rows that have ``context`` tokens at first."""
        tokens = steps * context + rows * steps * (steps - 1) // 2
        return steps * _at(self.decode, rows) + self.decode_per_token * tokens

    def decode_steps(self, rows: int, context: int, seconds: float) -> int:
        """The fewest decode steps that take at least so long: inverts `decode_seconds`."""
        first = _at(self.decode, rows) + self.decode_per_token * context
        growth = self.decode_per_token * rows
        # steps * first + growth * steps * (steps - 1) / 2 = seconds
        linear = first - growth / 2
        root = math.sqrt(linear * linear + 2 * growth * seconds)
        steps = max(math.floor(2 * seconds / (linear + root)), 0)
        while self.decode_seconds(rows, context, steps) < seconds:
            steps += 1
        return steps

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        """The reading of ``tokens`` tokens behind ``start`` others."""
        return _at(self.prefill, tokens) + self.prefill_per_pair * tokens * start

    def read_tokens(self, prompts: Sequence[int]) -> int:
        """What reading whole prompts together counts as, given the tokens of each."""
        return sum(prompts) if self.packs else len(prompts) * max(prompts)

    def mixed_seconds(self, rows: int, context: int, tokens: int, start: int = 0) -> float:
        """A step that decodes rows, with ``context`` tokens, and reads a prompt."""
        reading = self.prefill_seconds(tokens, start)
        if not rows:
            return reading
        if not self.beside:
            return reading + self.decode_seconds(rows, context)
        added = _at(((0, 0.0), *self.beside), rows)
        return reading + added + self.decode_per_token * context


def _size(row: Row) -> tuple[int, int]:
    return row.rows * row.tokens, row.context


def _per_context(rows: Sequence[Row]) -> float:
    """Seconds per unit of `Row.work`, from rows that differ in nothing but their context."""
    slopes = [
        (long.mean_ms - short.mean_ms) / (long.work - short.work) / 1e3
        for short, long in pairwise(rows)
        if (short.rows, short.tokens) == (long.rows, long.tokens)
    ]
    return max(slopes[0], 0.0) if slopes else 0.0


def _curve(points: Any) -> Curve:
    """The first point of each number, which is the one with the shortest context."""
    found: dict[int, float] = {}
    for number, seconds in points:
        found.setdefault(number, max(seconds, 0.0))
    return tuple(sorted(found.items()))


def _at(curve: Curve, number: int) -> float:
    """The value at ``number``, on the line through the two points next to it; 0 at least."""
    if len(curve) == 1:
        return curve[0][1]
    after = next((i for i, (right, _) in enumerate(curve) if i and number <= right), -1)
    (left, low), (right, high) = curve[after - 1], curve[after]
    return max(low + (high - low) * (number - left) / (right - left), 0.0)
