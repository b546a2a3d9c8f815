"""Results: medians and ratios over the rounds."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from loadtests.compare.entrants import ENGINE, HTTP, MEMORY
from loadtests.compare.work import Work

Times = dict[Work, dict[str, dict[int, float]]]
"""Seconds by work, entrant name and round."""

_HTTP_STREAMS = 8

# These read a few rows of a table, not all of it.
_READS_ROWS = (
    "Gather",
    "GatherND",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "RotaryEmbedding",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None without values."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1]) if ordered else None

    def as_json(self) -> dict[str, float]:
        return {"min": self.low, "median": self.median, "max": self.high}


@dataclass(frozen=True, slots=True)
class Result:
    """One entrant at one piece of work.

    Attributes:
        value: in the work's unit.
        faster: its time relative to our engine's, round by round; None for the engine itself and
            without a common round.
        rounds: how many were measured.
        cold: whether the warm-up round is among them.
    """

    work: Work
    entrant: str
    value: Spread
    faster: Spread | None
    rounds: int
    cold: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work.as_json() | {"name": self.work.name},
            "entrant": self.entrant,
            "unit": self.work.unit,
            "value": self.value.as_json(),
            "times_our_engine": None if self.faster is None else self.faster.as_json(),
            "rounds": self.rounds,
            "cold": self.cold,
        }


def results_of(times: Times) -> list[Result]:
    """In the order of the work, then of the entrants."""
    results = []
    for work, by_name in times.items():
        engine = by_name.get(ENGINE, {})
        for name, by_round in by_name.items():
            value = Spread.of(work.value(seconds) for seconds in by_round.values())
            assert value is not None, "an entrant without a time is not in the times"
            faster = None if name == ENGINE else _ratios(by_round, engine)
            results.append(Result(work, name, value, faster, len(by_round), 0 in by_round))
    return results


def _ratios(theirs: Mapping[int, float], ours: Mapping[int, float]) -> Spread | None:
    return Spread.of(theirs[number] / ours[number] for number in theirs.keys() & ours.keys())


@dataclass(frozen=True, slots=True)
class Reads:
    """What a decode step must read, in bytes: all weights, and the KV cache of each text."""

    weights: int
    kv_per_token: int

    def of(self, work: Work) -> int:
        """For a step halfway through the measured ones."""
        return self.weights + self.kv_per_token * work.batch * (work.length + work.repeats // 2)


def memory_shares(times: Times, reads: Reads) -> dict[Work, Spread]:
    """The share of the memory bandwidth that our engine uses in decode steps; 1 is all of it.

    The limit is a single read of all that must be read, at the highest bandwidth of any round.
    """
    speeds = [
        work.value(seconds) * 1e9
        for work, by_name in times.items()
        for seconds in by_name.get(MEMORY, {}).values()
    ]
    shares = {}
    for work, by_name in times.items():
        if work.kind == "decode" and speeds:
            least = reads.of(work) / max(speeds)
            share = Spread.of(least / seconds for seconds in by_name.get(ENGINE, {}).values())
            if share is not None:
                shares[work] = share
    return shares


def findings(results: Iterable[Result], shares: Mapping[Work, Spread]) -> list[tuple[str, str]]:
    """What our engine's times say beside the ratios: HTTP's share, and the memory's."""
    rows = [
        (f"{each.work.name}: HTTP's share of the engine's speed", f"{1 / each.faster.median:.0%}")
        for each in results
        if each.faster is not None
        and (each.entrant, each.work.kind, each.work.batch) == (HTTP, "decode", _HTTP_STREAMS)
    ]
    for work, share in shares.items():
        figure = f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"
        rows.append((f"{work.name}: share of the memory's read bandwidth", figure))
    return rows


def ratio_text(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def bytes_read(graph: Path) -> int:
    """The size of all constants except those of which only rows are read, such as embeddings."""
    model = onnx.load(graph, load_external_data=False).graph
    read = {name for node in model.node if node.op_type not in _READS_ROWS for name in node.input}
    return sum(_size(tensor) for tensor in model.initializer if tensor.name in read)


def _size(tensor: onnx.TensorProto) -> int:
    width: float = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        width = 0.5
    return int(math.prod(tensor.dims) * width)
