"""The models of `loadtests.compare`: checkpoints, bundles, our runners and torch's."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import CompileConfig

from loadtests import LoadTestError
from loadtests.checkpoints import build_checkpoint, random_model
from loadtests.compare.peers import ours
from loadtests.compare.peers import torch as torch_peers
from loadtests.compare.setup import SHAPES, Setup
from loadtests.compare.work import Work
from maskdial.bundle.bundle import read_manifests
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate

pytestmark = pytest.mark.usefixtures("torch")

PASS = Work("pass", 3, 24, 1, least=5)
GENERATE = Work("generate", 3, 24, least=3, new_tokens=5, per_second=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Setup]:
    """A setup of a tiny shape at a precision, with its bundle; each is built once."""
    folder = tmp_path_factory.mktemp("work")

    def make(shape: str, precision: str) -> Setup:
        made = Setup(str(folder), shape, "", "bundle", precision, "new", 1, 0, "cpu", "large")
        if not made.bundle.exists():
            replace(made, exporter="old").bundle.mkdir(parents=True)
            ours.prepare(made)
        return made

    return make


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("shape", "precision"),
    [("tiny-llama", "int4-fp16"), ("tiny-bert", "fp16")],
)
def test_a_bundle_has_the_graph_that_the_export_makes(
    prepared: Callable[[str, str], Setup], shape: str, precision: str, tmp_path: Path
) -> None:
    made = prepared(shape, precision)
    gate = Gate(max_loss=math.inf, keep_worst=0)
    exported = export(str(made.checkpoint), tmp_path / "x", precision=precision, gate=gate)
    graphs = [onnx.load(folder / "model.onnx").graph for folder in (made.bundle, tmp_path / "x")]
    assert steps(graphs[0]) == steps(graphs[1])
    (manifest,) = read_manifests("x", made.bundle)
    about = manifest.model_dump(
        exclude={
            "parity",
            "golden",
            "quality",
            "source",
            "source_sha256",
            "batch_invariant",
            "files",
        }
    )
    assert about == exported.model_dump(include=set(about))
    assert manifest.files.keys() == exported.files.keys()
    assert manifest.quality is None
    assert manifest.source == f"{shape} with random weights, whose parity is {shape}-0's"
    # Bundles of other exporters are removed.
    assert made.bundles() == [made.bundle]


def steps(graph: onnx.GraphProto) -> list[tuple[object, ...]]:
    """A graph's operations and their inputs, with weights as hashes and without its own names."""
    known = {each.name: each.name for each in graph.input}
    for weight in graph.initializer:
        array = numpy_helper.to_array(weight)
        known[weight.name] = f"{array.dtype} {array.shape} {sha256(array.tobytes()).hexdigest()}"
    found: list[tuple[object, ...]] = []
    for node in graph.node:
        settings = sorted(each.SerializeToString() for each in node.attribute)
        found.append((node.op_type, node.domain, settings, [known.get(n, n) for n in node.input]))
        known |= {name: f"{len(found)}.{i}" for i, name in enumerate(node.output)}
    return [*found, tuple(known[each.name] for each in graph.output)]


@pytest.mark.zoo
@pytest.mark.parametrize("precision", ["fp16", "int4-fp16"])
def test_bundles_are_served(prepared: Callable[[str, str], Setup], precision: str) -> None:
    # Loading a bundle runs its golden check.
    engine = ours.open_runner(prepared("tiny-llama", precision))
    try:
        assert engine.run(GENERATE) > 0
        assert engine.run(Work("prefill", 1, 24)) > 0
        assert engine.run(Work("decode", 2, 24, 30)) > 0
    finally:
        engine.close()


def test_masked_bundles_are_served(prepared: Callable[[str, str], Setup]) -> None:
    masked = ours.open_runner(prepared("tiny-bert", "fp16"))
    try:
        assert masked.run(PASS) > 0
    finally:
        masked.close()


def test_on_cuda_a_checkpoint_has_no_weights(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path), "tiny-llama", "", "", "fp16", "exporter", 1, 0, "cuda", "large")
    path = build_checkpoint(setup.checkpoint, setup.model.config, weights=False)
    assert path.name == "tiny-llama-cuda-0"
    assert {each.name for each in path.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert ours.settings(setup) == {
        "provider": "cuda",
        "threads": 1,
        "slots": 64,
        "max_context": 1024,
    }


def test_random_weights_are_random() -> None:
    config = SHAPES["tiny-llama"].config
    model, again, half = (
        random_model(config, 3, dtype=dtype)
        for dtype in (torch.float32, torch.float32, torch.float16)
    )
    weights = dict(model.named_parameters())
    assert all(torch.equal(each, weights[name]) for name, each in again.named_parameters())
    assert all(torch.equal(each, weights[name].half()) for name, each in half.named_parameters())
    matrices = [each for each in weights.values() if each.dim() == 2]
    assert all(0.015 < each.std() < 0.025 for each in matrices)
    assert len({each.flatten()[0].item() for each in matrices}) == len(matrices)
    assert all((each == 1).all() for each in weights.values() if each.dim() == 1)
    tied = random_model(SHAPES["tiny-bert"].config, 3, dtype=torch.float32)
    table = tied.get_input_embeddings().weight
    assert table.data_ptr() == tied.get_output_embeddings().weight.data_ptr()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces as usual but runs the traced graph without a compiler."""
    monkeypatch.setattr(torch_peers, "CompileConfig", partial(CompileConfig, backend="eager"))


def setup(folder: Path, shape: str, variant: str = "") -> Setup:
    return Setup(str(folder), shape, variant, "", "fp32", "exporter", 1, 0, "cpu", "large")


def test_generate_compiles_each_batch_once(
    tmp_path: Path, without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    runner = torch_peers.open_runner(setup(tmp_path, "tiny-llama", "generate"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps = [Work("decode", batch, 12, 2, per_second=True) for batch in (1, 2)]
    for work in (*steps, GENERATE, *steps, GENERATE, Work("prefill", 1, 12)):
        assert runner.run(work) != 0
    assert torch._dynamo.utils.counters["frames"]["ok"] == 3
    assert not torch._dynamo.utils.counters["graph_break"]
    runner.close()


def test_generate_writes_what_the_forward_pass_writes(
    tmp_path: Path, without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    model = torch_peers.Device(setup(tmp_path, "tiny-llama")).model(setup(tmp_path, "tiny-llama"))
    where = torch_peers.Device(setup(tmp_path, "tiny-llama"))
    runner = torch_peers._Generate(model, where, setup(tmp_path, "tiny-llama"))
    ids, mask = runner._prompts(GENERATE)
    for _ in range(2):  # the second time with a used cache
        cache = runner._cache(GENERATE)
        written = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4)
        for row, (length, _) in enumerate(GENERATE.texts):
            alone = ids[row : row + 1, -length:]
            with torch.inference_mode():
                for _ in range(4):
                    best = model(alone).logits[:, -1:].argmax(-1)
                    alone = torch.cat((alone, best), dim=1)
            assert torch.equal(written[row, -4:], alone[0, -4:])


def test_a_text_that_ends_early_is_an_error(
    tmp_path: Path, without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    runner = torch_peers.open_runner(setup(tmp_path, "tiny-llama", "generate"))
    assert isinstance(runner, torch_peers._Generate)
    runner._model.generation_config.eos_token_id = list(range(SHAPES["tiny-llama"].num_words))
    with pytest.raises(LoadTestError, match="a text ended early"):
        runner.run(GENERATE)


def test_torch_runs_on_the_cpu(tmp_path: Path) -> None:
    masked = setup(tmp_path, "tiny-bert")
    for variant in ("model", "encoder"):
        runner = torch_peers.open_runner(replace(masked, variant=variant))
        assert runner.run(PASS) > 0
        runner.close()
    causal = torch_peers.open_runner(setup(tmp_path, "tiny-llama", "forward"))
    assert causal.run(Work("prefill", 2, 8)) > 0
    assert causal.run(Work("decode", 2, 8, 2)) > 0
    read = Work("read", 1, 1, 2)
    buffer = torch_peers.open_runner(replace(masked, variant="memory"))
    assert buffer.run(read) > 0
    assert isinstance(buffer, torch_peers._Buffer)
    assert buffer._half_copy(read) > 0


def test_without_a_device_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadTestError, match="this torch has no CUDA device"):
        torch_peers.Device(replace(setup(tmp_path, "tiny-llama"), provider="cuda"))
