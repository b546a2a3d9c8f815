"""Encoders of the direct path: the traced bundle's bits, of every family and head."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules import LayerNorm, Normalize, Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from maskdial.bundle.manifest import GRAPH, Manifest, TaskName
from maskdial_export.checks.evaluation import Cosine, Evaluation
from maskdial_export.choices import TOLERANCE
from maskdial_export.direct import encoder_export
from maskdial_export.direct.backbones import read_backbone
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.encoder_graph import distance_buckets
from maskdial_export.direct.encoder_reference import EncoderReference
from maskdial_export.direct.encoders import read_encoder
from maskdial_export.direct.export import export_direct
from maskdial_export.direct.weights import Weights
from maskdial_export.errors import ExportError, QualityError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from maskdial_export.route import export_any_way
from maskdial_export.session import Loaded, MaskedSession, kernels_here
from tests.export.conftest import VOCABULARY, add_json, make_tokenizer
from tests.export.test_direct import Exchanged, run_blocked
from tests.export.test_sentence_transformers import save_encoder
from tests.export.zoo import DEBERTA_V2, DISTILLED, GROUPED, LOCAL_GLOBAL, MODERN, ROBERTA, SHAPE

Floats = NDArray[np.float32]

QUIET = Console(quiet=True)
SMALL = SHAPE | {"num_hidden_layers": 1}
NARROW = SMALL | {"embedding_size": 16}
LABELS = {"id2label": {0: "negative", 1: "neutral", 2: "positive"}}
# name -> class, configuration
ENCODERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertForMaskedLM", SHAPE),
    "bert-relu": ("BertForMaskedLM", SMALL | {"hidden_act": "relu", "type_vocab_size": 1}),
    "bert-embed": ("BertModel", SMALL),
    "bert-classify": ("BertForSequenceClassification", SMALL | LABELS),
    "bert-many": ("BertForSequenceClassification", SMALL | {"num_labels": 20}),
    "bert-rank": ("BertForSequenceClassification", SMALL | {"num_labels": 1}),
    "bert-tag": ("BertForTokenClassification", SMALL | LABELS),
    "bert-answer": ("BertForQuestionAnswering", SMALL),
    "roberta": ("RobertaForMaskedLM", ROBERTA),
    "roberta-embed": ("RobertaModel", ROBERTA),
    "roberta-classify": ("RobertaForSequenceClassification", ROBERTA | LABELS),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ROBERTA),
    "xlm-roberta-tag": ("XLMRobertaForTokenClassification", ROBERTA),
    "camembert-answer": ("CamembertForQuestionAnswering", ROBERTA),
    "distilbert": ("DistilBertForMaskedLM", DISTILLED),
    "distilbert-classify": ("DistilBertForSequenceClassification", DISTILLED),
    "distilbert-tag": ("DistilBertForTokenClassification", DISTILLED),
    "electra": ("ElectraForMaskedLM", NARROW),
    "electra-classify": ("ElectraForSequenceClassification", SMALL),
    "albert": ("AlbertForMaskedLM", SHAPE | {"embedding_size": 16, "num_hidden_groups": 2}),
    "albert-classify": ("AlbertForSequenceClassification", SHAPE | {"embedding_size": 16}),
    "mpnet": ("MPNetForMaskedLM", ROBERTA),
    "mpnet-embed": ("MPNetModel", ROBERTA),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "modernbert-bias": (
        "ModernBertModel",
        MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "modernbert-classify": (
        "ModernBertForSequenceClassification",
        MODERN | {"classifier_pooling": "mean"},
    ),
    "modernbert-tag": ("ModernBertForTokenClassification", MODERN),
    "nomic": ("NomicBertForMaskedLM", SHAPE | {"num_attention_heads": 2}),
    "nomic-embed": ("NomicBertModel", SHAPE | {"num_attention_heads": 2}),
    "nomic-classify": (
        "NomicBertForSequenceClassification",
        SMALL | LABELS | {"num_attention_heads": 2},
    ),
    "gte": ("GteForMaskedLM", SHAPE | {"num_attention_heads": 2}),
    "gte-embed": ("GteModel", SHAPE | {"num_attention_heads": 2}),
    "gte-tag": ("GteForTokenClassification", SMALL | {"num_attention_heads": 2}),
    "eurobert": ("EuroBertForMaskedLM", GROUPED),
    "eurobert-tied": (
        "EuroBertForMaskedLM",
        GROUPED | {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True},
    ),
    "eurobert-embed": ("EuroBertModel", GROUPED),
    "eurobert-classify": ("EuroBertForSequenceClassification", GROUPED | LABELS),
    "eurobert-first": (
        "EuroBertForSequenceClassification",
        GROUPED | {"classifier_pooling": "bos"},
    ),
    "eurobert-mean": (
        "EuroBertForSequenceClassification",
        GROUPED | {"classifier_pooling": "mean"},
    ),
    "eurobert-tag": ("EuroBertForTokenClassification", GROUPED | LABELS),
    "deberta": ("DebertaV2ForMaskedLM", DEBERTA_V2),
    "deberta-embed": ("DebertaV2Model", DEBERTA_V2 | {"pos_att_type": "c2p|p2c"}),
    "deberta-classify": ("DebertaV2ForSequenceClassification", DEBERTA_V2 | LABELS),
    "deberta-tag": ("DebertaV2ForTokenClassification", DEBERTA_V2 | LABELS),
    "deberta-answer": ("DebertaV2ForQuestionAnswering", DEBERTA_V2),
    # Decoders
    "qwen3-embed": ("Qwen3Model", GROUPED),
    "qwen2-both": ("Qwen2Model", GROUPED | {"is_causal": False}),
    "mistral-embed": ("MistralModel", GROUPED | {"sliding_window": 6}),
    "gemma3-both": (
        "Gemma3TextModel",
        GROUPED | LOCAL_GLOBAL | {"use_bidirectional_attention": True},
    ),
    "gemma2-classify": (
        "Gemma2ForSequenceClassification",
        GROUPED | LOCAL_GLOBAL | LABELS | {"pad_token_id": 5},
    ),
    "qwen3-rank": ("Qwen3ForSequenceClassification", GROUPED | {"num_labels": 1}),
    "llama-tag": ("LlamaForTokenClassification", GROUPED | LABELS),
}
INT8 = (
    *("bert", "bert-embed", "bert-many", "albert", "modernbert", "distilbert-classify"),
    *("nomic-embed", "gte", "deberta", "deberta-classify", "eurobert", "eurobert-classify"),
    *("mpnet-embed", "qwen3-embed", "gemma3-both", "mistral-embed", "gemma2-classify"),
)


def make(name: str, folder: Path) -> Path:
    """A checkpoint with random weights, biases and norms among them."""
    architecture, settings = ENCODERS[name]
    torch.manual_seed(0)
    made = getattr(transformers, architecture)
    model = made(made.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    if architecture.startswith(("Albert", "XLMRoberta", "Camembert")):
        tokenizer = make_unigram()
    tokenizer.save(str(folder / "tokenizer.json"))
    if architecture.startswith(("Albert", "Bert", "Electra")):
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        add_json(folder / "tokenizer_config.json", model_input_names=inputs)
    return folder


def make_unigram() -> Tokenizer:
    """The vocabulary of `make_tokenizer`, as XLM-RoBERTa's is."""
    special = {"[UNK]": "<unk>", "[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>"}
    words = [special.get(each, each.replace("##", "▁")) for each in VOCABULARY]
    words = ["<mask>" if each == "[MASK]" else each for each in words]
    tokenizer = Tokenizer(models.Unigram([(each, -2.0) for each in words], unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", words.index("<s>")), ("</s>", words.index("</s>"))],
    )
    tokenizer.add_special_tokens([*special.values(), "<mask>"])
    return tokenizer


ANY_LOSS = Gate(max_loss=math.inf)  # random weights may lose anything


def direct(source: Path, dest: Path, precision: str | None = "fp32", **options: Any) -> Manifest:
    return export_direct(
        str(source), dest, precision=precision, tolerance=TOLERANCE, console=QUIET, **options
    )


def outputs(bundle: Path, manifest: Manifest, kernels: Any) -> list[Floats]:
    """Of a ragged batch whose longest text exceeds windows, and of texts with padding within."""
    session = MaskedSession(Loaded(bundle / GRAPH, kernels=kernels))
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, manifest.vocab_size, size) for size in (40, 7, 1, 23)]
    types = [generator.integers(0, 2, len(text)) for text in texts]
    return session.run(texts, types) + session.run(texts[1:2], types[1:2])


def assert_alike(one: Path, other: Path) -> None:
    """Two bundles say the same of their model, and compute the same bits."""
    first, second = (
        Manifest.model_validate_json((each / "maskdial.json").read_text()) for each in (one, other)
    )
    measured = {"parity", "quality", "golden", "tool_versions", "files"}
    assert first.model_dump(exclude=measured) == second.model_dump(exclude=measured)
    assert first.files.keys() == second.files.keys()
    assert first.golden.input_ids == second.golden.input_ids
    assert first.golden.row == second.golden.row
    assert (first.quality is None) == (second.quality is None)
    if first.quality is not None and second.quality is not None:
        apart = {"max_loss", "weights_only", "raised"}  # the tracer alone has the latter two
        assert first.quality.model_dump(exclude=apart) == second.quality.model_dump(exclude=apart)
    for name in first.files:
        if name.endswith(".json"):
            assert json.loads((one / name).read_text()) == json.loads((other / name).read_text())
    for kernels in dict.fromkeys([None, kernels_here()]):
        pairs = zip(*(outputs(each, first, kernels) for each in (one, other)), strict=True)
        for left, right in pairs:
            np.testing.assert_array_equal(left, right)


def traced(source: Path, dest: Path, precision: str, **options: Any) -> Manifest:
    gate = Gate() if precision == "fp32" else Gate(max_loss=math.inf, keep_worst=0)
    return export(str(source), dest, precision=precision, gate=gate, **options)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_the_bits_of_a_trace(name: str, tmp_path: Path) -> None:
    source = make(name, tmp_path / "checkpoint")
    written = direct(source, tmp_path / "direct")
    assert written.parity.reference == "numpy"
    traced(source, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def test_encoders_give_what_transformers_computes(tmp_path: Path) -> None:
    """Positions in three ways, matrices that files have joined, and attention both ways."""
    ids = np.arange(40) * 7 % 90 + 5
    for name in ("deberta-tag", "gte-tag", "modernbert-tag", "gemma3-both"):
        source = make(name, tmp_path / name)
        direct(source, tmp_path / f"{name}-bundle")
        session = MaskedSession(Loaded(tmp_path / f"{name}-bundle" / GRAPH))
        found = session.run([ids], [np.zeros_like(ids)])[0]
        model = getattr(transformers, ENCODERS[name][0]).from_pretrained(source)
        with torch.no_grad():
            output = model(torch.from_numpy(ids)[None])[0][0].numpy()
        expected = output.mean(axis=0) if found.ndim == 1 else output
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_settings_of_debertas_tokenizer(tmp_path: Path) -> None:
    """Those that a file has anyway, as DeBERTa v3's, and others."""
    source = make("deberta-tag", tmp_path / "checkpoint")
    make_unigram().save(str(source / "tokenizer.json"))
    said = {"do_lower_case": False, "split_by_punct": False, "vocab_type": "spm"}
    add_json(source / "tokenizer_config.json", tokenizer_class="DebertaV2Tokenizer", **said)
    assert direct(source, tmp_path / "bundle").task == "token-classify"
    for key in ("do_lower_case", "split_by_punct"):
        add_json(source / "tokenizer_config.json", **said | {key: True})
        with pytest.raises(NotDirectError, match=f"{key} True in"):
            direct(source, tmp_path / "other")


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("name", INT8)
def test_both_forms_of_int8_give_the_bits_of_a_trace(
    name: str, by_row: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Evaluation, Cosine):
        monkeypatch.setattr(kind, "negligible", math.inf if by_row else -1.0)
    source = make(name, tmp_path / "checkpoint")
    written = direct(source, tmp_path / "direct", "int8", gate=ANY_LOSS)
    assert written.quality is not None
    assert written.quality.by_row == by_row
    traced(source, tmp_path / "traced", "int8")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


POOLINGS: dict[str, Callable[[], list[Any]]] = {
    "several": lambda: [Pooling(32, pooling_mode=["max", "cls", "mean"]), Normalize()],
    "last": lambda: [Pooling(32, pooling_mode="lasttoken"), Normalize()],
    "weighted": lambda: [Pooling(32, pooling_mode=["weightedmean", "mean_sqrt_len_tokens"])],
    "dense": lambda: [
        Pooling(32, pooling_mode="mean"),
        Dense(32, 24, activation_function=torch.nn.Tanh()),
        LayerNorm(24),
        Dense(24, 8, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ],
}


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    folder = make("bert", tmp_path / "backbone")
    names = ("pad", "unk", "cls", "sep", "mask")
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in names}
    add_json(folder / "tokenizer_config.json", **tokens, tokenizer_class="PreTrainedTokenizerFast")
    return folder


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", POOLINGS)
def test_modules_of_sentence_transformers(
    name: str,
    precision: str,
    backbone: Path,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"truncate_dim": 40} if name == "several" else {}
    source = save_encoder(tmp_path / "saved", backbone, POOLINGS[name](), **settings)
    add_json(source / "sentence_bert_config.json", max_seq_length=50, do_lower_case=True)
    gate = Gate() if precision == "fp32" else ANY_LOSS
    written = direct(source, tmp_path / "direct", precision, gate=gate)
    assert written.max_length == 50
    assert written.embedding is not None
    assert written.embedding.prompts["query"] == "query: "
    traced(source, tmp_path / "traced", precision)
    assert_alike(tmp_path / "direct", tmp_path / "traced")


@pytest.mark.parametrize(
    ("name", "modules", "writer"),
    [
        ("qwen3-embed", "last", "Qwen3ForCausalLM"),
        ("gemma3-both", "dense", "Gemma3ForCausalLM"),
    ],
)
def test_decoders_with_modules(name: str, modules: str, writer: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding, which names the class that it was trained from, and EmbeddingGemma."""
    backbone = make(name, tmp_path / "backbone")
    tokens = {"pad_token": "[PAD]", "eos_token": "[SEP]"}
    add_json(backbone / "tokenizer_config.json", **tokens, tokenizer_class="TokenizersBackend")
    source = save_encoder(tmp_path / "saved", backbone, POOLINGS[modules]())
    add_json(source / "config.json", architectures=[writer])
    with pytest.raises(NotDirectError, match="exports it for embed, and --task asks for generate"):
        direct(source, tmp_path / "direct", task="generate")
    written = direct(source, tmp_path / "direct")
    assert (written.architecture, written.task) == (ENCODERS[name][0], "embed")
    traced(source, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("mistral-embed", {"is_causal": False}),
        ("qwen2-both", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("gemma2-classify", {"pad_token_id": None}),
        ("qwen3-embed", {"encoder_layers": 2}),
    ],
)
def test_decoders_that_are_left_to_the_tracer(name: str, entry: dict[str, Any]) -> None:
    architecture, settings = ENCODERS[name]
    made = getattr(transformers, architecture).config_class(**settings)
    config = json.loads(made.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    task: TaskName = "classify" if LABELS.items() <= settings.items() else "embed"
    read_backbone(config, limit=None, task=task)
    with pytest.raises(NotDirectError, match=r"not known|turn with the position"):
        read_backbone(config | entry, limit=None, task=task)


def test_a_decoder_that_reads_ahead_does_not_write(tmp_path: Path) -> None:
    source = make("gemma3-both", tmp_path / "checkpoint")
    add_json(source / "config.json", architectures=["Gemma3ForCausalLM"])
    with pytest.raises(NotDirectError, match="use_bidirectional_attention True in"):
        direct(source, tmp_path / "bundle")


def test_other_kinds_of_vectors_are_left_to_the_tracer(backbone: Path, tmp_path: Path) -> None:
    source = save_encoder(tmp_path / "saved", backbone, POOLINGS["last"]())
    listed, told = source / "modules.json", source / "config_sentence_transformers.json"
    modules, settings = listed.read_text(), told.read_text()

    def refused(message: str) -> None:
        with pytest.raises(NotDirectError, match=message):
            direct(source, tmp_path / "bundle")
        listed.write_text(modules)
        told.write_text(settings)

    for kind in ("SparseEncoder", "MultiVectorEncoder", "ColBERT"):
        add_json(told, model_type=kind)
        refused(f"model_type '{kind}' in")
    added = {"idx": 3, "name": "3", "path": "", "type": "sentence_transformers.models.WordWeights"}
    listed.write_text(json.dumps([*json.loads(modules), added]))
    refused("the module WordWeights in")
    listed.write_text(json.dumps([*json.loads(modules), added | {"type": "own.Pooling"}]))
    refused("the module own.Pooling in")
    (source / "sparse_linear.pt").write_bytes(b"")
    refused("sparse_linear.pt of")
    (source / "sparse_linear.pt").unlink()
    masked = make("bert", tmp_path / "masked")
    (masked / "modules.json").write_text(modules.replace("Pooling", "SpladePooling"))
    with pytest.raises(NotDirectError, match="the module SpladePooling behind a head"):
        direct(masked, tmp_path / "bundle")


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_class_with_a_head_embeds_if_it_is_pooled(
    prefixed: bool, backbone: Path, tmp_path: Path
) -> None:
    """all-mpnet-base-v2 names the class that it was trained from, for weights without a head."""
    source = save_encoder(tmp_path / "saved", backbone, POOLINGS["last"]())
    add_json(source / "config.json", architectures=["BertForMaskedLM"])
    if prefixed:
        (source / "model.safetensors").write_bytes((backbone / "model.safetensors").read_bytes())
    written = direct(source, tmp_path / "direct")
    assert (written.architecture, written.task) == ("BertModel", "embed")
    traced(source, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


@pytest.mark.parametrize("count", [32, 16])
def test_distances_are_in_the_buckets_of_transformers(count: int) -> None:
    places = torch.arange(512)
    theirs = MPNetEncoder.relative_position_bucket(places[None] - places[:, None], count)
    ours = distance_buckets(512, count)[(places[None] - places[:, None]).numpy() + 511]
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_it_needs_no_torch(tmp_path: Path) -> None:
    source = make("bert-embed", tmp_path / "checkpoint")
    done = run_blocked("export", source, tmp_path / "bundle", "--precision", "int8")
    assert done.returncode == 0, done.stderr
    assert "written directly from the file, without torch" in done.stderr
    manifest = json.loads((tmp_path / "bundle" / "maskdial.json").read_text())
    assert manifest["quality"]["loss"] < 0.01
    (weights,) = source.glob("*.safetensors")
    weights.rename(source / "pytorch_model.bin")
    done = run_blocked("export", source, tmp_path / "other")
    assert done.returncode == 1
    assert "has no weights in safetensors, but pytorch_model.bin, a pickle" in done.stderr
    assert not (tmp_path / "other").exists()


def test_checkpoints_of_pretraining(tmp_path: Path) -> None:
    """The first ones have old names of norms, buffers, the other head, and the tied matrix."""
    source = make("bert", tmp_path / "checkpoint")
    plain = direct(source, tmp_path / "plain")
    file = source / "model.safetensors"
    weights = load_file(file)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in weights.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(128)[None]
    old["bert.pooler.dense.weight"] = torch.zeros(32, 32)
    old["cls.seq_relationship.weight"] = torch.zeros(2, 32)
    table = weights["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.weight"] = table.clone()
    old["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    save_file(old, file, {"format": "pt"})
    assert direct(source, tmp_path / "old").files == plain.files
    old["cls.predictions.decoder.bias"][3] = 1
    save_file(old, file, {"format": "pt"})
    with pytest.raises(NotDirectError, match=r"not known .* such as cls.predictions.decoder.bias"):
        direct(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("bert", {"hidden_act": "gelu_fast"}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"num_attention_heads": 5}),
        ("bert", {"pruned_heads": {"0": [1]}}),
        ("bert", {"architectures": ["BertForNextSentencePrediction"]}),
        ("bert", {"tie_word_embeddings": False}),
        ("bert", {"num_experts": 8}),
        ("roberta", {"pad_token_id": "none"}),
        ("roberta", {"max_position_embeddings": 2}),
        ("albert", {"inner_group_num": 2}),
        ("mpnet", {"pad_token_id": 0}),
        ("mpnet", {"relative_attention_num_buckets": 6}),
        ("albert", {"num_hidden_groups": 3}),
        ("modernbert", {"local_attention": 0}),
        ("modernbert", {"layer_types": ["full_attention"]}),
        ("modernbert", {"classifier_activation": "relu"}),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
        ("modernbert", {"decoder_bias": False}),
    ],
)
def test_what_is_not_known_is_an_error(name: str, entry: dict[str, Any]) -> None:
    architecture, settings = ENCODERS[name]
    made = getattr(transformers, architecture).config_class(**settings)
    config = json.loads(made.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    read_encoder(config, sends_types=None, limit=None)
    with pytest.raises(NotDirectError, match=r"not known|cannot go on"):
        read_encoder(config | entry, sends_types=None, limit=None)


LAYER = "bert.encoder.layer"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (f"{LAYER}.0.attention.self.query.weight", f"{LAYER}.0.attention.self.key.weight"),
        (f"{LAYER}.0.attention.self.value.bias", f"{LAYER}.0.attention.self.key.bias"),
        (f"{LAYER}.0.output.LayerNorm.weight", f"{LAYER}.1.output.LayerNorm.weight"),
        (f"{LAYER}.0.output.dense.bias", f"{LAYER}.0.output.LayerNorm.bias"),
        ("bert.embeddings.LayerNorm.bias", "cls.predictions.transform.LayerNorm.bias"),
    ],
)
def test_a_wrong_weight_does_not_pass(
    left: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchanged(files: Any, weights: Weights) -> EncoderReference:
        return EncoderReference(files, Exchanged(weights, left, right))

    source = make("bert", tmp_path / "checkpoint")
    monkeypatch.setattr(encoder_export, "EncoderReference", exchanged)
    with pytest.raises(ExportError, match="the graph and the reference disagree on a ragged batch"):
        direct(source, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


class _Edited:
    """A checkpoint whose config.json says something else."""

    def __init__(self, files: Any, entry: Mapping[str, Any]) -> None:
        self.path = files.path
        self._files = files
        self._entry = entry

    def read_json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._files.read_json(name)
        return {**found, **self._entry} if name == "config.json" else found


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("bert", {"layer_norm_eps": 1e-2}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("roberta", {"pad_token_id": 2}),
        ("albert", {"num_hidden_groups": 1}),
        ("modernbert", {"local_attention": 6}),
        ("modernbert", {"layer_types": ["full_attention"] * 3}),
        ("modernbert-classify", {"classifier_pooling": "cls"}),
        ("deberta", {"position_buckets": 4}),
        ("deberta", {"max_relative_positions": 9}),
        ("nomic", {"rope_parameters": {"rope_theta": 10.0}}),
        ("gte", {"hidden_act": "silu"}),
        ("eurobert-classify", {"classifier_pooling": "bos"}),
        ("eurobert", {"rms_norm_eps": 0.1}),
        ("gemma3-both", {"sliding_window": 12}),
        ("gemma3-both", {"use_bidirectional_attention": False}),
        ("qwen2-both", {"is_causal": True}),
        ("qwen3-rank", {"is_causal": False}),
    ],
)
def test_a_wrong_setting_does_not_pass(
    name: str, entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(files: Any, weights: Weights) -> EncoderReference:
        return EncoderReference(_Edited(files, entry), weights)

    source = make(name, tmp_path / "checkpoint")
    monkeypatch.setattr(encoder_export, "EncoderReference", other)
    with pytest.raises(ExportError, match="the graph and the reference disagree"):
        direct(source, tmp_path / "bundle")


def test_int8_that_loses_much_is_refused_by_the_gate(tmp_path: Path) -> None:
    source = make("bert-embed", tmp_path / "checkpoint")
    gate = Gate(max_loss=0.0)
    with pytest.raises(QualityError, match=r"and the maximum is 0\.00%") as refused:
        direct(source, tmp_path / "bundle", "int8", gate=gate)
    assert refused.value.measured.endswith("more than 0.00%")
    assert not (tmp_path / "bundle").exists()
    assert export_any_way(str(source), tmp_path / "default").precision == "int8"


def test_an_encoder_without_room_is_refused_before_the_work(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskdial_export.direct.room.available_bytes", lambda: 600 * 10**6)
    for precision in ("fp32", "int8"):
        with pytest.raises(ExportError, match=r"needs 0\.7 GB of memory, and 0\.6 are free"):
            direct(backbone, tmp_path / "bundle", precision)
    monkeypatch.setattr("maskdial_export.direct.room.available_bytes", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(ExportError, match=r"the bundle takes 0\.0 GB, and 0\.0 are free"):
        direct(backbone, tmp_path / "bundle", None)
    assert not (tmp_path / "bundle").exists()


def test_what_the_direct_path_does_not_do_for_encoders(tmp_path: Path) -> None:
    source = make("bert-embed", tmp_path / "checkpoint")
    for task in ("generate", "fill-mask"):
        with pytest.raises(
            NotDirectError, match=f"exports it for embed, and --task asks for {task}"
        ):
            direct(source, tmp_path / "bundle", task=task)
    with pytest.raises(NotDirectError, match="does not round encoders to int4"):
        direct(source, tmp_path / "bundle", "int4")


def test_damaged_checkpoints_end_in_a_sentence(backbone: Path, tmp_path: Path) -> None:
    source = save_encoder(tmp_path / "saved", backbone, POOLINGS["dense"]())
    random = np.random.default_rng(0)
    for file in (source / "model.safetensors", source / "2_Dense" / "model.safetensors"):
        whole = file.read_bytes()
        size = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(15):
            damaged = bytearray(whole)
            for place in random.integers(0, size, 3):
                damaged[place] = random.integers(256)
            file.write_bytes(damaged[: len(whole) - random.integers(2) * random.integers(size)])
            try:
                direct(source, tmp_path / "bundle")
            except ExportError:
                assert not (tmp_path / "bundle").exists()
            else:  # a letter of a name that nothing reads
                for each in sorted((tmp_path / "bundle").iterdir()):
                    each.unlink()
                (tmp_path / "bundle").rmdir()
        file.write_bytes(whole)
    settings = source / "2_Dense" / "config.json"
    text = settings.read_text()
    for entry, message in (
        ({"activation_function": "torch.nn.modules.activation.CELU"}, "activation .*CELU"),
        ({"use_residual": True}, "use_residual"),
    ):
        add_json(settings, **entry)
        with pytest.raises(NotDirectError, match=message):
            direct(source, tmp_path / "bundle")
        settings.write_text(text)
