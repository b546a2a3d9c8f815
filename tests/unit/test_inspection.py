"""What ``maskdial inspect`` says of bundles of every family."""

from pathlib import Path
from typing import Any

import pytest

import maskdial
from maskdial.bundle.bundle import Bundle, load_bundles
from maskdial.bundle.manifest import InfillTokens
from maskdial.inspection import describe
from maskdial.kernels.installed import Kernels

STARTERS = Path(maskdial.__file__).parent / "starter"


@pytest.mark.parametrize(
    ("folder", "changes", "words"),
    [
        ("sentiment", {}, "reads a text in both directions"),
        ("sentiment", {"reads_left": True}, "reads a text from left to right"),
        ("hybrid", {}, "reads from left to right and writes"),
        ("hybrid", {"family": "encoder-decoder"}, "reads a text and writes another"),
    ],
)
def test_what_a_bundle_is(folder: str, changes: dict[str, Any], words: str) -> None:
    manifest = load_bundles(folder, STARTERS / folder)[0].manifest.model_copy(update=changes)
    lines = describe(Bundle("x", STARTERS / folder, manifest), {})
    assert lines["model"] == f"{manifest.architecture}, {words} (model.onnx)"
    assert all(lines.values())


def test_layers_that_int4_has_in_8_bits() -> None:
    manifest = load_bundles("hybrid", STARTERS / "hybrid")[0].manifest
    assert manifest.quality is not None
    quality = manifest.quality.model_copy(update={"raised": ("a", "b"), "kept": ("c",)})
    changed = manifest.model_copy(update={"quality": quality})
    text = describe(Bundle("x", STARTERS / "hybrid", changed), {})["quality"]
    assert text.endswith("; layers not quantized: 1; layers in int8: 2")


def test_how_a_causal_model_infills() -> None:
    manifest = load_bundles("hybrid", STARTERS / "hybrid")[0].manifest
    assert "infills" not in describe(Bundle("x", STARTERS / "hybrid", manifest), {})
    for tokens, line in (
        (InfillTokens(prefix="<P>", suffix="<S>", middle="<M>"), "<P> text <S> text <M>"),
        (InfillTokens(prefix="<P>", suffix="<S>", suffix_first=True), "<S> text <P> text"),
    ):
        changed = manifest.model_copy(update={"infill": tokens})
        lines = describe(Bundle("x", STARTERS / "hybrid", changed), {})
        assert lines["infills"] == line
        assert "infill" in lines["can do"]


def test_bits_of_a_parameter() -> None:
    folder = STARTERS / "hybrid"
    manifest = load_bundles("hybrid", folder)[0].manifest
    older = manifest.model_copy(update={"num_parameters": None})
    assert "bits" not in describe(Bundle("x", folder, older), {})["size"]
    size = sum((folder / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    names = {"model.onnx", "model.onnx.data", "tokenizer.json"}
    files = {name: digest for name, digest in manifest.files.items() if name in names}
    changed = manifest.model_copy(update={"num_parameters": 2 * size, "files": files})
    text = describe(Bundle("x", folder, changed), {})["size"]
    assert text.endswith(f"; {2 * size / 1e6:,.1f} million parameters in 4.00 bits each")


@pytest.mark.parametrize("built", [True, False])
def test_the_cache_is_named_that_serves(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = STARTERS / "hybrid"
    manifest = load_bundles("hybrid", folder)[0].manifest
    assert manifest.kv is not None
    floats = f"{manifest.kv.bytes_per_token / 1024:.1f} KiB a token in float32"
    integers = manifest.kv.stored_as("int16").bytes_per_token
    found = Kernels(Path("kernels.so"), "avx2") if built else None
    monkeypatch.setattr("maskdial.inspection.find_kernels", lambda _setting: found)
    line = describe(Bundle("x", folder, manifest), {})["cache"]
    expected = f"{integers / 1024:.1f} KiB a token in int16 (without the kernels {floats})"
    assert line == (expected if built else floats)
