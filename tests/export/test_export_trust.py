"""What cannot be compared with the model that was trained is refused, or said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

from maskdial.bundle.bundle import load_bundle
from maskdial_export.checkpoint.architectures import settle
from maskdial_export.checkpoint.files import chat_templates
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from tests.export.zoo import GROUPED

New = Callable[[str], Path]
Refuse = Callable[..., None]


@pytest.mark.parametrize(
    ("file_name", "settings", "shown"),
    [
        ("config.json", {"auto_map": {"AutoModel": "modeling_x.XModel"}}, "modeling_x.XModel"),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}},
            "tokenization_x.X, auto_map in tokenizer_config.json",
        ),
        ("tokenizer_config.json", {"auto_map": ["tokenization_x.X", None]}, "tokenization_x.X"),
    ],
)
def test_code_of_a_known_model_type(
    file_name: str,
    settings: dict[str, Any],
    shown: str,
    assert_refused: Refuse,
    export_by_command: Callable[..., tuple[int, str]],
    new_checkpoint: New,
    add_json: Callable[..., None],
    bundles: Path,
) -> None:
    """The known class may read in one direction where the checkpoint's own code reads in both."""
    source = new_checkpoint("llama")
    add_json(source / file_name, **settings)
    assert_refused(source, f"brings code of its own ({shown}")
    code, line = export_by_command(str(source), str(bundles / "it"), "--ignore-remote-code")
    assert code == 0
    assert "not compared with the original model" in line
    assert "within" not in line
    doubt = load_bundle("it", bundles / "it").manifest.parity.doubt
    assert doubt is not None
    assert shown in doubt


def test_a_configuration_class_of_its_own_changes_nothing(
    new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("llama")
    add_json(source / "config.json", auto_map={"AutoConfig": "configuration_x.XConfig"})
    found = find(str(source), "auto", revision=None, allow_pickle=False)
    assert found.own_code is None


def test_a_module_of_sentence_transformers_with_code_of_its_own(
    assert_refused: Refuse, new_checkpoint: New
) -> None:
    source = new_checkpoint("bert-embed")
    path = source / "modules.json"
    path.write_text(path.read_text().replace("sentence_transformers.models.Tr", "custom_st.Tr"))
    assert_refused(source, "brings code of its own (custom_st.Transformer, modules.json)")


@pytest.mark.parametrize("options", [(), ("--no-strict",)])
@pytest.mark.parametrize(
    ("file_name", "content", "why"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "is quantized with modelopt (FP8), as hf_quant_config.json says",
        ),
        ("quantize_config.json", {"bits": 4, "quant_method": "gptq"}, "quantized with gptq (4)"),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "with MLX's 4 bits"),
    ],
)
def test_formats_that_another_file_names(
    file_name: str,
    content: dict[str, Any],
    why: str,
    options: tuple[str, ...],
    assert_refused: Refuse,
    new_checkpoint: New,
    add_json: Callable[..., None],
) -> None:
    source = new_checkpoint("llama")
    add_json(source / file_name, **content)
    assert_refused(source, why, *options)


@pytest.mark.parametrize("options", [(), ("--no-strict",)])
def test_scales_are_never_dropped(
    options: tuple[str, ...], assert_refused: Refuse, new_checkpoint: New
) -> None:
    """--no-strict would compare weights without their scales with weights without their scales."""
    source = new_checkpoint("llama")
    path = source / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.weight_scale"
    save_file(load_file(path) | {name: torch.ones(1)}, path, metadata={"format": "pt"})
    assert_refused(source, f"has the weight {name} of a quantized model, but config.json", *options)


def test_without_strictness_nothing_is_known_of_the_original(
    export_by_command: Callable[..., tuple[int, str]], new_checkpoint: New, bundles: Path
) -> None:
    source = new_checkpoint("llama")
    path = source / "model.safetensors"
    weights = load_file(path) | {"lm_head.bias": torch.zeros(101)}
    save_file(weights, path, metadata={"format": "pt"})
    code, line = export_by_command(str(source), str(bundles / "it"), "--no-strict")
    assert code == 0
    assert "not compared with the original model: " in line
    assert "lm_head.bias" in line
    assert "within" not in line


TINY_T5 = {
    "vocab_size": 101,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
}
TINY_BART = {
    "vocab_size": 101,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
NO_SIZES: dict[str, tuple[str, Any, str]] = {
    "canine": (
        "CanineForSequenceClassification",
        lambda: transformers.CanineConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
        ),
        "(canine) has no vocabulary",
    ),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        lambda: transformers.T5GemmaConfig(
            encoder=transformers.T5GemmaModuleConfig(**GROUPED),
            decoder=transformers.T5GemmaModuleConfig(**GROUPED),
            vocab_size=101,
        ),
        "(t5gemma) has no width of its hidden states",
    ),
    "bigbird-pegasus": (
        "BigBirdPegasusForConditionalGeneration",
        lambda: transformers.BigBirdPegasusConfig(
            vocab_size=101,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=128,
        ),
        "which does not attend through transformers' attention interface",
    ),
    "longt5": (
        "LongT5ForConditionalGeneration",
        lambda: transformers.LongT5Config(**TINY_T5, local_radius=8),
        "is a LongT5LocalAttention, which does not attend through",
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        lambda: transformers.SwitchTransformersConfig(**TINY_T5, num_experts=2),
        "is a SwitchTransformersLayerFF) is not one that can be exported",
    ),
    "led": (
        "LEDForConditionalGeneration",
        lambda: transformers.LEDConfig(**TINY_BART, attention_window=8),
        "is a LEDEncoderSelfAttention, which does not attend through",
    ),
    "pegasus-x": (
        "PegasusXForConditionalGeneration",
        lambda: transformers.PegasusXConfig(**TINY_BART, block_size=8, num_global_tokens=4),
        "is a PegasusXGlobalLocalAttention, which does not attend through",
    ),
    "fsmt": (
        "FSMTForConditionalGeneration",
        lambda: transformers.FSMTConfig(
            langs=["en", "de"],
            src_vocab_size=101,
            tgt_vocab_size=101,
            **{name: value for name, value in TINY_BART.items() if name != "vocab_size"},
        ),
        "is a FSMTDecoder, which does not attend through",
    ),
    "diffllama": (
        "DiffLlamaForCausalLM",
        lambda: transformers.DiffLlamaConfig(**GROUPED | {"num_key_value_heads": 2}),
        "is a DiffLlamaAttention, which does not attend through",
    ),
    "rwkv": (
        "RwkvForCausalLM",
        lambda: transformers.RwkvConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
        ),
        "keeps a state from token to token (rwkv.blocks.0 is a RwkvBlock)",
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        lambda: transformers.MiniMaxConfig(
            **GROUPED,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["linear_attention", "full_attention"],
        ),
        "is a MiniMaxLightningAttention), which the exported graph cannot carry",
    ),
}


@pytest.mark.parametrize("name", NO_SIZES)
def test_models_that_graphs_cannot_describe(
    name: str, assert_refused: Refuse, checkpoint: New, tmp_path: Path
) -> None:
    """They are refused in a sentence before anything is traced."""
    architecture, configure, why = NO_SIZES[name]
    model = getattr(transformers, architecture)(configure())
    model.save_pretrained(tmp_path / "checkpoint")
    tokenizer = checkpoint("bert") / "tokenizer.json"
    shutil.copyfile(tokenizer, tmp_path / "checkpoint" / "tokenizer.json")
    assert_refused(tmp_path / "checkpoint", why)


def test_mistral_4_reads_texts() -> None:
    assert settle({"model_type": "mistral4"}, "generate") == ("Mistral4ForCausalLM", "generate")


NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": NAMED}}, {"default": "d", "tool_use": "t"}),
        ({"tokenizer_config.json": {"chat_template": NAMED[1:]}}, {"tool_use": "t"}),
        ({"chat_template.json": {"chat_template": "p"}}, {"default": "p"}),
        (
            {"chat_template.jinja": "d", "additional_chat_templates/rag.jinja": "r"},
            {"default": "d", "rag": "r"},
        ),
        ({"additional_chat_templates/rag.jinja": "r"}, {"rag": "r"}),
    ],
)
def test_all_chat_templates_are_carried(
    files: dict[str, Any],
    expected: dict[str, str],
    new_checkpoint: New,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = new_checkpoint("llama")
    (source / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (source / name).write_text(content if isinstance(content, str) else json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(source).chat_template
    if "chat_template.json" not in files:  # which transformers reads for processors only
        assert (theirs if isinstance(theirs, dict) else {"default": theirs}) == expected
    export(str(source), tmp_path / "bundle", console=Console())
    bundle = load_bundle("it", tmp_path / "bundle")
    for name, text in expected.items():
        file_name = f"additional_chat_templates/{name}.jinja"
        file_name = "chat_template.jinja" if name == "default" else file_name
        assert file_name in bundle.manifest.files
        assert (bundle.path / file_name).read_text() == text
    nameless = "no chat template is the default" in capsys.readouterr().out
    assert nameless == ("default" not in expected)


def test_a_name_that_is_a_path_is_refused(new_checkpoint: New, add_json: Any) -> None:
    source = new_checkpoint("llama")
    templates = [{"name": "../x", "template": "t"}]
    add_json(source / "tokenizer_config.json", chat_template=templates)
    found = find(str(source), "auto", revision=None, allow_pickle=False)
    with pytest.raises(ExportError, match=r"has the name '\.\./x'"):
        chat_templates(found)
