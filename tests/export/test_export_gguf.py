"""`maskdial export` of GGUF files: a model in parts, one of embeddings, and what is refused."""

import json
from collections.abc import Callable
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console

from maskdial.bundle.bundle import file_sha256, load_bundle
from maskdial.causal.generation_config import read_generation_defaults
from maskdial_export.checkpoint.embedding import read_pooler
from maskdial_export.checkpoint.gguf.contents import gguf_files
from maskdial_export.checkpoint.gguf.convert import convert
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from tests.export.gguf_files import (
    BYTE_LEVEL_SIZE,
    TEMPLATE,
    as_gemma,
    as_llama,
    basics,
    byte_level,
    make_model,
    word_pieces,
    write_gguf,
)
from tests.export.test_gguf_models import ENCODER, MODELS, SHAPE, encoder, gemma3, llama, write

Refuse = Callable[..., None]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write("llama", path)
    return path


def test_a_model_in_parts(tmp_path: Path, bundles: Path, export_by_command: Command) -> None:
    """The first part has the metadata; any of them names the model. The bundle is as of Q8_0."""
    folder = tmp_path / "model"
    folder.mkdir()
    ends = dict.fromkeys(["q.weight", "k.weight", "v.weight", "up.weight", "embd.weight"], "Q8_0")
    write("llama", folder / "model.gguf", quantize=ends, max_tensors=9)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-{each:05}-of-00003.gguf" for each in (1, 2, 3)]
    code, line = export_by_command(str(parts[1]), str(bundles / "it"))
    assert code == 0, line
    loaded = load_bundle("it", bundles / "it")
    manifest = loaded.manifest
    assert manifest.precision == "int8"  # the integers are kept unless another one is asked for
    assert manifest.quality is not None
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
    written = json.loads((bundles / "it" / "generation_config.json").read_text())
    assert written.items() >= sampling.items()
    defaults = read_generation_defaults(loaded)
    assert defaults.do_sample
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (
        *(0.8, 40),
        *(0.95, 0.05),
    )
    assert (manifest.architecture, manifest.task) == ("LlamaForCausalLM", "generate")
    assert manifest.source == parts[0].name
    names = "".join(f"{part.name} {file_sha256(part)}\n" for part in parts)
    assert manifest.source_sha256 == sha256(names.encode()).hexdigest()
    assert (manifest.special_tokens.bos, manifest.special_tokens.eos) == (258, (259,))
    assert (bundles / "it" / "chat_template.jinja").read_text() == TEMPLATE
    assert not list((bundles / "it").glob(".gguf*"))
    assert gguf_files(folder) == parts
    parts[2].unlink()
    assert export_by_command(str(folder), str(bundles / "more")) == (
        1,
        f"maskdial export: {parts[0].name} is one of 3 parts, of which 1 are not beside it "
        f"({parts[2].name}); get them, too",
    )


def test_what_is_in_the_file_is_said(model_file: Path, tmp_path: Path) -> None:
    write("llama", model_file, quantize={"ffn_down.weight": "Q4_0", "ffn_gate.weight": "BF16"})
    console = Console(record=True, quiet=False, file=StringIO(), width=200)
    folder = tmp_path / "restored"
    folder.mkdir()
    convert([model_file], folder, console)
    assert console.export_text().strip() == (
        "GGUF of llama with 119,872 weights: F32 79.5%, BF16 10.3%, Q4_0 10.3%; restored to float32"
    )


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        (gguf.PoolingType.MEAN, "mean"),
        (gguf.PoolingType.CLS, "cls"),
        (gguf.PoolingType.LAST, "last"),
        (None, "mean"),
    ],
)
def test_a_model_of_embeddings(kind: gguf.PoolingType | None, pooling: str, tmp_path: Path) -> None:
    model = make_model("BertModel", **ENCODER)

    def metadata(writer: Any) -> None:
        word_pieces(writer)
        encoder(writer, model.config)
        if kind is not None:
            writer.add_pooling_type(kind)

    path = write_gguf(tmp_path / "model.gguf", "bert", model, metadata)
    restored = tmp_path / "restored"
    restored.mkdir()
    source = find(str(path), "auto", revision=None, allow_pickle=False, restored=restored)
    assert (source.architecture, source.task) == ("BertModel", "embed")
    embedding = read_pooler(source, model.config.hidden_size).embedding
    assert (embedding.pooling, embedding.normalized) == (pooling, kind is not None)


def test_a_decoder_of_embeddings(tmp_path: Path) -> None:
    """As Qwen3-Embedding: the model without its head."""
    model = make_model("Qwen3ForCausalLM", **SHAPE, tie_word_embeddings=True, head_dim=16)

    def metadata(writer: Any) -> None:
        byte_level(writer)
        basics(writer, model.config)
        writer.add_pooling_type(gguf.PoolingType.LAST)
        writer.add_add_eos_token(True)

    path = write_gguf(tmp_path / "model.gguf", "qwen3", model, metadata)
    restored = tmp_path / "restored"
    restored.mkdir()
    source = find(str(path), "auto", revision=None, allow_pickle=False, restored=restored)
    assert (source.architecture, source.task) == ("Qwen3Model", "embed")
    assert read_pooler(source, 64).embedding.pooling == "last"


def test_embedding_gemma(tmp_path: Path) -> None:
    """Both directions, and two matrices after the pooling."""
    settings = MODELS["gemma3"][2] | {"use_bidirectional_attention": True, "sliding_window": 32}
    model = make_model("Gemma3TextModel", **settings)
    weights = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)

    def metadata(writer: Any) -> None:
        byte_level(writer)
        gemma3(writer, model.config)
        writer.add_sliding_window(32)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        for name, each in zip(("dense_2", "dense_3"), weights, strict=True):
            writer.add_tensor(f"{name}.weight", each)

    path = write_gguf(tmp_path / "model.gguf", "gemma-embedding", model, metadata, as_gemma)
    restored = tmp_path / "restored"
    restored.mkdir()
    source = find(str(path), "auto", revision=None, allow_pickle=False, restored=restored)
    loaded = type(model).from_pretrained(restored, attn_implementation="eager")
    assert loaded.config.use_bidirectional_attention
    assert loaded.config.sliding_window == model.config.sliding_window
    model.set_attn_implementation("eager")
    ids = torch.randint(BYTE_LEVEL_SIZE, (1, 50))
    with torch.no_grad():
        expected, found = (each(input_ids=ids)[0] for each in (model, loaded.eval()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pooler = read_pooler(source, 64)
    pooled = expected.mean(1)
    for each in weights:
        pooled = pooled @ torch.from_numpy(each).T
    torch.testing.assert_close(
        pooler(expected, torch.tensor([50])), torch.nn.functional.normalize(pooled)
    )


def test_what_ends_a_reply(tmp_path: Path) -> None:
    """Tokens that llama.cpp takes for an end, beside the one that the file names."""
    model = make_model(MODELS["llama"][1], **MODELS["llama"][2])

    def metadata(writer: Any) -> None:
        byte_level(writer)
        llama(writer, model.config)
        writer.add_eos_token_id(258)
        writer.add_eot_token_id(260)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
        writer.add_string("tokenizer.chat_template.../../escape", "x")

    path = write_gguf(tmp_path / "model.gguf", "llama", model, metadata, as_llama)
    restored = tmp_path / "restored"
    restored.mkdir()
    source = find(str(path), "auto", revision=None, allow_pickle=False, restored=restored)
    generation = source.read_json("generation_config.json")
    ends = {"bos_token_id": 258, "eos_token_id": [258, 260, 259]}
    # what the file does not say is llama.cpp's
    assert generation == ends | {"temperature": 0.5, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    templates = restored / "additional_chat_templates"
    assert [each.name for each in templates.iterdir()] == ["tool_use.jinja"]


def test_a_folder(model_file: Path, tmp_path: Path, assert_refused: Refuse) -> None:
    """config.json alone is no checkpoint; what reads images is no model."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "Q8_0.gguf").write_bytes(model_file.read_bytes())
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    restored = tmp_path / "restored"
    restored.mkdir()
    source = find(str(folder), "auto", revision=None, allow_pickle=False, restored=restored)
    assert source.provenance == "Q8_0.gguf"
    (folder / "Q4_0.gguf").write_bytes(model_file.read_bytes())
    assert_refused(folder, f"{folder} has 2 GGUF models (Q4_0.gguf, Q8_0.gguf); pass one of them")


def test_refusals(model_file: Path, tmp_path: Path, assert_refused: Refuse) -> None:
    assert_refused(tmp_path / "none.gguf", "there is no file")
    assert_refused(model_file, "--revision applies to Hub ids", "--revision", "main")
    (tmp_path / "notes.txt").write_text("notes")
    assert_refused(tmp_path / "notes.txt", "is not a GGUF file")
    model_file.write_bytes(model_file.read_bytes()[:-40])
    assert_refused(model_file, "is incomplete or damaged: the tensor")


@pytest.mark.parametrize(
    ("architecture", "entries", "why"),
    [
        ("clip", {}, "what a model reads images or sound with"),
        ("mamba", {}, "has the architecture 'mamba', which is not supported as GGUF"),
        ("llama", {"general.type": "adapter"}, "is no model, but a GGUF of the type 'adapter'"),
        ("llama", {"split.count": 3}, "is one of 3 parts; name them as they were"),
        ("llama", {"llama.embedding_length": 8}, "has no llama.attention.head_count"),
    ],
)
def test_what_is_no_model(
    architecture: str, entries: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint16
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ExportError, match=why):
        convert([path], tmp_path / "restored")


@pytest.mark.parametrize(
    ("add", "why"),
    [
        (lambda each: each.add_tensor("blk.0.new", np.ones(1, np.float32)), "tensor 'blk.0.new'"),
        (
            lambda each: each.add_tensor("blk.0.gate_new.weight", np.ones(1, np.float32)),
            "the tensor 'blk.0.gate_new.weight', for which LlamaForCausalLM has no place",
        ),
        (
            lambda each: each.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "has no tensor rope_factors_short",
        ),
        (lambda each: each.add_string("llama.rope.scaling.type", "new"), "scaled by 'new', which"),
        (
            lambda each: each.add_tensor("rope_freqs.weight", np.array([1, 3, 2], np.float32)),
            "divides frequencies in a way that is not that of Llama 3",
        ),
        (lambda each: each.add_pooling_type(gguf.PoolingType.RANK), "is a reranker or classifier"),
    ],
)
def test_what_llama_does_not_have(add: Callable[[Any], None], why: str, tmp_path: Path) -> None:
    model = make_model(MODELS["llama"][1], **MODELS["llama"][2])

    def metadata(writer: Any) -> None:
        byte_level(writer)
        llama(writer, model.config)
        add(writer)

    path = write_gguf(tmp_path / "model.gguf", "llama", model, metadata, as_llama)
    with pytest.raises(ExportError, match=why):
        convert([path], tmp_path / "restored")
