"""`loadtests.compare` as a command, and its child processes, with fake entrants."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import loadtests
from loadtests import LoadTestError
from loadtests.__main__ import main
from loadtests.compare.child import Child
from loadtests.compare.entrants import ENGINE, HTTP, MEMORY, Entrant
from loadtests.compare.report import gpu
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

FAKE = """
import os
import sys
import time
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from maskdial.bundle.bundle import write_manifest
from maskdial.bundle.manifest import (
    GoldenCheck, Heads, KVLayout, Manifest, ParityReport, SpecialTokens
)


def prepare(setup):
    print("chatter on standard output")
    if setup.variant == "unpreparable":
        raise ValueError("no such model\\nand details")
    if setup.variant == "idle":
        time.sleep(60)
    end = time.process_time() + 1.5
    while setup.variant == "busy" and time.process_time() < end:
        pass
    setup.bundle.mkdir(parents=True, exist_ok=True)
    weights = helper.make_tensor("w", TensorProto.INT8, [512, 1024], bytes(512 * 1024), raw=True)
    node = helper.make_node("Neg", ["w"], ["y"])
    graph = helper.make_graph([node], "graph", [], [], [weights])
    onnx.save(helper.make_model(graph), setup.bundle / "model.onnx")
    manifest = Manifest(
        family="causal",
        task="generate",
        architecture="Fake",
        precision=setup.precision,
        batch_invariant=True,
        vocab_size=2,
        max_length=2,
        special_tokens=SpecialTokens(),
        kv=KVLayout(layers=(Heads(1, 16),)),
        source="fake",
        source_sha256="",
        tool_versions={},
        parity=ParityReport(tolerance=1.0, ragged_batch=0.0),
        golden=GoldenCheck(input_ids=(), row=0, columns=(), logits=(), tolerance=1.0),
        files={},
    )
    write_manifest(setup.bundle, manifest)


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
    """A folder on the path of child processes with the module ``fakes.entrant``."""
    package = tmp_path / "fakes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "entrant.py").write_text(FAKE, encoding="utf-8")
    root = Path(loadtests.__file__).parents[1]
    paths = [str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path


def entrant(name: str, variant: str, needs: tuple[str, ...] = (), **more: Any) -> Entrant:
    return Entrant(name, "causal", "fakes.entrant", f"about {name}", needs, variant, **more)


def setup(folder: Path, variant: str) -> Setup:
    return Setup(str(folder), "tiny-llama", variant, "", "int8", "exporter", 2, 0)


def serve(folder: Path, variant: str) -> Child:
    return Child.serve(entrant("x", variant), setup(folder, variant), folder / "log")


STEP = Work("decode", 1, 96, 48)


def test_a_child_is_stopped_between_its_turns(fakes: Path) -> None:
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


def test_an_exception_in_a_child_is_reported(fakes: Path) -> None:
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


def test_a_child_that_prepares_may_take_its_time_but_not_stand_still(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtests.compare.child._PREPARE_TIMEOUT", 0.5)
    Child.prepare(entrant("x", "busy"), setup(fakes, "busy"), fakes / "log")
    # Starting Python is work, too.
    with pytest.raises(LoadTestError, match=r"no reply within 0.5 s"):
        Child.prepare(entrant("x", "idle"), setup(fakes, "idle"), fakes / "log")


def test_a_child_that_dies_is_reported(fakes: Path) -> None:
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
    output = fakes / "out" / "report"
    arguments = ["--work", str(fakes / "work"), "--only", "causal", "--rounds", "2"]
    assert main(["compare", *arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "absent left out: no_such_module is not installed: pip install -r" in printed.out
    assert "lost left out: ValueError: no such model; see" in printed.out
    assert "mute left out: RuntimeError: no message; see" in printed.out
    table = output.with_name("report.md").read_text(encoding="utf-8")
    assert "|  | engine | http | openvino |" in table
    assert "| prefill, 512 tokens | 1,024 tok/s (1,024 to 1,024) | 931 tok/s, 1.10x" in table
    assert "- absent: left out: no_such_module" in table
    report = json.loads(output.with_name("report.json").read_text(encoding="utf-8"))
    causal = report["sections"]["135m int8"]
    assert causal["weights_read_bytes"] == 512 * 1024
    assert causal["kv_bytes_per_token"] == 2 * 16 * 4
    # 512 MiB in 2 s, so half a MiB in 2/1024 s; a step takes 0.5 s.
    read = 512 * 1024 + 128 * (96 + 16)
    share = causal["memory_shares"]["decode, batch 1, context 96+"]["median"]
    assert share == pytest.approx(read / 2**28 / 0.5)
    ratios = {
        each["entrant"]: each["times_our_engine"]["median"]
        for each in causal["results"]
        if each["times_our_engine"]
    }
    assert ratios == {HTTP: pytest.approx(1.1), "openvino": 1.5}
    assert set(causal["skipped"]) == {"mute", "lost", "absent"}
    (bundle,) = (fakes / "work").glob("135m-0-bundle-int8-*")
    bundle.rename(bundle.with_name("135m-0-bundle-int8-older"))
    assert main(["compare", *arguments, "--peers", "", "--reuse", "--output", str(output)]) == 0
    assert [path.name for path in (fakes / "work").glob("135m*")] == ["135m-0-bundle-int8-older"]


@pytest.mark.zoo
def test_a_report_grows_shape_by_shape(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "loadtests.compare.entrants.ENTRANTS",
        (
            entrant(ENGINE, "0.5", makes="bundle", providers=("cuda",), ragged=True),
            entrant("compiled", "1.25", providers=("cuda",), ragged=True),
            entrant("fails", "mortal", providers=("cuda",)),
            entrant(MEMORY, "2", providers=("cuda",)),
            entrant("openvino", "1"),
        ),
    )
    monkeypatch.setattr("loadtests.compare.report.gpu", lambda: "a GPU")
    output = fakes / "report"
    arguments = ["compare", "--work", str(fakes / "work"), "--output", str(output)]
    arguments += ["--provider", "cuda", "--rounds", "2", "--append"]
    assert main([*arguments, "--shapes", "7b", "--prepare-only"]) == 0
    assert not output.with_name("report.json").exists()
    assert [path.name[:22] for path in (fakes / "work").glob("7b*")] == ["7b-cuda-0-bundle-fp16-"]
    assert main([*arguments, "--shapes", "7b", "--apart"]) == 0
    assert main([*arguments, "--shapes", "1.1b", "--precision", "int4-fp16"]) == 0
    report = json.loads(output.with_name("report.json").read_text(encoding="utf-8"))
    assert list(report["sections"]) == ["7b fp16", "1.1b int4-fp16"]
    assert report["gpu"] == "a GPU"
    text = output.with_name("report.md").read_text(encoding="utf-8")
    assert text.startswith("NVIDIA GPU: a GPU\n")
    assert text.count("|  | engine | compiled |") == 2
    assert "decode, batch 64, context 96+ | 128 tok/s (128 to 128) | 51.2 tok/s, 2.50x" in text
    assert "then 16 to 256 new ones | " in text
    assert text.count("- fails: left out: its process ended") == 2
    assert "## A 7B Llama shape, fp16, cuda" in text
    capsys.readouterr()
    output.with_name("report.json").write_text("[]", encoding="utf-8")
    assert main([*arguments, "--shapes", "7b"]) == 1
    assert "report.json is not a report to append to" in capsys.readouterr().err


def test_what_cannot_be_measured_is_an_error(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(fakes))
    arguments = ["compare", "--work", str(fakes / "work"), "--provider", "cuda"]
    assert main(arguments) == 1
    assert "--provider cuda needs an NVIDIA GPU" in capsys.readouterr().err
    assert main([*arguments, "--precision", "int8"]) == 1
    assert "on CUDA, --precision must be fp16 or int4-fp16" in capsys.readouterr().err
    assert main([*arguments, "--shapes", "7b", "--only", "masked"]) == 1
    assert "none of the shapes is masked" in capsys.readouterr().err
    driver = fakes / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA X, 80 MiB, 1.2'\n", encoding="utf-8")
    driver.chmod(0o755)
    assert gpu() == "NVIDIA X, 80 MiB, 1.2"


def test_without_our_engine_there_is_no_comparison(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "loadtests.compare.entrants.ENTRANTS", (entrant(ENGINE, "unpreparable", makes="bundle"),)
    )
    arguments = ["--work", str(fakes / "work"), "--only", "causal", "--rounds", "2"]
    assert main(["compare", *arguments, "--output", str(fakes / "report")]) == 1
    assert "loadtests: engine: ValueError: no such model" in capsys.readouterr().err
    assert main(["compare", *arguments, "--peers", "nobody"]) == 1
    assert "unknown peer 'nobody'" in capsys.readouterr().err
