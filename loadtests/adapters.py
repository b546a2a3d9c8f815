"""``python -m loadtests adapters``: decode steps of texts with adapters, against the base alone."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtests import LoadTestError, add_number
from loadtests.measurement import load_averages, machine
from maskdial.bundle.adapter import LowRank, Projection
from maskdial.bundle.bundle import load_bundle
from maskdial.kernels.adapters import PackedAdapter
from maskdial.kernels.installed import Kernels, find_kernels
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

DESCRIPTION = (
    "Time decode steps of 8 texts of a causal bundle that have random adapters, in turns with the "
    "base in a graph that takes none, on one thread and by its processor time."
)
_BATCH, _PROMPT, _ROOM = 8, 32, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="PATH", help="causal bundle to measure"
    )
    parser.add_argument(
        "--rank", type=int, default=16, metavar="R", help="of the adapters (default: %(default)s)"
    )
    parser.add_argument(
        "--layers",
        default="",
        metavar="ENDINGS",
        help="how the names of adapted layers end, with commas, as q_proj,v_proj (default: all)",
    )
    add_number(parser, "--seconds", 30.0, "S", "measuring time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def main(args: argparse.Namespace) -> int:
    """Measures and prints; returns 0."""
    console = Console()
    kernels = find_kernels("on")
    assert kernels is not None, "the setting is on"
    plain, adapted = (_open(args.bundle, kernels, adapters=each) for each in (False, True))
    projections = adapted.projections
    endings = tuple(args.layers.split(","))
    layers = {name: each for name, each in projections.items() if name.endswith(endings)}
    if not layers:
        raise LoadTestError(f"no layer of {args.bundle} ends in {args.layers}")
    started = time.perf_counter()
    packed = [_adapter(kernels, layers, args.rank, seed) for seed in range(_BATCH)]
    load_ms = 1000 * (time.perf_counter() - started) / _BATCH
    size = sum(2 * args.rank * (each.num_inputs + each.num_outputs) for each in layers.values())
    addresses = [each.address for each in packed]
    cases: dict[str, tuple[Runner, list[int]]] = {
        "the base alone": (_runner(args.bundle, plain), []),
        "none": (_runner(args.bundle, adapted), [0] * _BATCH),
    }
    runner = cases["none"][0]
    for count in (1, 2, _BATCH):
        cases[f"{count} adapters"] = runner, (addresses * _BATCH)[:count] * (_BATCH // count)
    runs = {name: partial(_step, *case) for name, case in cases.items()}
    times = _take_turns(runs, args.seconds)
    base = statistics.median(times["the base alone"])
    title = f"rank {args.rank} in {len(layers)} layers, {size / 1e6:.1f} MB each"
    table = Table(title=f"{title}, made and packed in {load_ms:.0f} ms")
    for heading in ("adapters", "ms", "by the base's"):
        table.add_column(heading, justify="left" if heading == "adapters" else "right")
    for name, each in times.items():
        median = statistics.median(each)
        table.add_row(name, f"{1000 * median:.2f}", f"{median / base:.2f}")
    console.print(f"{args.bundle.name}; {machine()}, load {load_averages()}")
    console.print(table)
    if args.output is not None:
        medians = {name: 1000 * statistics.median(each) for name, each in times.items()}
        report = {"rank": args.rank, "layers": len(layers), "bytes": size, "milliseconds": medians}
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _open(bundle: Path, kernels: Kernels, *, adapters: bool) -> Session:
    options = SessionOptions(
        intra_op_threads=1, kernels=kernels, kv_cache="auto", adapters=adapters
    )
    return Session(load_bundle(bundle.name, bundle).graph, options)


def _runner(bundle: Path, session: Session) -> Runner:
    """With a prompt in each slot."""
    manifest = load_bundle(bundle.name, bundle).manifest
    if manifest.kv is None:
        raise LoadTestError(f"{bundle} is not a causal bundle")
    runner = Runner(
        session,
        manifest.kv.stored_as(session.kv_cache),
        slots=_BATCH,
        max_length=_ROOM,
        vocab_size=manifest.vocab_size,
    )
    prompt = np.arange(1, _PROMPT + 1, dtype=np.int64)
    for slot in range(_BATCH):
        runner.prefill(slot, prompt, 0)
    return runner


def _adapter(
    kernels: Kernels, layers: dict[str, Projection], rank: int, seed: int
) -> PackedAdapter:
    generator, adapter = np.random.default_rng(seed), PackedAdapter(kernels.path)
    for place in layers.values():
        a, b = (
            (0.02 * generator.standard_normal((rank, size), np.float32)).astype(np.float16)
            for size in (place.num_inputs, place.num_outputs)
        )
        adapter.add(LowRank(a, b), place)
    return adapter


def _step(runner: Runner, addresses: list[int]) -> float:
    """The seconds of a step, after one that brings its own matrices into the caches."""
    if runner.adapters is not None:
        runner.adapters[:] = addresses
    token_ids, lengths = np.full(_BATCH, 5), np.full(_BATCH, _PROMPT)
    for _ in range(2):
        started = time.thread_time()
        runner.decode(token_ids, lengths, np.arange(_BATCH))
    return time.thread_time() - started


def _take_turns(cases: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    ends_at = time.monotonic() + seconds
    while not times["none"] or time.monotonic() < ends_at:
        for name, run in cases.items():
            times[name].append(run())
    return times
