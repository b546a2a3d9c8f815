"""What passes do on a GPU and around it: operators, and copies between its memory and ours."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from loadtests import LoadTestError
from loadtests.measurement import Section
from maskdial.bundle.bundle import load_bundle
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_QUESTION = "operators of a pass, and its copies between the GPU's memory and the host's"
_SLOTS = 4
_MAX_LENGTH = 64
_PROMPT = 16
_TO_HOST, _FROM_HOST = "MemcpyToHost", "MemcpyFromHost"


@dataclass(frozen=True, slots=True)
class Row:
    """A pass, as ONNX Runtime's profile has it.

    Attributes:
        kind: ``prefill`` or ``decode``.
        rows: sequences.
        tokens: tokens of each.
        on_device: operators that the GPU ran.
        on_cpu: operators that were left to the CPU.
        round_trips: copies to the host within the pass, each of which waits for the GPU.
        copies_up: copies to the GPU within the pass.
        copied_bytes: the size of both.
        logits_bytes: what comes down at the end.
        milliseconds: of the pass.
    """

    kind: str
    rows: int
    tokens: int
    on_device: int
    on_cpu: int
    round_trips: int
    copies_up: int
    copied_bytes: int
    logits_bytes: int
    milliseconds: float


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
    placement = place(bundle, provider, lambda found: found)
    with TemporaryDirectory() as folder:
        options = SessionOptions(provider, profile=Path(folder) / "profile")
        session = Session(bundle.graph, options)
        runner = Runner(
            session,
            manifest.kv,
            memory=placement.memory,
            slots=_SLOTS,
            max_length=_MAX_LENGTH,
            vocab_size=manifest.vocab_size,
        )
        passes = _run(runner, rng.integers(0, manifest.vocab_size, _PROMPT))
        events = json.loads(session.end_profile().read_text(encoding="utf-8"))
    logits_bytes = 4 * manifest.vocab_size
    rows = tuple(
        summarize(*each, run, logits_bytes)
        for each, run in list(zip(passes, split(events), strict=True))[1::2]
    )
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
    )


def _run(runner: Runner, prompt: Any) -> list[tuple[str, int, int]]:
    """The kind, rows and tokens of each pass, which all run twice."""
    passes = []
    for _ in range(2):
        runner.prefill(0, prompt, 0)
        passes.append(("prefill", 1, len(prompt)))
    for rows in (1, _SLOTS):
        for length in (len(prompt), len(prompt) + 1):
            lengths = np.full(rows, length)
            runner.decode(prompt[:rows], lengths, np.arange(rows))
            passes.append(("decode", rows, 1))
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
    kind: str, rows: int, tokens: int, events: Iterable[dict[str, Any]], row_bytes: int
) -> Row:
    """Counts the events of a pass, whose rows of logits have so many bytes."""
    run, *nodes = (each for each in events)
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
        copies_up=len(copies) - down,
        copied_bytes=sum(int(each["output_size"]) for each in copies),
        logits_bytes=rows * row_bytes,
        milliseconds=run["dur"] / 1000,
    )
