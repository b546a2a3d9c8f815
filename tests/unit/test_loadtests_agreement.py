"""`loadtests.agreement`: the verdicts, and the command on a tiny checkpoint."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from loadtests.__main__ import main
from loadtests.agreement import Row, Text, Top, agree, compare, section_of

VOCAB = 120


class Scripted:
    """A reference with a given text and given log-probabilities."""

    def __init__(self, written: list[int], rounded: list[float], exact: list[float]) -> None:
        self.written = written
        self.rounded, self.exact = np.array(rounded), np.array(exact)
        self.asked: list[list[int]] = []

    def write(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return self.written[:num_tokens]

    def logprobs(self, text: Sequence[int]) -> NDArray[np.float64]:
        self.asked.append(list(text))
        return self.rounded

    def finer_logprobs(self, text: Sequence[int]) -> NDArray[np.float64]:
        return self.exact


def likely(*first: float) -> list[float]:
    """Log-probabilities of the first tokens, followed by very unlikely ones."""
    return [*first, *(-20.0 - i for i in range(VOCAB - len(first)))]


def one_row(reference: Scripted, best: Top = ()) -> Row:
    text = Text([7], [1, 2, 0])
    (row,) = compare([text], reference, lambda _text, _step: best, str)
    return row


def test_same_tokens() -> None:
    assert one_row(Scripted([1, 2, 0], [], [])) == Row(1, 3)


def test_texts_that_diverge_at_a_near_tie() -> None:
    reference = Scripted([1, 2, 1], likely(-1.0, -0.99), likely(-0.995, -1.0))
    row = one_row(reference, best=((0, -0.98), (1, -1.01)))
    assert reference.asked == [[7, 1, 2]]
    assert (row.same_tokens, row.engine, row.torch, row.verdict) == (2, "0", "1", "near tie")
    assert row.gap == pytest.approx(0.01)
    assert row.finer_gap == pytest.approx(-0.005)
    assert row.rounding == pytest.approx(0.01)
    assert row.engine_off == pytest.approx(0.015)


@pytest.mark.parametrize(("gap", "verdict"), [(0.019, "near tie"), (0.021, "other")])
def test_a_near_tie_is_within_twice_the_rounding(gap: float, verdict: str) -> None:
    row = one_row(Scripted([1, 2, 1], likely(-1.0, -1.0 + gap - 0.01), likely(-1.0, -1.0 + gap)))
    assert row.rounding == pytest.approx(0.01)
    assert row.verdict == verdict


def test_rounding_of_unlikely_tokens_makes_no_tie() -> None:
    exact = likely(-1.0, -0.9)
    rounded = exact[:-2] + [each + 5 for each in exact[-2:]]
    row = one_row(Scripted([1, 2, 1], rounded, exact))
    assert row.rounding == 0
    assert row.verdict == "other"


def test_the_engine_cannot_widen_a_tie() -> None:
    row = one_row(Scripted([1, 2, 1], likely(-2.0, -0.2), likely(-2.0, -0.2)), ((0, -0.1),))
    assert row.engine_off == pytest.approx(1.9)
    assert row.verdict == "other"


def test_report() -> None:
    rows = [Row(1, 64), Row(2, 3, verdict="near tie"), Row(3, 64)]
    assert agree(rows)
    findings = section_of(rows, 64).findings
    assert "2 of 3 texts have the same 64 tokens, 1 diverge at a near tie and 0 else" in findings[0]
    assert findings[1].startswith("131 tokens")
    assert not agree([*rows, Row(4, 3, verdict="other")])


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's tokens are bytes, and its context is 64 of them."""
    monkeypatch.setattr("loadtests.agreement.PROMPTS", ("Once upon", "a cat", "It is"))


def run(*arguments: object, precision: str) -> int:
    return main(["agreement", "--precision", precision, *map(str, arguments)])


@pytest.mark.usefixtures("short_prompts")
def test_a_checkpoint_agrees_with_itself(hybrid: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    options = ("--checkpoint", hybrid, "--num-tokens", 12, "--output", output)
    assert run(*options, precision="fp16") == 0
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    rows = report["sections"]["agreement"]["rows"]
    assert len(rows) == 3
    assert any(row["same_tokens"] > 0 for row in rows)
    assert {row["verdict"] for row in rows} <= {"same", "near tie"}
    assert report["precision"] == "fp16"


@pytest.mark.usefixtures("short_prompts")
def test_a_different_checkpoint_disagrees(
    hybrid: Path, hybrid_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(hybrid, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: each + 0.3 * torch.randn_like(each) for name, each in weights.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    options = ("--bundle", hybrid_bundle, "--num-tokens", 12)
    assert run("--checkpoint", hybrid, *options, precision="fp32") == 0
    assert run("--checkpoint", other, *options, precision="fp32") == 1
    assert "other" in capsys.readouterr().out


@pytest.mark.usefixtures("short_prompts")
def test_refusals(
    hybrid: Path, hybrid_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = ("--bundle", hybrid_bundle, "--num-tokens", 4)
    assert run("--checkpoint", hybrid, *bundle, precision="fp16") == 1
    assert "is fp32, but --precision is fp16" in capsys.readouterr().err
    assert run("--checkpoint", tmp_path, *bundle, precision="fp32") == 1
    assert "is not a causal checkpoint" in capsys.readouterr().err
    long = ("--bundle", hybrid_bundle, "--num-tokens", 60)
    assert run("--checkpoint", hybrid, *long, precision="fp32") == 1
    assert "exceed the context of 64" in capsys.readouterr().err
