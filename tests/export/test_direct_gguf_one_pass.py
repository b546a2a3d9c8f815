"""GGUF files of models that embed or rank, written directly: the traced bundle's bits."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest

from maskdial.bundle.manifest import GRAPH
from maskdial_export.errors import ExportError
from tests.export.gguf_files import (
    BYTE_LEVEL_SIZE,
    WORD_PIECES_SIZE,
    as_gemma,
    as_roberta,
    basics,
    byte_level,
    make_model,
    plain,
    word_pieces,
    write_gguf,
)
from tests.export.test_direct_encoders import ANY_LOSS, assert_alike, direct, traced
from tests.export.test_gguf_models import ENCODER, MODELS, gemma3, roberta

Writer = Any
MEAN, CLS, LAST = gguf.PoolingType.MEAN, gguf.PoolingType.CLS, gguf.PoolingType.LAST


def ends(writer: Writer) -> None:
    writer.add_add_eos_token(True)


def both_ways(writer: Writer) -> None:
    ends(writer)
    writer.add_causal_attention(False)


# name -> the model of MODELS, how it pools, further entries
EMBEDDERS: Mapping[str, tuple[str, gguf.PoolingType | None, Callable[[Writer], object]]] = {
    "bert": ("bert", MEAN, lambda _: None),
    "bert-states": ("bert", None, lambda _: None),
    "roberta": ("roberta", CLS, lambda writer: writer.add_pad_token_id(1)),
    "nomic": ("nomic-bert", MEAN, lambda _: None),
    "modernbert": ("modernbert", CLS, lambda _: None),
    "eurobert": ("eurobert", MEAN, both_ways),
    "qwen3": ("qwen3", LAST, ends),
    "llama-both": ("llama", MEAN, both_ways),
}
EUROBERT: dict[str, Any] = {
    "eurobert": (
        "eurobert",
        "EuroBertModel",
        ENCODER | {"vocab_size": BYTE_LEVEL_SIZE, "num_key_value_heads": 2, "head_dim": 16},
        basics,
        plain,
    )
}
# The types of files, and what their bundles are
TYPES = {"Q8_0": "int8", "Q4_0": "int4"}


def write_embedder(name: str, path: Path, kind: str | None = None) -> Path:
    """A tiny file; with ``kind``, all matrices of its layers and its table are of that type."""
    model_name, pooling, further = EMBEDDERS[name]
    architecture, model_class, settings, fill, rename = (MODELS | EUROBERT)[model_name]
    model = make_model(model_class, **settings)
    vocabulary = word_pieces if settings["vocab_size"] == WORD_PIECES_SIZE else byte_level

    def metadata(writer: Writer) -> None:
        vocabulary(writer)
        fill(writer, model.config)
        if pooling is not None:
            writer.add_pooling_type(pooling)
        further(writer)

    attention = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")
    matrices = (*attention, "ffn_up", "ffn_gate", "ffn_down", "token_embd")
    quantize = {} if kind is None else {f"{each}.weight": kind for each in matrices}
    return write_gguf(path, architecture, model, metadata, rename, quantize)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_floats(name: str, tmp_path: Path) -> None:
    path = write_embedder(name, tmp_path / "model.gguf")
    written = direct(path, tmp_path / "direct")
    assert (written.task, written.parity.reference) == ("embed", "numpy")
    traced(path, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3"])
def test_integers_of_a_file(name: str, kind: str, tmp_path: Path) -> None:
    path = write_embedder(name, tmp_path / "model.gguf", kind)
    written = direct(path, tmp_path / "direct", gate=ANY_LOSS, precision=None)
    assert written.precision == TYPES[kind]
    assert written.quality is not None
    assert not written.quality.by_row
    traced(path, tmp_path / "traced", TYPES[kind])
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def test_integers_of_nomic_bert(tmp_path: Path) -> None:
    """Its queries, keys and values are one matrix in files, of which a trace loses the integers."""
    path = write_embedder("nomic", tmp_path / "model.gguf", "Q8_0")
    direct(path, tmp_path / "bundle", gate=ANY_LOSS, precision=None)
    graph = onnx.load(tmp_path / "bundle" / GRAPH)
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.graph.initializer}
    file = gguf.GGUFReader(path)
    tensors = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in file.tensors
    }
    for layer in range(2):
        modules = [f"layers.{layer}.self_attn.{each}_proj" for each in "qkv"]
        parts = [tensors[f"blk.{layer}.attn_{each}.weight"] for each in "qkv"]
        groups = zip(modules, parts, strict=True)
        for name, expected in groups:
            integers = stored[f"{name}.int8"].astype(np.float32) - 128
            found = integers * stored[f"{name}.scale"][..., None]
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_embedding_gemma(tmp_path: Path) -> None:
    """Windows both ways, and two matrices after the pooling."""
    settings = MODELS["gemma3"][2] | {"use_bidirectional_attention": True, "sliding_window": 32}
    model = make_model("Gemma3TextModel", **settings)
    weights = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)

    def metadata(writer: Writer) -> None:
        byte_level(writer)
        gemma3(writer, model.config)
        ends(writer)
        writer.add_sliding_window(32)
        writer.add_pooling_type(MEAN)
        for name, each in zip(("dense_2", "dense_3"), weights, strict=True):
            writer.add_tensor(f"{name}.weight", each)

    path = write_gguf(tmp_path / "model.gguf", "gemma-embedding", model, metadata, as_gemma)
    direct(path, tmp_path / "direct")
    traced(path, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


@pytest.mark.parametrize("shape", [(64,), (2, 8, 64)])
def test_what_follows_the_pooling_is_a_matrix(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = make_model(MODELS["bert"][1], **MODELS["bert"][2])

    def metadata(writer: Writer) -> None:
        word_pieces(writer)
        MODELS["bert"][3](writer, model.config)
        writer.add_pooling_type(MEAN)
        writer.add_tensor("dense_2.weight", np.ones(shape, np.float32))

    path = write_gguf(tmp_path / "model.gguf", "bert", model, metadata, MODELS["bert"][4])
    with pytest.raises(ExportError, match=r"dense_2\.weight of .* it must be a matrix"):
        direct(path, tmp_path / "bundle")


def write_ranker(path: Path, num_labels: int, further: Callable[[Writer], object]) -> Path:
    """As bge-reranker-v2-m3: RoBERTa with its classifier."""
    settings = MODELS["roberta"][2] | {"num_labels": num_labels}
    model = make_model("RobertaForSequenceClassification", **settings)

    def metadata(writer: Writer) -> None:
        byte_level(writer)
        roberta(writer, model.config)
        writer.add_pad_token_id(1)
        further(writer)

    return write_gguf(path, "bert", model, metadata, as_ranker)


def as_ranker(name: str, values: Any, config: Any) -> Iterator[tuple[str, Any]]:
    return as_roberta(name.removeprefix("roberta."), values, config)


@pytest.mark.parametrize("labels", [(), ("no", "perhaps", "yes")])
def test_rerankers_and_classifiers(labels: tuple[str, ...], tmp_path: Path) -> None:
    def rank(writer: Writer) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        if labels:
            writer.add_classifier_output_labels(labels)

    path = write_ranker(tmp_path / "model.gguf", len(labels) or 1, rank)
    written = direct(path, tmp_path / "direct")
    assert (written.task, written.labels) == ("classify", labels or ("LABEL_0",))
    traced(path, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


@pytest.mark.parametrize(
    ("further", "why"),
    [
        (lambda writer: writer.add_pooling_type(MEAN), "has a classifier, and pools in the way 1"),
        (
            lambda writer: writer.add_classifier_output_labels(["a", "b", "c"]),
            "names 3 labels, and its classifier has 1",
        ),
    ],
)
def test_classifiers_that_are_refused(
    further: Callable[[Writer], object], why: str, tmp_path: Path
) -> None:
    path = write_ranker(tmp_path / "model.gguf", 1, further)
    with pytest.raises(ExportError, match=why):
        direct(path, tmp_path / "bundle")
