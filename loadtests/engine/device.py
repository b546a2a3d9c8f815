"""What passes do on a GPU and around it: operators, submissions, and copies to its memory and back.

Operators are read from ONNX Runtime's profile, which has no submissions, and no copies but those
between operators; these are counted by `loadtests.engine.vulkan`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtests import LoadTestError
from loadtests.engine.vulkan import Traffic, count_traffic
from loadtests.measurement import Section
from maskdial.bundle.bundle import load_bundle
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_QUESTION = "operators of a pass, and what moves between the GPU's memory and the host's"
_SLOTS = 4
_MAX_LENGTH = 64
_PROMPT = 16
_TO_HOST, _FROM_HOST = "MemcpyToHost", "MemcpyFromHost"


@dataclass(frozen=True, slots=True)
class Row:
    """A pass, from its inputs to its logits.

    Attributes:
        kind: ``prefill`` or ``decode``.
        rows: sequences.
        tokens: tokens of each.
        on_device: operators that the GPU ran.
        on_cpu: operators that were left to the CPU.
        round_trips: copies to the host between operators, each of which waits for the GPU; once
            more it waits for the logits.
        bytes_up: copied to the GPU: inputs, what operators on the CPU made, parameters of shaders.
            What is written into memory that both share is not copied.
        bytes_down: copied from the GPU: logits, and in round trips.
        submissions: to the GPU's queue.
        ms: milliseconds of the operators.
    """

    kind: str
    rows: int
    tokens: int
    on_device: int
    on_cpu: int
    round_trips: int
    bytes_up: int | None
    bytes_down: int | None
    submissions: int | None
    ms: float


def measure(path: Path, provider: str, rng: np.random.Generator) -> Section:
    """Runs each kind of pass twice, and counts what the second did.

    Raises:
        BundleError, ConfigError: the provider cannot run the bundle.
        LoadTestError: the bundle is not causal.
    """
    bundle = load_bundle(path.resolve().name, path)
    manifest = bundle.manifest
    if manifest.kv is None:
        raise LoadTestError(f"{path} is a {manifest.family} bundle; this needs a causal one")
    with TemporaryDirectory() as name:
        folder = Path(name)
        read_traffic = count_traffic(folder)
        placement = place(bundle, provider, lambda found: found)
        options = SessionOptions(provider, profile=folder / "profile")
        session = Session(bundle.graph, options)
        runner = Runner(
            session,
            manifest.kv,
            memory=placement.memory,
            slots=_SLOTS,
            max_length=_MAX_LENGTH,
            vocab_size=manifest.vocab_size,
        )
        passes = _run(runner, rng.integers(0, manifest.vocab_size, _PROMPT), read_traffic)
        events = json.loads(session.end_profile().read_text(encoding="utf-8"))
    counted = list(zip(passes, split(events), strict=True))[1::2]
    rows = tuple(summarize(*each, run) for each, run in counted)
    step = rows[1]
    finding = (
        f"a decode step of one row runs {step.on_device} operators on the device and {step.on_cpu} "
        f"on the CPU, with {step.round_trips} round trips"
    )
    return Section("device", _QUESTION, 1, rows, (finding,), _notes(placement))


def _notes(placement: Placement) -> tuple[str, ...]:
    return (
        f"provider {placement.provider.name}; the first pass of a shape, which compiles shaders, "
        "is not counted",
        "a prompt in another slot than the first is copied there on the GPU, which is not counted",
        "bytes and submissions are Vulkan's, and counting them takes Linux and a C compiler",
    )


def _run(
    runner: Runner, prompt: NDArray[np.int64], read_traffic: Callable[[], Traffic] | None
) -> list[tuple[str, int, int, Traffic | None]]:
    """The kind, rows, tokens and traffic of each pass, which all run twice."""
    passes = []

    def run(kind: str, rows: int, tokens: int, make_pass: Callable[[], object]) -> None:
        before = read_traffic() if read_traffic else None
        make_pass()
        after = read_traffic() if read_traffic else None
        moved = after - before if after and before else None
        passes.append((kind, rows, tokens, moved if moved and moved.submissions else None))

    for _ in range(2):
        run("prefill", 1, len(prompt), partial(runner.prefill, 0, prompt, 0))
    for rows in (1, _SLOTS):
        for length in (len(prompt), len(prompt) + 1):
            step = partial(runner.decode, prompt[:rows], np.full(rows, length), np.arange(rows))
            run("decode", rows, 1, step)
    return passes


def split(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each pass, beginning with the pass itself."""
    runs = sorted((each for each in events if each["name"] == "model_run"), key=_start)
    nodes = [each for each in events if each["cat"] == "Node" and "op_name" in each["args"]]
    return [
        [run, *(each for each in nodes if 0 <= _start(each) - _start(run) <= run["dur"])]
        for run in runs
    ]


def _start(event: dict[str, Any]) -> int:
    return int(event["ts"])


def summarize(
    kind: str, rows: int, tokens: int, traffic: Traffic | None, events: Iterable[dict[str, Any]]
) -> Row:
    """Counts the events of a pass, whose traffic is known or not."""
    run, *nodes = events
    of_node = [each["args"] for each in nodes]
    copies = [each for each in of_node if each["op_name"] in (_TO_HOST, _FROM_HOST)]
    down = sum(each["op_name"] == _TO_HOST for each in copies)
    on_cpu = sum(each["provider"] == "CPUExecutionProvider" for each in of_node)
    return Row(
        kind=kind,
        rows=rows,
        tokens=tokens,
        on_device=len(of_node) - len(copies) - on_cpu,
        on_cpu=on_cpu,
        round_trips=down,
        bytes_up=traffic.bytes_up if traffic else None,
        bytes_down=traffic.bytes_down if traffic else None,
        submissions=traffic.submissions if traffic else None,
        ms=run["dur"] / 1000,
    )
