"""The session on a GPU: what becomes of a step that hangs, fails or is repeated, and its parts."""

import argparse
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, checker, shape_inference

import loadtests.compare
from loadtests.compare.setup import find
from maskdial.config import load_config
from tools.gpu_session import __main__ as command
from tools.gpu_session import fatbin, pack, packed, steps
from tools.gpu_session.session import LOGS, RESULTS, Session, Step
from tools.image_locks import ROOT

PYTHON = sys.executable


def step(name: str, code: str, seconds: float = 20.0, **more: Any) -> Step:
    return Step(name, "?", (PYTHON, "-c", code), seconds, **more)


def states(session: Session) -> dict[str, str]:
    return {name: result["state"] for name, result in session.results.items()}


def silent(_: str) -> None:
    pass


def test_each_step_has_a_result_whatever_becomes_of_it(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    planned = [
        step("good", "print('hello')"),
        step("writes", f"open({str(report)!r}, 'w').write('[1]')", report=report),
        step("fails", "raise SystemExit(7)"),
        step("crashes", "import os; os.abort()"),
        step("hangs", "import time; print('begun', flush=True); time.sleep(60)", seconds=1.0),
        Step("absent", "?", ("/nonexistent",), 5),
        step("reads", "import os; print(os.environ['A'])", environment={"A": "set"}),
    ]
    session = Session(tmp_path / "work", tmp_path / "out", silent)
    session.run(planned, 60)
    assert states(session) == {
        "good": "passed",
        "writes": "passed",
        "fails": "failed",
        "crashes": "failed",
        "hangs": "timeout",
        "absent": "failed",
        "reads": "passed",
    }
    results = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert results == json.loads((tmp_path / "work" / RESULTS).read_text()) == session.results
    assert results["good"]["output"] == "hello\n"
    assert results["writes"]["report"] == [1]
    assert results["fails"]["status"] == 7
    assert results["crashes"]["status"] < 0
    assert results["hangs"]["output"] == "begun\n"
    assert results["reads"]["output"] == "set\n"
    assert "==== good\nhello\n" in (tmp_path / "out" / LOGS).read_text()


def test_a_full_disk_ends_no_session(tmp_path: Path) -> None:
    """Neither the copies' nor the session's own: each later step writes the results of all."""
    work, out, told = tmp_path / "work", tmp_path / "out", list[str]()
    out.mkdir()
    (out / LOGS).symlink_to("/dev/full")
    session = Session(work, out, told.append)
    session.run([step("first", "print('hello')")], 60)
    assert json.loads((out / RESULTS).read_text())["first"]["state"] == "passed"
    assert any("No space left on device" in line for line in told)
    (work / "results.partial").symlink_to("/dev/full")
    session.run([step("second", "pass")], 60)
    assert json.loads((work / RESULTS).read_text()).keys() == {"first"}
    (work / "results.partial").unlink()
    (out / LOGS).unlink()
    session.run([step("third", "pass")], 60)
    assert states(session) == dict.fromkeys(("first", "second", "third"), "passed")
    assert json.loads((out / RESULTS).read_text()) == session.results


def test_a_later_run_skips_what_has_ended_and_tries_the_rest_once_more(tmp_path: Path) -> None:
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    planned = [step("first", count), step("long", f"{count}; import time; time.sleep(60)", 30)]
    for tries in (1, 2, 2):
        session = Session(tmp_path / "work", None, silent)
        session.run(planned, 1.0)  # ends before the step's own limit
        assert states(session) == {"first": "passed", "long": "interrupted"}
        assert session.results["long"]["tries"] == tries
    assert (tmp_path / "count").read_text() == "xxx"


def test_no_step_begins_after_the_sessions_end(tmp_path: Path) -> None:
    session = Session(tmp_path, None, silent)
    session.run([step("any", "pass")], 0)
    assert session.results == {}


def test_a_session_that_was_killed_goes_on(tmp_path: Path) -> None:
    """The machine went away in the middle of a step: the file has it as running."""
    code = (
        "import sys; from pathlib import Path; from tools.gpu_session.session import *;"
        "sleep = Step('sleeps', '?', (sys.executable, '-c', 'import time; time.sleep(60)'), 60);"
        f"Session(Path({str(tmp_path)!r})).run([sleep], 60)"
    )
    process = subprocess.Popen([PYTHON, "-c", code], cwd=ROOT)
    while not (tmp_path / RESULTS).is_file() or not (tmp_path / "sleeps.log").is_file():
        time.sleep(0.01)
    process.kill()
    process.wait()
    session = Session(tmp_path, None, silent)
    assert states(session) == {"sleeps": "running"}
    session.run([step("sleeps", "pass")], 20)
    assert states(session) == {"sleeps": "passed"}
    assert session.results["sleeps"]["tries"] == 2


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    """Also in a process group of its own, that is stopped or ignores SIGTERM."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import os, signal, subprocess, sys;"
        f"a = subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0);"
        f"b = subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0);"
        "os.kill(b.pid, signal.SIGSTOP);"
        "print(a.pid, b.pid)"
    )
    session = Session(tmp_path, None, silent)
    session.run([step("leaves", code)], 30)
    assert states(session) == {"leaves": "passed"}
    for pid in map(int, session.results["leaves"]["output"].split()):
        try:
            ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            ended = True
        assert ended, pid


def library(codes: list[tuple[int, bytes]], section: bytes = b".nv_fatbin") -> bytearray:
    """An ELF file with two containers of such code, and padding between them."""
    entries = b"".join(
        struct.pack("<HHIQ12xI32x", 2, 0x101, 64, len(code), arch) + code for arch, code in codes
    )
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    content = container + bytes(-len(container) % 8 + 8) + container
    names = b"\0.names\0" + section + b"\0"
    sections = [
        struct.pack("<IIQQQQ16x", 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQ16x", 1, 3, 0, 0, 64, len(names)),
        struct.pack("<IIQQQQ16x", 8, 1, 0, 0, 64 + len(names), len(content)),
    ]
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, 64 + len(names) + len(content))
    struct.pack_into("<HHH", header, 0x3A, len(sections[0]), len(sections), 1)
    return bytearray(bytes(header) + names + content + b"".join(sections))


def test_one_architectures_code_is_left() -> None:
    codes = [(80, b"a" * 24), (90, b"b" * 16), (120, b"c" * 8), (90, b"d" * 8)]
    made = library(codes)
    starts = [each.start for each in fatbin.containers(made)]
    size = len(made)
    fatbin.keep(made, 90)
    assert len(made) == size
    left = list(fatbin.containers(made))
    assert [each.start for each in left] == starts  # what points to them is left alone
    for each in left:
        assert each.architectures == (90, 90)
        assert [bytes(made[entry][64:]) for entry in each.entries] == [b"b" * 16, b"d" * 8]
    assert b"aaaa" not in made
    assert b"cccc" not in made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MZ" * 100, "not a 64-bit ELF file"),
        (bytes(library([], b".text")), "no CUDA kernels"),
        (bytes(library([(80, b"a" * 8)])), "no kernels for architecture 90; there are: 80"),
        (
            bytes(library([(80, b"a" * 8)])).replace(b"\x08\0\0\0\0\0\0\0", b"\x0c\0\0\0\0\0\0\0"),
            "layout that is not known",
        ),
    ],
    ids=["no library", "no kernels", "others", "another layout"],
)
def test_other_libraries_are_refused(content: bytes, message: str) -> None:
    with pytest.raises((ValueError, struct.error), match=message):
        fatbin.keep(bytearray(content), 90)


def test_what_is_carried_is_what_the_machine_lacks() -> None:
    lacking = pack.packages(["numpy==2.5.2", "Jinja2", "pytest", ""])
    names = {each.partition("==")[0] for each in lacking}
    assert {"onnxruntime-gpu", "transformers", "tokenizers", "uvicorn"} <= names
    assert not names & {"numpy", "jinja2", "pytest", "onnxruntime", "torch"}


def test_parts_are_unpacked_once_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(pack, "SITE", tmp_path / "site")
    with pytest.raises(SystemExit, match="0 of some parts"):
        pack.unpack()
    (tmp_path / "module.py").write_text("")
    with tarfile.open(tmp_path / "all", "w:xz") as archive:
        archive.add(tmp_path / "module.py", "module.py")
    content = (tmp_path / "all").read_bytes()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "part-02-of-02").write_bytes(content[50:])
    with pytest.raises(SystemExit, match="1 of 2 parts"):
        pack.unpack()
    (tmp_path / "parts" / "part-01-of-02").write_bytes(content[:50])
    for _ in range(2):
        pack.unpack()
        assert (tmp_path / "site" / "module.py").is_file()


@pytest.mark.parametrize("provider", ["cuda", "cpu"])
def test_every_step_runs_what_exists(
    provider: steps.Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = list(steps.steps(provider, tmp_path))
    assert len({each.name for each in planned}) == len(planned)
    parser = argparse.ArgumentParser()
    loadtests.compare.add_arguments(parser)
    for each in planned:
        assert each.command[:2] == (PYTHON, "-m")
        assert importlib.util.find_spec(each.command[2]) is not None
        if each.command[2] == "loadtests":
            assert each.command[3] == "compare"
            args = parser.parse_args(each.command[4:])
            written = None if args.prepare_only else args.output.with_suffix(".json")
            assert each.report == written
            assert find(args.shapes)
        with monkeypatch.context() as context:
            for name, value in each.environment.items():
                context.setenv(name, value)
            load_config({})  # refuses what is no setting
    assert planned[0].name == "environment"


def test_a_run_on_the_cpu_ends_with_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps; the rest takes minutes, and is what `loadtests` and `tests/cuda` test."""
    every = steps.steps

    def some(provider: steps.Provider, folder: Path) -> list[Step]:
        return [s for s in every(provider, folder) if s.name in ("environment", "packed-attention")]

    monkeypatch.setattr(steps, "steps", some)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    run = ["run", "--provider", "cpu", "--installed", "--work", str(tmp_path)]
    assert command.main([*run, "--seconds", "0"]) == 3
    assert command.main(run) == 0
    results = json.loads((tmp_path / RESULTS).read_text())
    assert "CPUExecutionProvider" in results["environment"]["output"]
    (measured,) = results["packed-attention"]["report"]
    assert measured["padded_error"] < 1e-5


def test_the_packed_graph_is_one_that_onnxruntime_knows() -> None:
    """It has no kernel on the CPU, where only its form can be checked."""
    import onnxruntime as ort

    for graph in (packed.packed_graph(TensorProto.FLOAT16), packed.padded_graph(TensorProto.FLOAT)):
        checker.check_model(shape_inference.infer_shapes(graph))
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*PackedMultiHeadAttention"):
        ort.InferenceSession(
            packed.packed_graph(TensorProto.FLOAT).SerializeToString(),
            providers=["CPUExecutionProvider"],
        )


def test_token_offsets_are_those_of_removing_padding() -> None:
    """ONNX Runtime's example in the documentation of `RemovePadding`: lengths 1, 2 and 4."""
    offsets = packed.token_offsets(np.array([1, 2, 4], np.int32))
    assert offsets.ravel().tolist() == [0, 4, 5, 8, 9, 10, 11, 1, 2, 3, 6, 7]
