"""``loadtests engine --provider webgpu``: what passes do on the device and around it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maskdial.bundle.bundle import load_bundle

pytestmark = [pytest.mark.slow, pytest.mark.webgpu]


@pytest.mark.usefixtures("software")
def test_passes_are_counted(hybrid_bundle: Path, tmp_path: Path) -> None:
    """A float graph leaves nothing to the CPU, and only logits come down."""
    output = tmp_path / "report.json"
    arguments = ["--provider", "webgpu", "--bundle", str(hybrid_bundle), "--output", str(output)]
    subprocess.run([sys.executable, "-m", "loadtests", "engine", *arguments], check=True)
    rows = json.loads(output.read_text())["sections"]["device"]["rows"]
    assert [(row["kind"], row["rows"], row["tokens"]) for row in rows] == [
        ("prefill", 1, 16),
        ("decode", 1, 1),
        ("decode", 4, 1),
    ]
    row_bytes = 4 * load_bundle("mine", hybrid_bundle).manifest.vocab_size
    for row in rows:
        assert row["on_device"] > row["on_cpu"] == row["round_trips"] == 0
        assert 0 <= row["bytes_down"] - row["rows"] * row_bytes < 16  # as it is padded
        # Token ids and rows take 8 bytes each, lengths 4.
        assert row["bytes_up"] >= row["rows"] * (8 * row["tokens"] + 8 + 4)
        assert row["submissions"] > 3  # one for each input, and one at least for the pass
