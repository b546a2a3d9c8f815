"""The comparison as a whole, and its child processes, with entrants made up for the test."""

import json
import os
from pathlib import Path

import pytest

import loadtests
from loadtests.__main__ import main
from loadtests.compare.child import Child
from loadtests.compare.entrants import ENGINE, HTTP, MEMORY, Entrant
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

FAKE = """
import os
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper


def prepare(setup):
    print("chatter on standard output")
    if setup.variant == "unpreparable":
        raise ValueError("no such model\\nand details")
    setup.bundle.mkdir(parents=True, exist_ok=True)
    weights = helper.make_tensor("w", TensorProto.INT8, [512, 1024], bytes(512 * 1024), raw=True)
    node = helper.make_node("Neg", ["w"], ["y"])
    graph = helper.make_graph([node], "graph", [], [], [weights])
    onnx.save(helper.make_model(graph), setup.bundle / "model.onnx")


def open_runner(setup):
    if setup.variant == "unloadable":
        raise RuntimeError()
    return Runner(setup.variant)


class Runner:
    def __init__(self, variant):
        self.variant = variant
        self.turns = 0

    def run(self, work):
        self.turns += 1
        print("more chatter")
        if self.variant == "mortal":
            os._exit(3)
        if self.variant == "fails later" and self.turns > 2:
            raise RuntimeError("out of breath")
        return float(self.variant) if self.variant.replace(".", "").isdigit() else 1.0

    def close(self):
        Path(sys.argv[0]).exists()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose module ``fakes.entrant`` child processes find."""
    package = tmp_path / "fakes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "entrant.py").write_text(FAKE, encoding="utf-8")
    root = Path(loadtests.__file__).parents[1]
    paths = [str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path


def entrant(name: str, variant: str, needs: tuple[str, ...] = (), makes: str = "") -> Entrant:
    return Entrant(name, "causal", "fakes.entrant", f"about {name}", needs, variant, makes)


def setup(folder: Path, variant: str) -> Setup:
    return Setup(str(folder), "causal", variant, "", "int8", "exporter", 2, 0)


def serve(folder: Path, variant: str) -> Child:
    return Child.serve(entrant("x", variant), setup(folder, variant), folder / "log")


STEP = Work("decode", 1, 96, 48)


def test_a_child_stands_still_between_its_turns(fakes: Path) -> None:
    child = serve(fakes, "0.25")
    try:
        for _ in range(2):
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert child.run(STEP) == 0.25
        assert "more chatter" in (fakes / "log").read_text()
    finally:
        child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_what_a_child_raises_is_told(fakes: Path) -> None:
    child = serve(fakes, "fails later")
    try:
        assert [child.run(STEP), child.run(STEP)] == [1.0, 1.0]
        with pytest.raises(LoadTestError, match=r"RuntimeError: out of breath; see .*log"):
            child.run(STEP)
        with pytest.raises(LoadTestError, match="its process ended"):
            child.run(STEP)
    finally:
        child.close()
    assert "Traceback" in (fakes / "log").read_text()


def test_a_child_that_dies_is_told(fakes: Path) -> None:
    child = serve(fakes, "mortal")
    try:
        with pytest.raises(LoadTestError, match="its process ended"):
            child.run(STEP)
    finally:
        child.close()


def test_a_whole_comparison(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "loadtests.compare.entrants.ENTRANTS",
        (
            entrant(ENGINE, "0.5", makes="bundle"),
            entrant(HTTP, "0.55"),
            entrant("openvino", "0.75"),
            entrant("mute", "unloadable"),
            entrant("lost", "unpreparable", makes="else"),
            entrant("absent", "1", ("no_such_module",)),
            entrant(MEMORY, "2"),
        ),
    )
    monkeypatch.setattr("loadtests.compare.command._exists", lambda module: False)
    output = fakes / "out" / "report"
    arguments = ["--work", str(fakes / "work"), "--only", "causal", "--rounds", "2"]
    assert main(["compare", *arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "absent left out: no_such_module is not installed: pip install -r" in printed.out
    assert "lost left out: ValueError: no such model; see" in printed.out
    assert "mute left out: RuntimeError: no message; see" in printed.out
    assert "no plot: matplotlib is not installed" in printed.out
    table = output.with_name("report.md").read_text(encoding="utf-8")
    assert "|  | engine | http | openvino |" in table
    assert "| prefill, 512 tokens | 1,024 tok/s (1,024 to 1,024) | 931 tok/s, 1.10x" in table
    assert "| prefill, 512 tokens, against openvino | 1.50x (1.50 to 1.50) | >= 1.15x" in table
    assert "absent" in table
    report = json.loads(output.with_name("report.json").read_text(encoding="utf-8"))
    causal = report["families"]["causal"]
    assert causal["weights_read_bytes"] == 512 * 1024
    # 512 MiB in 2 s, so half a MiB in 2/1024 s; a step takes 0.5 s.
    assert causal["memory_share"]["median"] == pytest.approx(2 / 1024 / 0.5)
    ratios = {
        each["entrant"]: each["times_our_engine"]["median"]
        for each in causal["results"]
        if each["times_our_engine"]
    }
    assert ratios == {HTTP: pytest.approx(1.1), "openvino": 1.5}
    (bundle,) = (fakes / "work").glob("causal-0-bundle-int8-*")
    bundle.rename(bundle.with_name("causal-0-bundle-int8-older"))
    assert main(["compare", *arguments, "--peers", "", "--reuse", "--output", str(output)]) == 0
    assert [path.name for path in (fakes / "work").glob("causal*")] == [
        "causal-0-bundle-int8-older"
    ]
    assert set(report["skipped"]) == {"causal mute", "causal lost", "causal absent"}


def test_without_us_there_is_no_comparison(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "loadtests.compare.entrants.ENTRANTS", (entrant(ENGINE, "unpreparable", makes="bundle"),)
    )
    arguments = ["--work", str(fakes / "work"), "--only", "causal", "--rounds", "2"]
    assert main(["compare", *arguments, "--output", str(fakes / "report")]) == 1
    assert "loadtests: engine: ValueError: no such model" in capsys.readouterr().err
    assert main(["compare", *arguments, "--peers", "nobody"]) == 1
    assert "'nobody' is no peer" in capsys.readouterr().err
