"""Layers for multi-token prediction against transformers' own, `MtpModel`."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import DRAFT_GRAPH, GRAPH
from maskdial_export import writing
from maskdial_export.checkpoint.mtp import without_mtp
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from maskdial_export.quantize.quantize import IntegerPrecision
from maskdial_export.session import CausalSession
from maskdial_export.tracing.draft_head import DraftHead
from maskdial_export.tracing.mtp import mtp_head
from tests.export.conftest import make_tokenizer
from tests.export.zoo import CAUSAL, EXPERTS, ROUTED, SHAPE, WRAPPED
from tests.mtp import add_layer, declared, save

ANY_LOSS = Gate(max_loss=math.inf)
# Of the largest logit: what rounding to int8 may take
TOLERANCE = 0.1
LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
MELLUM = EXPERTS | {
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_mtp_layers": 1,
}
TIED = {**WRAPPED["qwen3.5-vision"].settings, "tie_word_embeddings": True}


def compare(checkpoint: Path, folder: Path, tolerance: float) -> None:
    """Reads a text as the server does, in pieces, and compares what the layer predicts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with declared(model):
        mtp: Any = MtpModel.from_pretrained(model)
    ids = np.random.default_rng(7).integers(5, model.config.vocab_size, 30)
    with torch.no_grad():
        read = model(torch.from_numpy(ids[None, :-1]), output_hidden_states=True)
        states = mtp.forward_layer(
            0,
            read.hidden_states[-1],
            torch.arange(1, 30)[None],
            MtpCache(config=mtp.config),
            input_ids=torch.from_numpy(ids[None, 1:]),
        )
        expected = model.lm_head(states)[0].numpy()
    bundle = load_bundle("mtp", folder)
    kv, own = bundle.manifest.kv, bundle.manifest.draft_head
    assert kv is not None
    assert own is not None
    main, layer = (
        CausalSession(folder / GRAPH, kv, 1, 40),
        CausalSession(bundle.draft_graph, own.kv, 1, 40),
    )
    found = []
    for start, end in ((0, 12), (12, 13), (13, 29)):
        main.run(0, [ids[start:end]])
        found += layer.run(0, [ids[start + 1 : end + 1]], previous_hidden=main.hidden)
    assert np.abs(np.concatenate(found) - expected).max() < tolerance * np.abs(expected).max()


def test_the_layer_predicts_what_transformers_does(circling: Path) -> None:
    compare(circling, circling / "bundle", TOLERANCE)


def test_embeddings_and_head_are_stored_once(circling: Path) -> None:
    places: list[dict[str, tuple[str, str]]] = []
    for name in (GRAPH, DRAFT_GRAPH):
        graph = onnx.load(circling / "bundle" / name, load_external_data=False).graph
        stored = {
            each.name: {entry.key: entry.value for entry in each.external_data}
            for each in graph.initializer
            if each.external_data
        }
        places.append({n: (each["location"], each["offset"]) for n, each in stored.items()})
    for name in ("model.embed_tokens.int8", "lm_head.int8"):
        assert places[0][name] == places[1][name]


def test_a_layer_too_many_is_none_for_multi_token_prediction() -> None:
    """As where config.json has one layer fewer than there are."""
    config = transformers.Glm4MoeConfig(**ROUTED)
    with torch.device("meta"):
        model = transformers.Glm4MoeForCausalLM(config)
    norm = f"model.layers.{config.num_hidden_layers}.input_layernorm.weight"
    projection = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    assert without_mtp(model, [norm, "other"]) == {norm, "other"}
    assert without_mtp(model, [norm, projection, "other"]) == {"other"}


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("architecture", "settings", "precision"),
    [
        ("Glm4MoeForCausalLM", ROUTED, "int8"),
        ("DeepseekV3ForCausalLM", LATENT, "int8"),
        ("MellumForCausalLM", MELLUM, "int8"),
        ("Qwen3_5ForCausalLM", CAUSAL["qwen3.5"].settings, "int4"),
        ("Qwen3_5MoeForCausalLM", CAUSAL["qwen3.5-moe"].settings, "int8"),
        ("Qwen3NextForCausalLM", CAUSAL["qwen3-next"].settings, "int8"),
        ("Qwen3_5ForConditionalGeneration", TIED, "int8"),
    ],
)
def test_architectures(
    architecture: str,
    settings: Any,
    precision: IntegerPrecision,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []

    def take(main: Any, layer: Any) -> DraftHead:
        taken.append(layer)
        return mtp_head(main, layer)

    monkeypatch.setattr(writing, "mtp_head", take)
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    mtp: Any = add_layer(model)
    save(model, mtp, tmp_path)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    manifest = export(str(tmp_path), tmp_path / "bundle", precision=precision, gate=ANY_LOSS)
    assert manifest.draft_head is not None  # its fp32 graph was compared with transformers'
    loaded = taken[0].layers[0].state_dict()
    for name, weight in mtp.layers[0].state_dict().items():
        assert torch.equal(loaded[name], weight), name


def test_a_layer_that_lacks_a_weight_is_refused(circling: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(circling / name, tmp_path / name)
    tensors = safetensors.torch.load_file(circling / "model.safetensors")
    del tensors["mtp.fc.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"for multi-token prediction of .* cannot be loaded"):
        export(str(tmp_path), tmp_path / "bundle", precision="int8", gate=ANY_LOSS)
