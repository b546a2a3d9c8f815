"""Settings that sentence-transformers saves are applied, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

from maskdial_export.checkpoint.source import find
from maskdial_export.checks.parity import expected_output
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.model import Checkpoint, load_checkpoint
from tests.export.conftest import CHECKPOINTS, make_tokenizer

New = Callable[[str], Path]
AddJson = Callable[..., None]
TEXTS = ["the house by the sea.", "a door", "it is a long text, and it goes on, and on, and on."]
TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def save(folder: Path, architecture: str, **changes: Any) -> Path:
    """A tiny BERT with a head, and its tokenizer, which does not cut texts by itself."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    settings = {**CHECKPOINTS["bert"][1], **changes}
    model = model_class(model_class.config_class(**settings))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS | kind))
    return folder


def load(folder: Path) -> Checkpoint:
    return load_checkpoint(find(str(folder), "auto", revision=None, allow_pickle=False))


def outputs(checkpoint: Checkpoint, texts: list[Any]) -> list[Any]:
    """What the bundle's graph is compared with, for each text or pair."""
    made = []
    for text in texts:
        pair = (text,) if isinstance(text, str) else text
        encoding = checkpoint.tokenizer.encode(*pair)
        ids = encoding.ids[: checkpoint.max_length]
        inputs = {"input_ids": torch.tensor([ids])}
        if checkpoint.sends_token_types:
            inputs["token_type_ids"] = torch.tensor([encoding.type_ids[: checkpoint.max_length]])
        made.append(expected_output(checkpoint.model, checkpoint.pooler, inputs))
    return made


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    backbone = save(tmp_path / "backbone", "BertModel")
    modules = [Transformer(str(backbone)), Pooling(32), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_truncated_dimension(dense: Path, add_json: AddJson) -> None:
    add_json(dense / "config_sentence_transformers.json", truncate_dim=8)
    expected = SentenceTransformer(str(dense), device="cpu").encode(TEXTS)
    assert expected.shape == (3, 8)
    checkpoint = load(dense)
    assert checkpoint.pooler is not None
    assert checkpoint.pooler.embedding.dimension == 8
    assert not checkpoint.pooler.embedding.normalized  # as sentence-transformers leaves them
    np.testing.assert_allclose(outputs(checkpoint, TEXTS), expected, atol=1e-5)
    add_json(dense / "config_sentence_transformers.json", truncate_dim=0)
    with pytest.raises(ExportError, match=r"truncate_dim in .* is 0, not a number above 0"):
        load(dense)


def test_the_largest_weights_of_a_sparse_encoder(tmp_path: Path) -> None:
    backbone = save(tmp_path / "backbone", "BertForMaskedLM")
    modules: list[Any] = [MLMTransformer(str(backbone)), SpladePooling()]
    folder = tmp_path / "saved"
    SparseEncoder(modules=modules, device="cpu", max_active_dims=4).save(str(folder))
    reference = SparseEncoder(str(folder), device="cpu")
    expected = reference.encode(TEXTS, convert_to_tensor=True).to_dense().numpy()
    assert set((expected > 0).sum(axis=1)) == {4}
    np.testing.assert_allclose(outputs(load(folder), TEXTS), expected, atol=1e-5)
    export(str(folder), tmp_path / "bundle")  # compares the graph with torch


@pytest.mark.parametrize("place", ["text", "common"])
def test_the_length_of_processing_kwargs(place: str, dense: Path, add_json: AddJson) -> None:
    given = {place: {"max_length": 6, "truncation": True}}
    add_json(dense / "sentence_bert_config.json", processing_kwargs=given)
    reference = SentenceTransformer(str(dense), device="cpu")
    checkpoint = load(dense)
    assert checkpoint.max_length == 6
    alone = reference.encode(TEXTS)
    checkpoint.tokenizer.enable_truncation(6)
    np.testing.assert_allclose(outputs(checkpoint, TEXTS), alone, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "settings", "named"),
    [
        ("sentence_bert_config.json", {"shuffle": 1}, "'shuffle' of its Transformer module"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "add_special_tokens False in processing_kwargs",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"chat_template": {"tools": []}}},
            r"tools \[\] in processing_kwargs",
        ),
        (
            "sentence_bert_config.json",
            {"config_kwargs": {"num_hidden_layers": 1}},
            "'num_hidden_layers' in config_kwargs",
        ),
        ("sentence_bert_config.json", {"query_length": 8}, "query_length 8"),
        ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "transformer_task 'ret"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "get_text_features"}}},
            "modality_config {'method': 'get_text_features'} of texts",
        ),
        ("1_Pooling/config.json", {"layers": [1, 2]}, "'layers' of its Pooling module"),
        ("2_Normalize/config.json", {"order": 1}, "'order' of its Normalize module"),
        (
            "2_Normalize/config.json",
            {"module_input_name": "token_embeddings"},
            "module_input_name 'token_embeddings' of its Normalize module",
        ),
    ],
)
def test_what_is_not_applied_is_refused_by_name(
    file: str, settings: dict[str, Any], named: str, dense: Path, add_json: AddJson
) -> None:
    load(dense)
    add_json(dense / file, **settings)
    with pytest.raises(ExportError, match=f"sentence-transformers that is not supported: {named}"):
        load(dense)


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Path:
    backbone = save(tmp_path / "backbone", "BertForSequenceClassification", num_labels=1)
    made = CrossEncoder(
        str(backbone), device="cpu", max_length=24, activation_fn=torch.nn.Identity()
    )
    made.save(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_cross_encoder_reads_as_far_as_it_was_saved_for(cross_encoder: Path) -> None:
    pairs = [("a house", text) for text in TEXTS]
    expected = CrossEncoder(str(cross_encoder), device="cpu").predict(pairs)
    checkpoint = load(cross_encoder)
    assert checkpoint.max_length == 24
    checkpoint.tokenizer.enable_truncation(24)
    np.testing.assert_allclose(np.ravel(outputs(checkpoint, pairs)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"prompts": {"web": "Find: "}, "default_prompt_name": "web"},
            "default_prompt_name, which puts 'Find: ' before the first text of a pair",
        ),
        (
            {"activation_fn": "torch.nn.modules.activation.Tanh"},
            "activation_fn torch.nn.modules.activation.Tanh; scores are the sigmoid",
        ),
    ],
)
def test_what_changes_the_scores_of_a_cross_encoder_is_refused(
    settings: dict[str, Any], named: str, cross_encoder: Path, add_json: AddJson
) -> None:
    add_json(cross_encoder / "config_sentence_transformers.json", **settings)
    with pytest.raises(ExportError, match=named):
        load(cross_encoder)


def test_the_older_name_of_an_activation(cross_encoder: Path, add_json: AddJson) -> None:
    (cross_encoder / "config_sentence_transformers.json").unlink()
    older = "sbert_ce_default_activation_function"
    add_json(cross_encoder / "config.json", **{older: "torch.nn.modules.activation.Tanh"})
    with pytest.raises(ExportError, match=r"activation_fn torch.nn.modules.activation.Tanh"):
        load(cross_encoder)


def test_a_multi_vector_encoder_is_one_without_a_mask(tmp_path: Path, add_json: AddJson) -> None:
    backbone = save(tmp_path / "backbone", "BertModel")
    modules = [Transformer(str(backbone)), Normalize(module_input_name="token_embeddings")]
    folder = tmp_path / "saved"
    MultiVectorEncoder(modules=modules, device="cpu").save(str(folder))
    expected = MultiVectorEncoder(str(folder), device="cpu").encode(TEXTS[:1])
    checkpoint = load(folder)
    assert checkpoint.task == "embed-all"
    np.testing.assert_allclose(outputs(checkpoint, TEXTS[:1])[0], expected[0], atol=1e-5)
    add_json(folder / "1_Normalize" / "config.json", module_input_name="sentence_embedding")
    with pytest.raises(ExportError, match="module_input_name 'sentence_embedding' of its Norm"):
        load(folder)


def test_a_model_in_a_folder_of_its_own(tmp_path: Path) -> None:
    kind = "sentence_transformers.base.modules.CLIPModel"
    listed = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": kind}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(
        ExportError, match=r"its first module in modules.json is a CLIPModel with file"
    ):
        load(tmp_path)
