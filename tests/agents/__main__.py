"""Has agents do a task of three turns on a scripted model, each unmodified and in a clean home.

    python -m tests.agents PROGRAMS [NAME ...]

PROGRAMS is a folder with what `make test-agents` installs: ``node`` and virtual environments. An
agent works if the file is as it should be, no request was refused or failed, and the prompt of the
last turn came from the prefix cache but for what was new. Those that sum up a conversation which
is too long also have to do that by themselves, in a context that is too small, and to go on.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.compaction import CODEX_CONTEXT, SMALL_CONTEXT, CompactingScript, notes
from tests.agents.model import make_model
from tests.agents.programs import AFTER, BEFORE, NOTES, PROGRAMS, Place, Program
from tests.agents.script import Script
from tests.conftest import RunningServer

_TIMEOUT = 600  # seconds for one program: far more than any takes, also on a machine that is busy
_MODELS = ("q3", "q36")
_OUTPUT = "output"
# Nothing but the server is to be reached, also where a program would report home.
_NOWHERE = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
_HERE = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TERM": "dumb", "CI": "1"}


@dataclass(frozen=True, slots=True)
class Result:
    """How a program did, of which nothing is said if it did well."""

    faults: list[str]
    num_turns: int
    num_prompt: int
    num_cached: int

    def __str__(self) -> str:
        share = self.num_cached / max(self.num_prompt, 1)
        return (
            f"{'; '.join(self.faults) or 'works'} | {self.num_turns} turns | {self.num_prompt} "
            f"tokens in the last prompt | {self.num_cached} of them cached ({share:.1%})"
        )


def main(programs: str, *names: str) -> int:
    """Runs the named programs, or all, with both kinds of templates; returns how many failed."""
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = {
            name: make_model(folder / name, refuses_later_system=name == "q36") for name in _MODELS
        }
        with _served(models=models) as server:
            for name in names or PROGRAMS:
                for model in _MODELS:
                    place = _place(folder / f"{name}-{model}", server.url, model, Path(programs))
                    result = _run(PROGRAMS[name], place, server)
                    print(f"{name} on {model} | {result}", flush=True)
                    num_failed += bool(result.faults)
        with _served(models=models, max_context=SMALL_CONTEXT) as server:
            for name in names or PROGRAMS:
                if PROGRAMS[name].notes is not None:
                    place = _place(folder / f"{name}-long", server.url, "q3", Path(programs))
                    result = _run_long(PROGRAMS[name], place)
                    print(f"{name} with a long file | {result}", flush=True)
                    num_failed += bool(result.faults)
    return num_failed


@contextmanager
def _served(**settings: Any) -> Iterator[RunningServer]:
    server = RunningServer(**settings)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _place(folder: Path, url: str, model: str, programs: Path) -> Place:
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    (work / "calc.py").write_text(BEFORE, encoding="utf-8")
    return Place(url, model, home, work, programs.resolve())


def _run(program: Program, place: Place, server: RunningServer) -> Result:
    """Has a program do the task."""
    script = Script(
        program.steps(place), without_tools=program.without_tools, result=program.result
    )
    before = _failures(server)
    faults = _follow(program, place, script)
    if (failed := _failures(server) - before) > 0:
        faults.append(f"{failed:.0f} requests were refused or failed")
    turns = script.turns
    if len(turns) > 1 and turns[-1].num_cached < _cacheable(turns[-2].num_prompt):
        faults.append("the last prompt was read again")
    return _result(faults, place, script)


def _run_long(program: Program, place: Place) -> Result:
    """Has a program read more than the context takes before it does the task."""
    (place.work / NOTES).write_text(notes(), encoding="utf-8")
    assert program.notes is not None
    script = CompactingScript(program.notes(place), program.steps(place))
    place = dataclasses.replace(place, context=CODEX_CONTEXT)
    faults = _follow(program, place, script)
    if program.stumbles and "exit status 1" in faults:
        faults.remove("exit status 1")
    if script.num_summaries != 1:
        faults.append(f"it asked for {script.num_summaries} summaries")
    return _result(faults, place, script)


def _follow(program: Program, place: Place, script: Script) -> list[str]:
    """Runs a program while the model follows a script; returns what went wrong."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(place.home),
        **_NOWHERE,
        **_HERE,
        **program.environment(place),
    }
    faults = []
    with script.followed(), (place.home / _OUTPUT).open("wb") as written:
        try:
            ended = subprocess.run(
                program.command(place),
                cwd=place.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT,
                check=False,
            )
            if ended.returncode:
                faults.append(f"exit status {ended.returncode}")
        except subprocess.TimeoutExpired:
            faults.append(f"not done in {_TIMEOUT} s")
    if (place.work / "calc.py").read_text(encoding="utf-8") != AFTER:
        faults.append("the file is not as it should be")
    return faults


def _result(faults: list[str], place: Place, script: Script) -> Result:
    if faults:
        print((place.home / _OUTPUT).read_text(encoding="utf-8", errors="replace")[-2000:])
    turns = script.turns
    last = turns[-1] if turns else None
    return Result(
        faults, len(turns), last.num_prompt if last else 0, last.num_cached if last else 0
    )


def _cacheable(num_tokens: int) -> int:
    """What of a prompt a later one finds in the cache, at least: it is kept in blocks."""
    return num_tokens - 256


def _failures(server: RunningServer) -> float:
    """Requests that were refused or failed so far."""
    app: Any = server.server.config.app
    return sum(
        float(sample.value)
        for metric in app.state.context.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "maskdial_requests_total"
        and sample.labels["outcome"] not in ("ok", "cancelled")
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
