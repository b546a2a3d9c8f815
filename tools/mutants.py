"""Puts faults into the pure parts of the server, and reports those that no test notices.

    .venv/bin/pip install mutmut
    .venv/bin/python -m tools.mutants ROOM [--sample N] [--seed N]

mutmut changes one expression at a time and runs the tests that reach it. It works on a copy, in
``build/mutants/ROOM``, and leaves its verdicts there: ``mutmut browse`` shows them.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MUTMUT = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()"]
# Where mutmut looks for the package, which lies in server/ here.
_SOURCE = "src"
# Called while classes are made, before mutmut's functions are in their places.
_LEFT_OUT = ("dialects/body.py",)
_BESIDE = ("clients", "docs", "export", "loadtests", "tests", "tools", "training")
_UNNOTICED: dict[int | None, str] = {
    0: "no test fails",
    5: "no test reaches it",
    33: "no test reaches it",
}


@dataclass(frozen=True, slots=True)
class Room:
    """Modules, as patterns below ``server/maskdial``, and their tests, below ``tests``."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


_ENGINE = ("unit/causal/test_engine*.py", "unit/causal/test_encoder.py")
_TASKS = (
    "tasks",
    "embed",
    "late_interaction",
    "question_answering",
    "token_classify",
    "zero_shot",
)
# How texts are read depends on models and their tokenizers.
_TASKS_OF_MODELS = (
    "http/test_http_masked.py",
    "http/test_http_truncation.py",
    "http/test_http_score.py",
    "http/test_http_errors.py",
    "export/test_*_pipeline.py",
    "export/test_embeddings.py",
    "export/test_multi_vector.py",
    "export/test_rerankers.py",
    "export/test_sentence_transformers.py",
)
ROOMS = {
    "scheduler": Room(("causal/scheduler.py",), ("unit/causal/test_scheduler.py", *_ENGINE)),
    "sequence": Room(
        ("causal/sequence.py",),
        ("unit/causal/test_sequence.py", "unit/causal/test_scheduler.py", *_ENGINE),
    ),
    "stop": Room(("causal/stop.py",), ("unit/causal/test_stop.py",)),
    "sampling": Room(
        ("causal/sampling/*.py",),
        (
            "unit/causal/test_sampler.py",
            "unit/causal/test_device_sampler.py",
            "unit/causal/test_encoder.py",
            "kernels/test_kernels_vocabulary.py",
        ),
    ),
    "tasks": Room(
        ("masked/tasks/*.py",),
        (
            *(f"unit/masked/test_{name}.py" for name in _TASKS),
            "unit/test_score.py",
            *_TASKS_OF_MODELS,
        ),
    ),
    "batcher": Room(
        ("masked/batcher.py",), ("unit/masked/test_batcher.py", "unit/masked/test_engine.py")
    ),
    "fairness": Room(
        ("engine/fairness.py",),
        (
            "unit/engine/test_fairness.py",
            "unit/http/test_client_limits.py",
            "unit/masked/test_batcher.py",
            "unit/causal/test_scheduler.py",
        ),
    ),
    "keys": Room(("http/keys.py",), ("unit/http/test_keys.py", "http/test_http_keys.py")),
    "limits": Room(("http/limits.py",), ("unit/http/test_client_limits.py",)),
    "versions": Room(
        ("registry/versions.py",), ("unit/registry/test_registry.py", "http/test_http_models.py")
    ),
    "dialects": Room(
        ("dialects/*.py", "dialects/*/*.py"),
        (
            "unit/dialects/test_bodies.py",
            "unit/http/test_large_bodies.py",
            "http/test_http_chat.py",
            "http/test_http_errors.py",
            "http/test_http_generate.py",
            "http/test_http_grammar.py",
            "http/test_http_masked.py",
            "http/test_http_parameters.py",
            "http/test_http_score.py",
            "http/test_openai_*.py",
            "http/test_anthropic.py",
            "http/test_ollama.py",
        ),
    ),
}


def main() -> int:
    """Runs the command; returns 1 if a fault went unnoticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--sample", type=int, metavar="N", help="so many faults (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    args = parser.parse_args()
    folder = ROOT / "build" / "mutants" / args.room
    _lay_out(folder, ROOMS[args.room])
    # mutmut writes all faults and times the tests before it misses the names that it is given.
    generate = [*_MUTMUT, "run", "--max-children", "1", "none"]
    subprocess.run(generate, cwd=folder, capture_output=True, check=False)
    names = sorted(_verdicts(folder))
    if args.sample is not None:
        names = sorted(random.Random(args.seed).sample(names, min(args.sample, len(names))))
    subprocess.run([*_MUTMUT, "run", "--max-children", "1", *names], cwd=folder, check=True)
    verdicts = _verdicts(folder)
    unnoticed = [name for name in names if verdicts[name] in _UNNOTICED]
    for name in unnoticed:
        print(f"\n{name}: {_UNNOTICED[verdicts[name]]}", flush=True)
        subprocess.run([*_MUTMUT, "show", name], cwd=folder, check=True)
    print(f"\n{args.room}: tests notice {len(names) - len(unnoticed)} of {len(names)} faults")
    return 1 if unnoticed else 0


def _lay_out(folder: Path, room: Room) -> None:
    """Makes the copy, with the configuration for one room."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "server" / "maskdial", folder / _SOURCE / "maskdial")
    for name in _BESIDE:
        shutil.copytree(ROOT / name, folder / name)
    tests = [str(file) for each in room.tests for file in (ROOT / "tests").glob(each)]
    settings = {
        "source_paths": [_SOURCE],
        "only_mutate": [f"{_SOURCE}/maskdial/{each}" for each in room.modules],
        "do_not_mutate": [f"{_SOURCE}/maskdial/{each}" for each in _LEFT_OUT],
        "also_copy": list(_BESIDE),
        "pytest_add_cli_args": ["--numprocesses=0"],
        "pytest_add_cli_args_test_selection": [
            str(Path(file).relative_to(ROOT)) for file in sorted(tests)
        ],
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = "\n".join(("[tool.mutmut]", *lines, ""))
    (folder / "pyproject.toml").write_text(f"{project}\n{table}", encoding="utf-8")


def _verdicts(folder: Path) -> dict[str, int | None]:
    """Exit codes of the tests by the names of the faults; None: it was not tried."""
    found: dict[str, int | None] = {}
    for file in sorted((folder / "mutants" / _SOURCE).rglob("*.meta")):
        found |= json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
    return found


if __name__ == "__main__":
    sys.exit(main())
