"""Passes by threads: how operators divide their work, and what barriers cost."""

import ctypes
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from loadtests.measurement import Section, median, take_turns

BARRIER_RUNS = 200
SEGMENT = 4096
"""Logits of a task."""


@dataclass(frozen=True, slots=True)
class Traced:
    """Calls of one operator of the kernels that had as many tasks in their largest part.

    Attributes:
        operator: its type.
        tasks: in a call.
        barriers: of all calls: the times that the threads began and ended together.
        calls: how many.
        nanoseconds: of all calls.
    """

    operator: str
    tasks: int
    barriers: int
    calls: int
    nanoseconds: int


@contextmanager
def traced(library: Path) -> Iterator[list[Traced]]:
    """Counts what the kernels of one session do; the list is filled at the end."""
    loaded = ctypes.CDLL(str(library))
    loaded.maskdial_traced.restype = ctypes.c_char_p
    loaded.maskdial_traced.argtypes = (ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64))
    found: list[Traced] = []
    loaded.maskdial_trace(1)
    try:
        yield found
    finally:
        loaded.maskdial_trace(0)
        numbers = (ctypes.c_uint64 * 4)()
        while (name := loaded.maskdial_traced(len(found), numbers)) is not None:
            found.append(Traced(name.decode(), *numbers))


@dataclass(frozen=True, slots=True)
class PassRow:
    """One kind of pass with one number of threads.

    Attributes:
        work: what the pass computes.
        threads: of the session.
        milliseconds: median of the rounds.
        speedup: over the least number of threads.
        operators_ms: what the kernels' operators took in the fastest round.
        barriers: in a pass.
        barrier_us: what one costs without work.
    """

    work: str
    threads: int
    milliseconds: float
    speedup: float
    operators_ms: float
    barriers: float
    barrier_us: float


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of a pass with one number of threads.

    Attributes:
        work: what the pass computes.
        operator: its type; those with other numbers of tasks have rows of their own.
        calls: in a pass.
        threads: of the session.
        tasks: in a call.
        microseconds: of a call.
    """

    work: str
    operator: str
    calls: float
    threads: int
    tasks: int
    microseconds: float


def barrier_seconds(library: Path, threads: int, *, spinning: bool) -> float:
    """What threads with a task of microseconds each take longer than one thread with one.

    The lowest decile of the runs, which other load on the machine disturbs the least.
    """
    node = helper.make_node("LogitsSummary", ["x"], ["best", "peak", "sum"], domain="maskdial")
    types = {"best": TensorProto.INT64, "peak": TensorProto.FLOAT, "sum": TensorProto.DOUBLE}
    graph = helper.make_graph(
        [node],
        "barrier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, SEGMENT])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("maskdial", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), options)
    deciles = []
    for num_rows in (1, threads):
        x, taken = np.zeros((num_rows, SEGMENT), np.float32), []
        for _ in range(BARRIER_RUNS):
            with traced(library) as found:
                session.run(None, {"x": x})
            taken.append(found[0].nanoseconds / 1e9)
        deciles.append(float(np.quantile(taken, 0.1)))
    return max(0.0, deciles[1] - deciles[0])


async def measure(
    name: str,
    library: Path,
    passes: Mapping[int, Mapping[str, Callable[[], object]]],
    seconds: float,
    *,
    spinning: bool,
) -> list[Section]:
    """Measures passes by numbers of threads, in turns: a table of them and one of their operators.

    Args:
        name: of the bundle.
        library: the kernels.
        passes: by threads, and then by what they compute.
        seconds: measuring time.
        spinning: whether the sessions' threads spin.
    """
    barriers = {each: barrier_seconds(library, each, spinning=spinning) for each in passes}
    least = min(passes)
    pass_rows, operator_rows = [], []
    rounds = 0
    for work in passes[least]:
        fastest: dict[int, tuple[float, list[Traced]]] = {}
        turns = {each: _turn(library, passes[each][work], each, fastest) for each in passes}
        samples = await take_turns(turns, seconds / len(passes[least]))
        rounds = len(samples[least])
        for threads, taken in samples.items():
            _, found = fastest[threads]
            pass_rows.append(
                PassRow(
                    work,
                    threads,
                    1000 * median(taken),
                    median(samples[least]) / median(taken),
                    sum(each.nanoseconds for each in found) / 1e6,
                    sum(each.barriers for each in found),
                    1e6 * barriers[threads],
                )
            )
        operator_rows += [
            OperatorRow(
                work,
                each.operator,
                each.calls,
                threads,
                each.tasks,
                each.nanoseconds / 1000 / each.calls,
            )
            for threads, (_, found) in fastest.items()
            for each in sorted(found, key=lambda one: -one.nanoseconds)
        ]
    return [
        Section(f"{name}, passes", f"passes of {name} by threads", rounds, tuple(pass_rows), ()),
        Section(f"{name}, operators", f"tasks of {name}'s operators", 1, tuple(operator_rows), ()),
    ]


def _turn(
    library: Path,
    run: Callable[[], object],
    threads: int,
    fastest: dict[int, tuple[float, list[Traced]]],
) -> Callable[[], Awaitable[float]]:
    async def turn() -> float:
        with traced(library) as found:
            started = time.perf_counter()
            run()
            taken = time.perf_counter() - started
        if threads not in fastest or taken < fastest[threads][0]:
            fastest[threads] = taken, found
        return taken

    return turn
