"""A causal checkpoint under both masks: its logits, and its weights, which are stored once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tokenizers
import torch
import transformers

from maskdial.bundle.bundle import Bundle, load_bundles
from maskdial.bundle.manifest import FULL_GRAPH, GRAPH, QualityReport
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from maskdial_export.writing import Settings, Written

BOS, MASK, EOS = 0, 1, 2
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
GROUPED = SHAPE | {"num_key_value_heads": 1}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128}
        | {"bos_token_id": BOS, "eos_token_id": EOS},
    ),
    "opt": ("OPTForCausalLM", SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", SHAPE | {"hidden_size": 64, "rotary_pct": 0.5}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 16}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 2}),
    "windowed": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 16}),
}

New = Callable[[str], Path]
NewTokenizer = Callable[..., tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: NewTokenizer) -> New:
    root = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        folder = root / name
        if not folder.is_dir():
            architecture, settings = CAUSAL[name]
            tokenizer = byte_tokenizer()
            model_class = getattr(transformers, architecture)
            torch.manual_seed(0)
            vocab_size = tokenizer.get_vocab_size()
            model = model_class(model_class.config_class(vocab_size=vocab_size, **settings))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
            tokenizer.save(str(folder / "tokenizer.json"))
            # As it stands in the file; the classes of some models would change it.
            (folder / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            )
        return folder

    return get


def random_texts() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [
        np.concatenate([[BOS], generator.integers(3, 259, length - 1)]) for length in (21, 6, 33)
    ]


def run_full(
    graph: Path, texts: list[np.ndarray], rows: list[tuple[int, int]], pad_id: int = EOS
) -> np.ndarray:
    """Logits at (text, position), the texts in one padded batch."""
    longest = max(map(len, texts))
    ids = np.stack([np.pad(t, (0, longest - len(t)), constant_values=pad_id) for t in texts])
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": ids,
        "lengths": np.array([len(text) for text in texts], np.int32),
        "rows": np.array([text * longest + position for text, position in rows]),
    }
    (logits,) = session.run(["logits"], feeds)
    return np.asarray(logits)


def torch_full(folder: Path, text: np.ndarray, position: int) -> np.ndarray:
    """torch's logits for the token at a position, from the one before, under the full mask."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    everything = torch.zeros(1, 1, len(text), len(text))
    positions = torch.arange(len(text))[None]
    with torch.no_grad():
        output = model.eval()(
            torch.from_numpy(text[None]), attention_mask=everything, position_ids=positions
        )
    return np.asarray(output.logits[0, position - 1])


def assert_fills_as_torch(graph: Path, source: Path) -> None:
    texts, rows = random_texts(), [(0, 3), (0, 20), (1, 1), (2, 32)]
    logits = run_full(graph, texts, rows)
    expected = np.stack([torch_full(source, texts[text], place) for text, place in rows])
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(logits, run_full(graph, texts, rows, pad_id=77))
    for index, (text, place) in enumerate(rows):
        alone = run_full(graph, [texts[text]], [(0, place)])
        np.testing.assert_array_equal(alone[0], logits[index])


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        pytest.param("opt", marks=pytest.mark.zoo),
        pytest.param("gpt_neox", marks=pytest.mark.zoo),
        "qwen3",
    ],
)
def test_full_mask_equals_torch(name: str, checkpoint: New, tmp_path: Path) -> None:
    manifest = export(str(checkpoint(name)), tmp_path / "bundle", mask="full")
    assert (manifest.family, manifest.task) == ("masked", "fill-mask")
    assert manifest.batch_invariant
    assert_fills_as_torch(tmp_path / "bundle" / GRAPH, checkpoint(name))


def test_both_masks_of_a_llama(hybrid_bundle: Path, hybrid: Path) -> None:
    causal, full = load_bundles("dial", hybrid_bundle)
    assert (causal.manifest.family, full.manifest.family) == ("causal", "masked")
    assert (causal.label, full.label) == ("dial", "dial:full")
    assert causal.manifest.batch_invariant
    assert full.manifest.batch_invariant
    assert full.manifest.special_tokens.mask == MASK
    assert causal.manifest.parity.decode_steps is not None
    assert full.manifest.parity.decode_steps is None
    assert_fills_as_torch(full.graph, hybrid)
    golden = full.manifest.golden
    assert golden.input_ids[golden.row] == MASK
    expected = torch_full(hybrid, np.array(golden.input_ids), golden.row)
    np.testing.assert_allclose(golden.logits, expected[list(golden.columns)], atol=1e-5)


def weights(graph: Path) -> dict[tuple[int, int], str]:
    """The name of each initializer by its (offset, length) in the weight file."""
    model = onnx.load(graph, load_external_data=False)
    places = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert entries["location"] == "model.onnx.data"
            places[int(entries["offset"]), int(entries["length"])] = tensor.name
    return places


def assert_weights_are_stored_once(causal: Bundle, full: Bundle) -> None:
    ours, others = weights(causal.graph), weights(full.graph)
    apart = sum(length for _, length in ours.keys() ^ others.keys())
    total = sum(length for _, length in ours.keys() | others.keys())
    data = causal.path / "model.onnx.data"
    assert data.stat().st_size == total
    assert apart <= total / 20  # a graph's own constants
    shared = {"model.onnx.data", "tokenizer.json"}
    assert shared <= set(causal.manifest.files) & set(full.manifest.files)
    everything = {*causal.manifest.files, *full.manifest.files}
    assert {file.name for file in causal.path.iterdir()} == (
        everything | {"maskdial.json", "maskdial.full.json"}
    )
    assert GRAPH not in full.manifest.files
    assert FULL_GRAPH not in causal.manifest.files


def test_weights_are_stored_once(hybrid_bundle: Path) -> None:
    assert_weights_are_stored_once(*load_bundles("dial", hybrid_bundle))


def test_both_masks_in_int8_keep_the_same_layers(hybrid: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    gate = Gate(max_loss=float("inf"), keep=("*.k_proj", "*.down_proj"))
    export(str(hybrid), folder, mask="both", precision="int8", gate=gate)
    causal, full = load_bundles("dial", folder)
    assert_weights_are_stored_once(causal, full)
    qualities = [bundle.manifest.quality for bundle in (causal, full)]
    kept = [set() if quality is None else set(quality.kept) for quality in qualities]
    layer = "model.layers.0"
    assert kept[0] == kept[1] == {f"{layer}.self_attn.k_proj", f"{layer}.mlp.down_proj"}
    texts, rows = random_texts(), [(0, 3), (2, 32)]
    logits = run_full(full.graph, texts, rows)
    expected = [torch_full(hybrid, texts[text], place) for text, place in rows]
    assert np.corrcoef(logits.ravel(), np.ravel(expected))[0, 1] > 0.99


def refusal(source: Path, dest: Path, mask: Any) -> str:
    with pytest.raises(ExportError) as caught:
        export(str(source), dest, mask=mask)
    assert not dest.exists()
    return caught.value.message


def test_masks_that_a_model_cannot_have(
    checkpoint: New, byte_tokenizer: NewTokenizer, tmp_path: Path
) -> None:
    dest = tmp_path / "bundle"
    assert "window of 5 tokens" in refusal(checkpoint("windowed"), dest, "full")
    assert "does not take a mask" in refusal(checkpoint("bloom"), dest, "full")
    assert "caps its attention scores" in refusal(checkpoint("gemma2"), dest, "full")
    bert = tmp_path / "bert"
    settings = SHAPE | {"vocab_size": 259}
    transformers.BertForMaskedLM(transformers.BertConfig(**settings)).save_pretrained(bert)
    byte_tokenizer().save(str(bert / "tokenizer.json"))
    for mask in ("causal", "both"):
        assert "only supports its own mask" in refusal(bert, dest, mask)


@pytest.mark.parametrize(
    ("lacks", "words"),
    [("begins", "begin every text with a special token"), ("masks", "has no mask token")],
)
def test_tokenizers_that_cannot_mask(
    lacks: str, words: str, hybrid: Path, byte_tokenizer: NewTokenizer, tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    for file in hybrid.iterdir():
        (source / file.name).symlink_to(file)
    (source / "tokenizer.json").unlink()
    byte_tokenizer(**{lacks: False}).save(str(source / "tokenizer.json"))
    assert words in refusal(source, tmp_path / "bundle", "full")


def test_layers_that_the_second_graph_needs_are_kept_in_the_first(
    hybrid: Path, hybrid_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full graph keeps one more layer, so both graphs are exported again with it."""
    asked: list[tuple[str, tuple[str, ...]]] = []
    manifests = {each.manifest.family: each.manifest for each in load_bundles("", hybrid_bundle)}

    def write(source: Source, _folder: Path, settings: Settings, _packs: object = ()) -> Written:
        asked.append((source.family, settings.gate.keep))
        kept = (*settings.gate.keep, "more") if len(asked) == 2 else settings.gate.keep
        quality = QualityReport(
            text="any", text_sha256="", positions=1, figures={}, loss=0, max_loss=None, kept=kept
        )
        return Written(manifests[source.family].model_copy(update={"quality": quality}), ())

    monkeypatch.setattr("maskdial_export.export.write_bundle", write)
    monkeypatch.setattr("maskdial_export.export.join", lambda *_: None)
    gate = Gate(keep=("mine",))
    export(str(hybrid), tmp_path / "bundle", mask="both", precision="int8", gate=gate)
    first, again = ("mine",), ("mine", "more")
    assert asked == [("causal", first), ("masked", first), ("causal", again), ("masked", again)]
