"""What a model's survey finds out, without tracing it."""

from typing import Any

import pytest
import torch
import transformers

from maskdial_export.errors import ExportError
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.survey import Survey, survey
from tests.export.zoo import BLOOM, GROUPED, REFUSED, ROBERTA, SHAPE, ZOO, Specimen, rope


def make(specimen: Specimen) -> transformers.PreTrainedModel:
    model_class = getattr(transformers, specimen.architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**specimen.settings))
    model.set_attn_implementation("eager")
    return model.eval()


def of(name: str) -> Survey:
    return survey(make(next(zoo[name] for zoo in ZOO.values() if name in zoo)))


@pytest.mark.parametrize(
    ("name", "rotations"),
    [
        ("llama", ["halves", "halves"]),
        ("gpt-neox", ["halves", "halves"]),
        ("gpt-oss", ["halves", "halves"]),  # its tables have each column once
        ("cohere2", ["pairs", None]),
        ("glm", ["pairs", "pairs"]),
        ("smollm3", ["halves", None]),
        ("hunyuan", [None, None]),  # norms after the rotation
        ("gemma2", [None, None]),  # heads of 8 columns, which the operator cannot rotate
        ("gpt2", [None, None]),
        ("mpnet", []),  # attends by itself
    ],
)
def test_rotations(name: str, rotations: list[str | None]) -> None:
    ways = ("halves", "pairs")
    found = [layer.rotation for layer in of(name).layers]
    assert [None if each is None else ways[each.interleaved] for each in found] == rotations


def test_layers_share_their_tables() -> None:
    first, second = (layer.rotation for layer in of("llama").layers)
    assert first is second
    local, whole = (layer.rotation for layer in of("gemma3").layers)
    assert local is not None
    assert whole is not None
    assert not torch.equal(local.cos, whole.cos)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("llama", True),
        ("ctrl", True),
        ("mixtral", True),
        ("llama-classify", True),
        ("qwen3-embed", True),
        ("gemma3-embed", False),
        ("bert", False),
        ("ibert", False),
        ("longformer", False),  # its own code pads the text
        ("t5-embed", False),
    ],
)
def test_causality(name: str, causal: bool, dtype: torch.dtype) -> None:
    model = make(next(zoo[name] for zoo in ZOO.values() if name in zoo))
    assert survey(model.to(dtype)).causal == causal


@pytest.mark.parametrize(
    ("name", "heads"),
    [("llama", (2, 1, 16, 16)), ("gpt-bigcode", (4, 1, 8, 8)), ("deepseek-v3", (4, 4, 32, 16))],
)
def test_heads(name: str, heads: tuple[int, ...]) -> None:
    for layer in of(name).layers:
        found = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        assert found == heads


def test_a_model_that_reads_more_than_ids() -> None:
    with pytest.raises(
        ExportError, match="BrosForTokenClassification cannot run on token ids alone"
    ):
        survey(make(REFUSED["bros"][0]))


@pytest.mark.parametrize(
    ("architecture", "settings", "longest"),
    [
        ("BertForMaskedLM", SHAPE, 128),
        ("MPNetForMaskedLM", ROBERTA, 126),
        ("IBertForMaskedLM", ROBERTA, 126),
        ("OPTForCausalLM", SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32}, 128),
        ("BloomForCausalLM", BLOOM, 128),
        ("BloomForCausalLM", {**BLOOM, "seq_length": None}, 2048),
        ("LlamaForCausalLM", GROUPED | rope("dynamic", factor=2.0), 128),
        ("Llama4ForCausalLM", GROUPED | {"attention_chunk_size": 64}, 64),
        ("Llama4ForCausalLM", GROUPED | {"floor_scale": 32}, 31),
        ("Llama4ForCausalLM", GROUPED | {"floor_scale": 32, "attn_temperature_tuning": False}, 128),
        (
            "LlamaForCausalLM",
            GROUPED | rope("yarn", factor=2.0, original_max_position_embeddings=64),
            128,
        ),
    ],
)
def test_longest_text(architecture: str, settings: dict[str, Any], longest: int) -> None:
    assert max_length(make(Specimen(architecture, settings))) == longest
