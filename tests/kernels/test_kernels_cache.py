"""A KV cache of integers: the starter's answers over it, and who may have one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper
from tokenizers import Tokenizer

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import GRAPH, KERNEL_CHECK, CacheChoice, CacheInteger
from maskdial.causal.model import CausalModel
from maskdial.config import Config
from maskdial.errors import BundleError, ConfigError
from maskdial.kernels import installed as finding
from maskdial.kernels.installed import Kernels
from maskdial.kernels.rewrite import rewrite
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.golden import check_kernels
from maskdial.registry.loading import load_model, start_model
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

HYBRID = STARTER_FOLDER / "hybrid"
SAMPLE = Path(__file__).parents[2] / "export" / "maskdial_export" / "sample.txt"
LENGTH = 256


def starter_runner(kernels: Kernels, kv_cache: CacheChoice, threads: int = 1) -> Runner:
    bundle = load_bundle("starter", HYBRID)
    options = SessionOptions(intra_op_threads=threads, kernels=kernels, kv_cache=kv_cache)
    session, layout = Session(bundle.graph, options), bundle.manifest.kv
    assert layout is not None
    return Runner(
        session,
        layout.stored_as(session.kv_cache),
        slots=3,
        max_length=LENGTH,
        vocab_size=bundle.manifest.vocab_size,
    )


@pytest.fixture(scope="module")
def sample() -> NDArray[np.int64]:
    """The tokens of the export's sample text."""
    text = SAMPLE.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(load_bundle("starter", HYBRID).tokenizer))
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids)


each_integer = pytest.mark.parametrize("integer", ["int8", "int16"])


@pytest.mark.parametrize(("integer", "share"), [("int8", 0.32), ("int16", 0.54)])
def test_a_token_takes_a_part_of_the_memory(
    kernels: Kernels, integer: CacheInteger, share: float
) -> None:
    floats = starter_runner(kernels, "float").cache.bytes_per_token
    assert starter_runner(kernels, integer).cache.bytes_per_token < share * floats


@each_integer
def test_perplexity_rises_by_less_than_a_five_hundredth(
    kernels: Kernels, sample: NDArray[np.int64], integer: CacheInteger
) -> None:
    """That of texts drawn from the model itself: the divergence from its own probabilities.

    It needs far less text than the perplexity of one next token at each place, whose standard error
    is 0.13% for this sample, since activations of 8 bits round otherwise after any small change.
    """
    kinds: tuple[CacheChoice, ...] = ("float", integer)
    runners = [starter_runner(kernels, each) for each in kinds]
    divergences = []
    for start in range(0, min(len(sample), 8 * LENGTH) - LENGTH + 1, LENGTH):
        floats, integers = (
            log_softmax(np.asarray(runner.prefill(0, sample[start : start + LENGTH], 0, LENGTH)))
            for runner in runners
        )
        divergences.append((np.exp(floats) * (floats - integers)).sum(axis=1).mean())
    assert 0 < np.mean(divergences) < np.log(1.002)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The logarithms of the probabilities, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@each_integer
def test_pieces_copies_and_company_change_no_bit(
    kernels: Kernels, sample: NDArray[np.int64], integer: CacheInteger
) -> None:
    """A prompt in one piece, in two, step by step, moved, and read from blocks: the same logits."""
    tokens, last = sample[:150], sample[150:151]
    whole = starter_runner(kernels, integer)
    prompt = np.array(whole.prefill(0, tokens, 0))
    step = np.array(whole.decode(last, np.array([150]), np.array([0])))
    other = starter_runner(kernels, integer, threads=2)
    other.prefill(1, tokens[:64], 0)
    np.testing.assert_array_equal(other.prefill(1, tokens[64:], 64), prompt)
    other.cache.copy(1, 0, 100)
    other.cache.copy_tokens(1, 0, 100, 50)
    other.cache.write(2, 0, whole.cache.read(0, 0, 150))
    other.cache.copy(0, 1, 149)  # the last token of the prompt is read again, as a step
    steps = other.decode(
        np.array([last[0], tokens[149], last[0]]), np.array([150, 149, 150]), np.arange(3)
    )
    np.testing.assert_array_equal(steps, np.concatenate([step, prompt, step]))


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("auto", "int16"), ("float", "float32"), ("int16", "int16"), ("int8", "int8")],
)
def test_a_model_is_served_with_it(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, asked: CacheChoice, dtype: str
) -> None:
    monkeypatch.setattr(finding, "library_path", lambda: kernels.path)
    config = Config(kv_cache_dtype=asked, threads=1, max_context=LENGTH, slots=2)
    model = load_model("hybrid", HYBRID, config, Metrics())
    model.stop()
    assert isinstance(model, CausalModel)
    assert model.kv_cache_dtype == dtype


@each_integer
def test_without_kernels_it_is_an_error(integer: CacheInteger) -> None:
    with pytest.raises(ConfigError, match=f"only the kernels can read a KV cache of {integer}"):
        load_model("hybrid", HYBRID, Config(kv_cache_dtype=integer, kernels="off"), Metrics())


def test_without_kernels_it_is_one_of_floats() -> None:
    config = Config(kernels="off", threads=1, max_context=LENGTH, slots=2)
    model = load_model("hybrid", HYBRID, config, Metrics())
    model.stop()
    assert isinstance(model, CausalModel)
    assert model.kv_cache_dtype == "float32"


def test_a_masked_model_needs_none() -> None:
    path = STARTER_FOLDER / "sentiment"
    config = Config(kv_cache_dtype="int8", kernels="off", threads=1)
    load_model("sentiment", path, config, Metrics()).stop()


def test_products_that_stay_keep_a_cache_of_floats(tmp_path: Path) -> None:
    """Unless it was asked for: the other roundings of such a model do not hide this one."""
    model = onnx.load(HYBRID / GRAPH, load_external_data=False)
    zero_point = next(each for each in model.graph.initializer if each.name == "int8.zero_point")
    zero_point.raw_data = b"\x7f"
    onnx.save(model, tmp_path / GRAPH)
    assert rewrite(tmp_path / GRAPH, "auto").kv_cache is None
    assert rewrite(tmp_path / GRAPH, "int16").kv_cache == "int16"


def test_the_kernel_check_has_no_cache(
    kernels: Kernels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here, its graph multiplies nothing, which is found out."""
    node = helper.make_node("Cast", ["rows"], ["products"], to=onnx.TensorProto.FLOAT)
    rows = helper.make_tensor_value_info("rows", onnx.TensorProto.UINT8, ["n", 64])
    products = helper.make_tensor_value_info("products", onnx.TensorProto.FLOAT, ["n", 64])
    graph = helper.make_graph([node], "check", [rows], [products])
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(
        helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / KERNEL_CHECK
    )
    bundle = load_bundle("hybrid", HYBRID)
    manifest = bundle.manifest.model_copy(update={"files": {KERNEL_CHECK: ""}})
    checked = replace(bundle, path=tmp_path, manifest=manifest)
    check_kernels(checked, SessionOptions(kernels=kernels, kv_cache="int8"), "warn")
    assert "saturate" in caplog.text


def test_attention_without_a_kernel_is_an_error(tmp_path: Path) -> None:
    model = onnx.load(HYBRID / GRAPH, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    kept = [each for each in node.attribute if each.name != "softcap"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("softcap", 16.0)])
    onnx.save(model, tmp_path / GRAPH)
    rewritten = rewrite(tmp_path / GRAPH, "auto")
    assert rewritten.num_replaced
    assert rewritten.kv_cache is None
    for path in (tmp_path / GRAPH, STARTER_FOLDER / "sentiment" / GRAPH):  # the second has no cache
        with pytest.raises(ConfigError, match="be int8; serve it with --kv-cache-dtype auto"):
            rewrite(path, "int8")


def test_a_golden_check_far_off_is_refused_all_the_same(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "library_path", lambda: kernels.path)
    bundle = load_bundle("hybrid", HYBRID)
    golden = bundle.manifest.golden
    offset = 0.5 * float(np.std(golden.logits))
    moved = golden.model_copy(update={"logits": tuple(each + offset for each in golden.logits)})
    changed = replace(bundle, manifest=bundle.manifest.model_copy(update={"golden": moved}))
    with pytest.raises(BundleError, match="differ by"):
        start_model(changed, Config(kv_cache_dtype="int8", threads=1, slots=1), Metrics())
