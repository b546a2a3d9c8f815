"""The text part of checkpoints that also read images or sound."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

from maskdial.bundle.bundle import load_bundle
from maskdial_export.checkpoint.source import find
from maskdial_export.checkpoint.text_part import take_text_part, towers_left_out
from maskdial_export.checkpoint.weights import load_model
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.tracing import causal
from maskdial_export.tracing.sparsity import quantiles_computed
from tests.export.conftest import VOCABULARY
from tests.export.zoo import SHAPE, WRAPPED

New = Callable[[str], Path]
Refuse = Callable[..., None]
IMAGE = "<image>"
PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
)


def test_what_is_left_out_is_named(new_checkpoint: New, tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    manifest = export(str(new_checkpoint("gemma3-vision")), tmp_path / "bundle", console=console)
    left_out = "left out: vision_tower, multi_modal_projector"
    assert f"the text part alone; {left_out}" in text.getvalue()
    assert manifest.left_out == ("model.vision_tower", "model.multi_modal_projector")
    assert manifest.media_tokens == (1,)
    assert manifest.architecture == "Gemma3ForConditionalGeneration"
    assert manifest.parity.doubt is None


def test_weights_of_towers_may_be_missing_or_unknown(
    new_checkpoint: New, tmp_path: Path, assert_refused: Refuse
) -> None:
    """A tower is never read; the text part's own weights are, as anywhere."""
    source = new_checkpoint("gemma3-vision")
    file = source / "model.safetensors"
    weights = load_file(file)
    text = {name: each for name, each in weights.items() if "vision_tower" not in name}
    assert len(text) < len(weights)
    save_file(text | {"vision_tower.new": torch.zeros(2)}, file, {"format": "pt"})
    export(str(source), tmp_path / "bundle")
    lost = next(name for name in text if "layers.1" in name)
    save_file({name: each for name, each in text.items() if name != lost}, file, {"format": "pt"})
    assert_refused(source, "lacks the weight model.language_model.layers.1")


def test_a_wrapper_that_computes_something_else_is_refused(
    checkpoint: New, load_reference: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = load_reference(checkpoint("qwen3-vl"))
    forward = type(wrapper).forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(type(wrapper), "forward", scaled)
    with pytest.raises(ExportError, match=r"does not compute on text what the whole model does"):
        take_text_part(wrapper, "generate")


def test_logits_that_the_wrapper_does_not_cap_are_not_capped(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    """Gemma3ForCausalLM would cap them by the text configuration."""
    wrapper = load_reference(checkpoint("gemma3-vision"))
    assert wrapper.config.text_config.final_logit_softcapping == 3.0
    part = take_text_part(wrapper, "generate")
    ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        torch.testing.assert_close(part.model(ids).logits, wrapper(input_ids=ids).logits)


def test_embedding_models_have_a_text_part(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    folder = checkpoint("qwen3-vl")
    source = find(str(folder), "embed", revision=None, allow_pickle=False)
    assert source.architecture == "Qwen3VLModel"
    loaded = load_model(source, strict=True, console=Console(quiet=True))
    assert loaded.left_out == ("visual",)
    ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        whole = load_reference(folder).model(input_ids=ids)[0]
        torch.testing.assert_close(loaded.model(input_ids=ids)[0], whole)


def test_cutoffs_are_computed_as_gemma_3n_does(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    model = load_reference(checkpoint("gemma3n-text"))
    sparse = next(each for each in model.modules() if getattr(each, "activation_sparsity", 0))
    values = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    expected = sparse._gaussian_topk(values)
    assert 0 < int((expected > 0).sum()) < values.numel() / 4
    with quantiles_computed(model):
        torch.testing.assert_close(sparse._gaussian_topk(values), expected)


def test_models_without_a_text_part(
    new_checkpoint: New, add_json: Callable[..., None], assert_refused: Refuse
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", model_type="whisper", architectures=["Any"])
    assert_refused(source, "whisper models read more than text")


def chatting(source: Path, add_json: Callable[..., None]) -> Path:
    """Gives a checkpoint a template that reads parts only, and a token for images."""
    file = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    file.add_special_tokens([IMAGE])
    file.save(str(source / "tokenizer.json"))
    config = json.loads((source / "config.json").read_text())
    add_json(source / "config.json", image_token_id=file.token_to_id(IMAGE))
    assert config["image_token_id"] != file.token_to_id(IMAGE) == len(VOCABULARY)
    (source / "chat_template.jinja").write_text(PARTS)
    return source


def test_chat_with_a_template_of_parts_and_tokens_of_images(
    new_checkpoint: New,
    add_json: Callable[..., None],
    serve: Callable[..., str],
    tmp_path: Path,
) -> None:
    source = chatting(new_checkpoint("qwen3-vl"), add_json)
    export(str(source), tmp_path / "bundle")
    media = load_bundle("m", tmp_path / "bundle").manifest.media_tokens
    assert len(VOCABULARY) in media
    url = serve(m=tmp_path / "bundle")

    def chat(content: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    reply = chat("a b c d").json()
    assert reply["usage"]["prompt_tokens"] == 4, reply
    why = "'<image>' stands for an image, a video or sound, and model 'm' reads text only"
    for refused in (
        chat(f"a {IMAGE} b"),
        httpx.post(f"{url}/generate", json={"inputs": f"a {IMAGE}"}, timeout=60),
        httpx.post(f"{url}/score", json={"inputs": f"a {IMAGE}"}, timeout=60),
        httpx.post(f"{url}/v1/completions", json={"prompt": [5, len(VOCABULARY)]}, timeout=60),
    ):
        assert refused.status_code in (400, 422), refused.text
        assert why in refused.text


@pytest.mark.parametrize(
    ("architecture", "of", "text_class"),
    [
        (
            "Gemma3ForSequenceClassification",
            "gemma3-vision",
            "Gemma3TextForSequenceClassification",
        ),
        (
            "Qwen3_5ForSequenceClassification",
            "qwen3.5-vision",
            "Qwen3_5TextForSequenceClassification",
        ),
    ],
)
def test_classifiers_that_are_wrappers_have_a_text_part(
    architecture: str, of: str, text_class: str, checkpoint: New, tmp_path: Path
) -> None:
    """They build the whole wrapper by an auto class, as they build its towers."""
    model_class: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    wrapper = model_class(model_class.config_class(**WRAPPED[of].settings, num_labels=3)).eval()
    wrapper.save_pretrained(tmp_path)
    shutil.copyfile(checkpoint("bert") / "tokenizer.json", tmp_path / "tokenizer.json")
    source = find(str(tmp_path), "auto", revision=None, allow_pickle=False)
    assert source.task == "classify"
    loaded = load_model(source, strict=True, console=Console(quiet=True))
    assert type(loaded.model).__name__ == text_class
    ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        expected = wrapper(input_ids=ids).logits
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("Qwen2AudioForConditionalGeneration", "qwen2"),
        ("DeepseekVLForConditionalGeneration", "llama"),
        ("DeepseekVLHybridForConditionalGeneration", "llama"),
    ],
)
def test_towers_that_wrappers_ask_for_something(architecture: str, text: str) -> None:
    """A device, or an auto class that is called with the name of its argument."""
    model_class: Any = getattr(transformers, architecture)
    settings = {"model_type": text, "num_key_value_heads": 2, **SHAPE}
    config = model_class.config_class(text_config=settings)
    with towers_left_out(config):
        wrapper = model_class(config).eval()
    part = take_text_part(wrapper, "generate")
    assert type(part.model).__name__.endswith("ForCausalLM")
    assert any("tower" in name or "vision" in name for name in part.left_out)


def test_towers_within_a_text_model_keep_no_state_of_texts() -> None:
    """Phi-4-multimodal is no wrapper: its convolutions for sound are in the model of texts."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "crop_size": 28}
    sound = {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2}
    sound |= {"nemo_conv_channels": 8, "ext_pw_out_channel": 32, "nemo_final_size": 32}
    config = transformers.Phi4MultimodalConfig(
        **SHAPE,
        num_key_value_heads=2,
        vision_config=vision | {"image_token_id": 7},
        audio_config=sound | {"audio_token_id": 8},
    )
    causal.check(transformers.Phi4MultimodalForCausalLM(config))
