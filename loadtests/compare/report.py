"""The report of the comparison: tables, and the machine that it ran on."""

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests import LoadTestError
from loadtests.compare.entrants import ENGINE, MEMORY, Entrant
from loadtests.compare.results import Result, Spread, findings, ratio_text
from loadtests.compare.work import Provider, Work
from loadtests.measurement import load_averages, machine

_COLD = "Some work was measured in its warm-up round only: do not quote it."

_PACKAGES = (
    "maskdial",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "triton",
    "transformers",
    "openvino",
    "openvino-genai",
    "nncf",
    "llama-cpp-python",
    "onnxruntime-genai",
)

_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_GPU_FACTS = "name,memory.total,driver_version"


def shape_table(
    heading: str,
    results: Sequence[Result],
    entrants: Iterable[Entrant],
    shares: Mapping[Work, Spread],
) -> str:
    """The section of one shape in Markdown.

    Each cell has the median, and the time relative to our engine's.
    """
    present = {result.entrant for result in results}
    columns = [each for each in entrants if each.name in present and each.name != MEMORY]
    cells = {(result.work, result.entrant): _cell(result) for result in results}
    work = dict.fromkeys(result.work for result in results if result.work.kind != "read")
    rounds = sorted({result.rounds for result in results})
    lines = [
        f"## {heading}",
        "",
        f"Medians of {_count(rounds[0], rounds[-1])}. Ratios are the time relative to our engine's "
        "in the same round: median (least to most).",
        "",
        *([_COLD, ""] * any(result.cold for result in results)),
        _row(("", *(each.name for each in columns))),
        _row(["---"] * (1 + len(columns))),
        *(_row((w.name, *(cells.get((w, each.name), "") for each in columns))) for w in work),
        "",
        *(f"- {each.name}: {each.about}." for each in columns),
        "",
    ]
    if found := findings(results, shares):
        lines += [_row(("work", "measured")), _row(["---"] * 2), *map(_row, found), ""]
    return "\n".join(lines)


def _count(least: int, most: int) -> str:
    number = str(most) if least == most else f"{least} to {most}"
    return f"{number} round{'' if most == 1 else 's'}"


def _cell(result: Result) -> str:
    value = f"{_number(result.value.median)} {result.work.unit}"
    if result.entrant == ENGINE:
        return f"{value} ({_number(result.value.low)} to {_number(result.value.high)})"
    return value if result.faster is None else f"{value}, {ratio_text(result.faster)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def describe(threads: int, provider: Provider) -> dict[str, Any]:
    """The machine as JSON values.

    Raises:
        LoadTestError: the provider is CUDA and there is no GPU.
    """
    processor, flags = _processor()
    return {
        "machine": machine(),
        "processor": processor,
        "instructions": flags,
        "gpu": gpu() if provider == "cuda" else None,
        "threads": threads,
        "load": load_averages(),
        "versions": _versions(),
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The same as text."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        *([f"NVIDIA GPU: {facts['gpu']}"] * bool(facts["gpu"])),
        f"{facts['processor']} ({', '.join(facts['instructions'])})",
        f"{facts['machine']}, {facts['threads']} threads per pass, load {facts['load']}",
        versions,
    ]


def gpu() -> str:
    """Name, memory and driver of the first CUDA device, from nvidia-smi.

    Raises:
        LoadTestError: there is none.
    """
    command = ["nvidia-smi", "--id=0", f"--query-gpu={_GPU_FACTS}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoadTestError(f"--provider cuda needs an NVIDIA GPU: {error}") from error
    return told.stdout.strip()


def _processor() -> tuple[str, list[str]]:
    """The processor's name and its instruction sets that matter here, where known."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor() or platform.machine(), []
    facts: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    has = facts.get("flags", "").split()
    return facts.get("model name", platform.machine()), [flag for flag in _FLAGS if flag in has]


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class Document:
    """The report, with a section for each shape and precision.

    All files are written again after each section, so that an interrupted run keeps the others.
    """

    def __init__(self, output: Path, facts: dict[str, Any], *, append: bool) -> None:
        """Starts a report, or continues the existing one.

        Raises:
            LoadTestError: the existing file is not a report.
        """
        self._output = output
        self._facts = facts
        self._sections: dict[str, Any] = {}
        if append and self.beside(".json").exists():
            try:
                self._sections = json.loads(self.beside(".json").read_text("utf-8"))["sections"]
            except (ValueError, KeyError, TypeError) as error:
                raise LoadTestError(
                    f"{self.beside('.json')} is not a report to append to"
                ) from error

    def add(self, name: str, section: dict[str, Any]) -> None:
        """Adds or replaces a section and writes the files."""
        self._sections[name] = section
        self._output.parent.mkdir(parents=True, exist_ok=True)
        report = self._facts | {"sections": self._sections}
        self.beside(".json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        tables = [each["table"] for each in self._sections.values()]
        text = "\n\n".join([*lines(self._facts), *tables])
        self.beside(".md").write_text(text.rstrip() + "\n", "utf-8")

    def beside(self, ending: str) -> Path:
        """The file with that ending."""
        return self._output.with_name(self._output.name + ending)
