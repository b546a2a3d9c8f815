"""Child processes: what they answer, how they end, and what they are not told."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from maskdial.engine.child import ChildDiedError, ChildLimits, ChildProcess, child_environment
from maskdial.errors import UnavailableError

LIMITS = ChildLimits(cpu_seconds=0.5, wall_seconds=60.0, memory_bytes=256 * 2**20)
MODULE = """
import os, time
from maskdial.engine.child import serve

def prepare(setup):
    def answer(question):
        if "echo" in question:
            return [setup, question["echo"]]
        if "variable" in question:
            return os.environ.get(question["variable"])
        if "megabytes" in question:
            return len(b"x" * question["megabytes"] * 2**20)
        if "sleep" in question:
            time.sleep(question["sleep"])
        if question.get("exit"):
            os._exit(1)
        while question.get("spin"):
            pass
    return answer

if __name__ == "__main__":
    serve(prepare)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    (tmp_path / "answers_for_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    child = ChildProcess("answers_for_a_test", {"a": "é\ud800"}, LIMITS)
    yield child
    child.close()


def test_values_arrive_as_they_were_sent(child: ChildProcess) -> None:
    value = {"text": "line\nline\u2028\ud83d", "list": [1, 2.5, None, True], "long": "x" * 10**6}
    assert child.ask({"echo": value}) == [{"a": "é\ud800"}, value]


@pytest.mark.parametrize(
    ("question", "too_complex"),
    [({"spin": True}, True), ({"sleep": 600}, False), ({"exit": True}, False)],
)
def test_a_child_that_does_not_answer_is_replaced(
    child: ChildProcess,
    monkeypatch: pytest.MonkeyPatch,
    question: dict[str, object],
    too_complex: bool,
) -> None:
    limits = replace(LIMITS, wall_seconds=0.5) if "sleep" in question else LIMITS
    with monkeypatch.context() as patch:
        patch.setattr(child, "_limits", limits)
        with pytest.raises(ChildDiedError) as died:
            child.ask(question)
    assert died.value.too_complex == too_complex
    assert child.ask({"echo": 1})[1] == 1


def test_the_limit_of_time_is_for_one_answer(child: ChildProcess) -> None:
    for _ in range(3):
        child.ask({"sleep": 0.01})
    busy = time.process_time()
    while time.process_time() - busy < 0.6:  # this process's time is not the child's
        pass
    assert child.ask({"echo": 2})[1] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_memory_is_limited(child: ChildProcess) -> None:
    assert child.ask({"megabytes": 50}) == 50 * 2**20
    with pytest.raises(ChildDiedError):
        child.ask({"megabytes": 1000})


def test_a_stopped_child_is_ended(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    child.ask({"echo": 1})
    assert child._process is not None
    os.kill(child._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(child, "_limits", replace(LIMITS, wall_seconds=0.5))
        with pytest.raises(ChildDiedError):  # the question is larger than a pipe
            child.ask({"echo": "x" * 10**6})
    assert child.ask({"echo": 1})[1] == 1


def test_only_what_a_child_needs_passes() -> None:
    secrets = {
        "MASKDIAL_API_KEYS": "k",
        "HF_TOKEN": "k",
        "DATABASE_URL": "postgres://user:k@host",
        "LD_PRELOAD": "k.so",
    }
    needed = {"PATH": "/bin", "LC_ALL": "C", "PYTHONUTF8": "1", "HOME": "/root"}
    kept = child_environment(secrets | needed)
    assert kept.pop("PYTHONPATH")
    assert kept == needed


def test_secrets_in_the_environment_stay_here(
    child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASKDIAL_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
        assert child.ask({"variable": name}) is None
    assert child.ask({"variable": "PATH"}) == os.environ["PATH"]


def test_a_child_that_cannot_start_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ChildProcess("no.such.module", {}, LIMITS)
    with pytest.raises(UnavailableError, match=r"no\.such\.module.*could not be started"):
        missing.ask({})
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(UnavailableError, match="could not be started"):
        missing.ask({})


def test_nothing_is_left_after_close(child: ChildProcess) -> None:
    child.ask({"echo": 1})
    assert child._process is not None
    pid = child._process.pid
    child.close()
    assert not psutil.pid_exists(pid)
