"""The direct path writes what the tracer writes: bundles whose logits have the same bits."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy.typing import NDArray
from onnx import numpy_helper
from rich.console import Console
from safetensors import torch as torch_files
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from maskdial.bundle.manifest import GRAPH, Manifest
from maskdial.kernels.stored import StoredBlockKernels
from maskdial_export import route
from maskdial_export import session as session_module
from maskdial_export.checkpoint.gguf.contents import read_contents, write_settings
from maskdial_export.choices import TOLERANCE
from maskdial_export.direct import check as check_module
from maskdial_export.direct import export as direct_module
from maskdial_export.direct import weights as weights_module
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.export import export_direct
from maskdial_export.direct.families import read_decoder
from maskdial_export.direct.layer_norm_reference import make_reference
from maskdial_export.direct.reference import Reference
from maskdial_export.direct.rotary import read_rotary
from maskdial_export.direct.text_parts import text_part
from maskdial_export.direct.weights import SafetensorsWeights, Weights
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from maskdial_export.route import export_any_way
from maskdial_export.session import CausalSession, Loaded, kernels_here
from tests.export.gguf_files import make_model
from tests.export.test_export_quantized_checkpoints import to_fp8
from tests.export.test_gguf_models import (
    DEEPSEEK,
    DELTA_NET,
    DIRECT_MODELS,
    FALCON_H1,
    GEMMA4,
    GPT2,
    LLAMA3,
    LONGROPE,
    MAMBA_2,
    MODELS,
    MOE,
    MSCALE,
    SHAPE,
    YARN,
    write,
    write_with,
)
from tests.export.zoo import QWEN_TOWER, TOWER, wrapped

Floats = NDArray[np.float32]

QUIET = Console(quiet=True)
TYPES = {
    "attn_q.weight": "Q4_1",
    "attn_k.weight": "Q4_1",
    "attn_v.weight": "Q4_1",
    "attn_qkv.weight": "Q4_1",
    "attn_output.weight": "Q4_0",
    "ffn_gate.weight": "Q4_1",
    "ffn_up.weight": "Q8_0",
    "ffn_down.weight": "Q5_0",
    "ffn_gate_exps.weight": "Q4_1",
    "ffn_up_exps.weight": "Q4_0",
    "ffn_down_exps.weight": "Q4_0",
    "token_embd.weight": "Q8_0",
    "output.weight": "Q8_0",
}
FAMILIES = [
    *("llama", "llama-bias", "llama3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"),
    *("phi3", "granite", "smollm3", "olmo2", "mixtral", "qwen2-moe", "qwen3-moe"),
    *("llama-yarn", "exaone4", "exaone4-small", "seed-oss"),
    *("lfm2", "lfm2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next", "granite-hybrid"),
    *("olmo3", "glm4", "glm4-moe", "ministral3", "starcoder2"),
    *("olmoe", "qwen3-vl", "qwen3-vl-moe", "phi", "cohere", "cohere2"),
    *("deepseek2", "deepseek3", "minicpm3", "falcon-h1", "nemotron-h", "nemotron-h-moe"),
    "youtu",
    *("gemma3n", "gemma4", "gemma4-keys"),
]
PHI = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 2}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SHAPE | {"rope_parameters": LLAMA3, "head_dim": 32}),
    "mistral": ("MistralForCausalLM", SHAPE | {"sliding_window": 16, "head_dim": 32}),
    "qwen2": (
        "Qwen2ForCausalLM",
        SHAPE
        | {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        SHAPE | {"num_hidden_layers": 7, "sliding_window": 16, "head_dim": 16},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        SHAPE | MOE | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        SHAPE | MOE | {"shared_expert_intermediate_size": 48, "head_dim": 16},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "olmoe": ("OlmoeForCausalLM", SHAPE | MOE | {"num_experts": 16}),
    "phi3": ("Phi3ForCausalLM", SHAPE | {"sliding_window": 31, "pad_token_id": 0}),
    **{
        name: MODELS[name][1:3]
        for name in (
            *("lfm2", "lfm2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next", "granite-hybrid"),
            *("olmo3", "glm4", "glm4-moe", "ministral3", "deepseek2", "deepseek3", "minicpm3"),
            *("nemotron-h", "nemotron-h-moe", "gemma3n", "gemma4", "gemma4-keys"),
        )
    },
    "deepseek2-greedy": (
        "DeepseekV2ForCausalLM",
        SHAPE | DEEPSEEK | {"rope_parameters": MSCALE, "n_group": None, "topk_group": None},
    ),
    "deepseek3-halves": (
        "DeepseekV3ForCausalLM",
        SHAPE | DEEPSEEK | {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True},
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        SHAPE
        | FALCON_H1
        | {"lm_head_multiplier": 0.3, "embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 0.6]}
        | {"key_multiplier": 0.8, "attention_in_multiplier": 1.1, "ssm_in_multiplier": 1.2}
        | {"ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_out_multiplier": 0.4}
        | {"attention_out_multiplier": 0.9, "attention_bias": True, "mlp_bias": True}
        | {"mamba_proj_bias": True, "projectors_bias": True},
    ),
    "bamba": (
        "BambaForCausalLM",
        SHAPE
        | {key: each for key, each in MAMBA_2.items() if key.startswith("mamba_")}
        | {"head_dim": 32, "attn_layer_indices": [1]},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        SHAPE | DEEPSEEK | {"v_head_dim": 32, "n_group": 1, "topk_group": 1},
    ),
    **{name: each[1:3] for name, each in DIRECT_MODELS.items()},
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"scale_attn_weights": False}),
    "phi": ("PhiForCausalLM", PHI),
    "starcoder2": ("Starcoder2ForCausalLM", SHAPE | {"sliding_window": 16}),
    "cohere": ("CohereForCausalLM", SHAPE | {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": (
        "Cohere2ForCausalLM",
        SHAPE
        | {"num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.3}
        | {"tie_word_embeddings": False},
    ),
    "granite-hybrid-rope": (
        "GraniteMoeHybridForCausalLM",
        SHAPE
        | MAMBA_2
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "attention_bias": True, "time_step_limit": [0.1, 1.5]},
    ),
}

# Layers without a window turn no column
GEMMA4_STILL = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.03,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
VISION = {"num_position_embeddings": 16, "out_hidden_size": 64}
THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
DEEP = {**QWEN_TOWER, **VISION, "deepstack_visual_indexes": [0]}
FOLDERS |= {
    "gemma3-whole": (
        "Gemma3ForConditionalGeneration",
        wrapped(
            SHAPE | {"head_dim": 16, "sliding_window": 16, "final_logit_softcapping": 3.0},
            tie_word_embeddings=True,
        ),
    ),
    "gemma4-whole": (
        "Gemma4ForConditionalGeneration",
        wrapped(
            SHAPE | GEMMA4,
            TOWER | {"model_type": "gemma4_vision", "head_dim": 16},
            audio_config=None,
        ),
    ),
    "mistral3-whole": (
        "Mistral3ForConditionalGeneration",
        wrapped(
            SHAPE | {"model_type": "mistral", "head_dim": 16}, TOWER | {"model_type": "pixtral"}
        ),
    ),
    "qwen3-vl-whole": (
        "Qwen3VLForConditionalGeneration",
        wrapped(SHAPE | THREE | {"head_dim": 16}, DEEP, video_token_id=3),
    ),
    "qwen3-vl-moe-whole": (
        "Qwen3VLMoeForConditionalGeneration",
        wrapped(SHAPE | THREE | MOE | {"head_dim": 16}, DEEP, video_token_id=3),
    ),
    "qwen3.5-whole": (
        "Qwen3_5ForConditionalGeneration",
        wrapped(SHAPE | DELTA_NET, QWEN_TOWER | VISION, video_token_id=3),
    ),
}


def direct(source: Path, dest: Path, **options: Any) -> Manifest:
    return export_direct(str(source), dest, tolerance=TOLERANCE, console=QUIET, **options)


def logits(bundle: Path, manifest: Manifest, kernels: Any) -> list[Floats]:
    """Of a ragged batch, of a chunk after it, and of decode steps; windows of 16 are exceeded."""
    assert manifest.kv is not None
    graph = Loaded(bundle / GRAPH, kernels=kernels)
    session = CausalSession(graph, manifest.kv, slots=2, room=manifest.max_length)
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 258, size) for size in (24, 7)]
    found = session.run(0, texts)
    found += session.run(0, [texts[1][:3]])
    for token in texts[1][3:6]:
        found += session.run(0, [np.array([token]), np.array([token])])
    return found


def content(path: Path) -> dict[str, Any]:
    """A JSON file. transformers gives a tokenizer that adds nothing to texts a template of that."""
    found: dict[str, Any] = json.loads(path.read_text())
    template = found.get("post_processor")
    if template is not None and not template["special_tokens"]:
        found["post_processor"] = None
    return found


def assert_alike(one: Path, other: Path, room: float = 0) -> None:
    """Two bundles say the same of their model, and compute the same bits, or nearly."""
    manifests = [
        Manifest.model_validate_json((each / "maskdial.json").read_text()) for each in (one, other)
    ]
    measured = {"parity", "quality", "golden", "tool_versions", "files", "batch_invariant"}
    first, second = (each.model_dump(exclude=measured) for each in manifests)
    assert first == second
    assert manifests[0].files.keys() == manifests[1].files.keys()
    for name in manifests[0].files:
        if name.endswith(".json"):
            assert content(one / name) == content(other / name)
        elif not name.startswith(GRAPH):
            assert (one / name).read_text() == (other / name).read_text()
    assert_same_bits(one, other, room)


def assert_same_bits(one: Path, other: Path, room: float = 0) -> None:
    """Two bundles compute the same, with kernels and without; or nearly, if there is room."""
    manifest = Manifest.model_validate_json((one / "maskdial.json").read_text())
    for kernels in dict.fromkeys([None, kernels_here()]):
        pairs = zip(*(logits(each, manifest, kernels) for each in (one, other)), strict=True)
        for left, right in pairs:
            np.testing.assert_allclose(left, right, rtol=0, atol=room)


def room_of(name: str, precision: str) -> float:
    """How far logits of Gemma 3n and 4 may be from a trace's, which has norms and rotations written
    out, and the table of layers' inputs in float32: a last bit may round an activation to another
    integer."""
    if not name.startswith(("gemma3n", "gemma4")):
        return 0
    return 2e-5 if precision == "fp32" else 0.2


def traced(source: Path, dest: Path, **options: Any) -> Manifest:
    gate = Gate() if options.get("precision") == "fp32" else Gate(max_loss=math.inf, keep_worst=0)
    return export(str(source), dest, gate=gate, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_integers_of_a_file_give_the_bits_of_a_trace(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(name, path, quantize=TYPES)
    written = direct(path, tmp_path / "direct")
    assert written.precision == "int4"
    assert written.parity.reference == "numpy"
    assert written.golden.centered
    traced(path, tmp_path / "traced")
    assert_alike(tmp_path / "direct", tmp_path / "traced", room_of(name, "int4"))


@pytest.mark.parametrize("name", FAMILIES)
def test_floats_of_a_file_give_the_bits_of_a_trace(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(name, path)
    direct(path, tmp_path / "direct", precision="fp32")
    traced(path, tmp_path / "traced", precision="fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced", room_of(name, "fp32"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_files_of_one_type_in_other_precisions(kind: str, precision: str, tmp_path: Path) -> None:
    """Tied tables of nibbles and of minima among them."""
    path = tmp_path / "model.gguf"
    write("llama-bias", path, quantize={"weight": kind})
    direct(path, tmp_path / "direct", precision=precision)
    traced(path, tmp_path / "traced", precision=precision)
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def test_integers_of_gpt2_are_kept(tmp_path: Path) -> None:
    """A trace rounds them anew, as torch has their matrices the other way round. In float32 both
    are what the integers stand for."""
    path = tmp_path / "model.gguf"
    write("gpt2", path, quantize=TYPES)
    with (tmp_path / "said").open("w") as file:
        written = export_direct(
            str(path), tmp_path / "a", tolerance=TOLERANCE, console=Console(file=file, width=200)
        )
    assert written.precision == "int4"
    assert "9 of 9 layers keep the integers of the file" in (tmp_path / "said").read_text()
    direct(path, tmp_path / "direct", precision="fp32")
    traced(path, tmp_path / "traced", precision="fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def test_a_checkpoint_of_the_class_without_an_output_layer(tmp_path: Path) -> None:
    """As GPT-2's own, which has its causal masks, too."""
    folder = save_folder("gpt2", tmp_path / "checkpoint")
    plain = direct(folder, tmp_path / "plain", precision="fp32")
    file = folder / "model.safetensors"
    inner = {name.removeprefix("transformer."): each for name, each in load_file(file).items()}
    inner["h.0.attn.bias"] = np.ones((1, 1, 128, 128), np.float32)
    save_file(inner, file)
    assert direct(folder, tmp_path / "inner", precision="fp32").golden == plain.golden


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_table_of_nibbles_is_looked_up(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write("llama-bias", path, quantize={"weight": kind})
    assert direct(path, tmp_path / "direct").precision == "int4"
    traced(path, tmp_path / "traced")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def save_folder(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint as transformers saves it, with the tokenizer of the tests' GGUF files."""
    architecture, settings = FOLDERS[name]
    make_model(architecture, **settings).to(dtype).save_pretrained(folder)
    made = folder / "made"
    made.mkdir()
    write("llama", made / "model.gguf")
    write_settings(read_contents([made / "model.gguf"]), made)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.move(made / file, folder / file)
    shutil.rmtree(made)
    return folder


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_give_the_bits_of_a_trace(name: str, precision: str, tmp_path: Path) -> None:
    dtype = {"llama": torch.bfloat16, "qwen2": torch.float16}.get(name, torch.float32)
    folder = save_folder(name, tmp_path / "checkpoint", dtype)
    written = direct(folder, tmp_path / "direct", precision=precision)
    assert written.source == "checkpoint"
    other = traced(folder, tmp_path / "traced", precision=precision)
    assert_alike(tmp_path / "direct", tmp_path / "traced", room_of(name, precision))
    if written.quality is None or other.quality is None:
        assert precision == "fp32"
        return
    assert written.quality.positions == other.quality.positions
    if room_of(name, precision):
        return
    for figure, value in other.quality.figures.items():
        tolerance = 2e-3 if figure == "top1_agreement" else 1e-3 * value + 1e-7  # float32
        assert abs(written.quality.figures[figure] - value) <= tolerance, figure


def test_integers_of_gemma_4_are_those_of_a_trace(tmp_path: Path) -> None:
    """Of its matrices; the table of layers' inputs is rounded, which a trace leaves as it is."""
    folder = save_folder("gemma4", tmp_path / "checkpoint")
    written = direct(folder, tmp_path / "direct", precision="int8")
    traced(folder, tmp_path / "traced", precision="int8")
    graphs = [onnx.load(tmp_path / name / GRAPH).graph for name in ("direct", "traced")]
    ours, theirs = (
        {each.name: numpy_helper.to_array(each) for each in graph.initializer} for graph in graphs
    )
    integers = [name for name in theirs if name.endswith(".int8")]
    assert len(integers) == 4 * 7 + 2 * 2 + 2
    for name in integers:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert ours["model.embed_tokens_per_layer.int8"].shape == (258 + 4, 4, 32)
    assert written.quality is not None
    assert written.quality.loss < 0.1


def test_layer_norms_give_what_transformers_computes(tmp_path: Path) -> None:
    """Learned positions, attention and MLP side by side in both ways, layers without positions."""
    ids = np.arange(40) * 7 % 258
    for name in ("gpt2", "phi", "cohere2"):
        folder = save_folder(name, tmp_path / name)
        manifest = direct(folder, tmp_path / f"{name}-bundle", precision="fp32")
        assert manifest.kv is not None
        graph = Loaded(tmp_path / f"{name}-bundle" / GRAPH)
        found = CausalSession(graph, manifest.kv, slots=1, room=64).run(0, [ids])[0]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", DIRECT_MODELS)
def test_files_that_cannot_be_traced_give_the_bits_of_their_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """The checkpoint is compared with its trace above.

    A file of Mamba 2 has decays in place of their logarithms, which costs them their last bit.
    """
    room = {"fp32": 1e-5, "int8": 0.02} if "hybrid" in name else {}
    path = tmp_path / "model.gguf"
    write(name, path)
    with pytest.raises(ExportError, match="is written directly, and cannot be traced; leave out"):
        traced(path, tmp_path / "traced")
    folder = save_folder(name, tmp_path / "checkpoint")
    for precision in ("fp32", "int8"):
        for source in (path, folder):
            direct(source, tmp_path / f"{precision}-{source.name}", precision=precision)
        assert_same_bits(
            tmp_path / f"{precision}-model.gguf",
            tmp_path / f"{precision}-checkpoint",
            room.get(precision, 0),
        )


def test_mxfp4_of_a_folder_is_kept(tmp_path: Path) -> None:
    """gpt-oss's own form: integers and scales of all experts, rows of gate and up in turns.

    In float32 it is the checkpoint that it stands for, to the last bit, and its integers are those
    of a GGUF file of it.
    """
    plain = save_folder("gpt-oss", tmp_path / "plain")
    packed = shutil.copytree(plain, tmp_path / "packed")
    tensors = load_file(plain / "model.safetensors")
    kind = gguf.GGMLQuantizationType.MXFP4
    for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
        rows = tensors.pop(name).swapaxes(1, 2)
        blocks = gguf.quants.quantize(np.ascontiguousarray(rows), kind)
        values = gguf.quants.dequantize(blocks, kind)
        tensors[f"{name}_plain"] = np.ascontiguousarray(values.swapaxes(1, 2))
        blocks = blocks.reshape(*rows.shape[:2], -1, 17)
        low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
        nibbles = np.concatenate([low, high], axis=-1)
        tensors[f"{name}_blocks"] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
        tensors[f"{name}_scales"] = np.ascontiguousarray(blocks[..., 0])
    ends = ("_blocks", "_scales")
    whole = {
        name.removesuffix("_plain"): each
        for name, each in tensors.items()
        if not name.endswith(ends)
    }
    save_file(whole, plain / "model.safetensors")
    integers = {name: each for name, each in tensors.items() if not name.endswith("_plain")}
    save_file(integers, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    for folder in (plain, packed):
        direct(folder, tmp_path / f"{folder.name}-fp32", precision="fp32")
    assert_same_bits(tmp_path / "plain-fp32", tmp_path / "packed-fp32")
    kept = dict.fromkeys(["exps.weight"], "MXFP4")
    write("gpt-oss", tmp_path / "model.gguf", quantize=kept)
    assert direct(packed, tmp_path / "packed-int8").precision == "int8"
    direct(tmp_path / "model.gguf", tmp_path / "gguf-int8")
    assert_same_bits(tmp_path / "packed-int8", tmp_path / "gguf-int8")
    bytes_of = whole | {"model.norm.weight": np.ones(64, np.uint8)}
    save_file(bytes_of, plain / "model.safetensors")
    with pytest.raises(NotDirectError, match=r"model.norm.weight of .* is of the type U8"):
        direct(plain, tmp_path / "bytes")
    experts = tensors["model.layers.0.mlp.experts.down_proj_scales"]
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = experts[:, :-1]
    integers = {name: each for name, each in tensors.items() if not name.endswith("_plain")}
    save_file(integers, packed / "model.safetensors")
    with pytest.raises(ExportError, match=r"down_proj.* has the shape .* does not fit"):
        direct(packed, tmp_path / "damaged")


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("size", [[16, 16], None])
def test_fp8_of_a_folder_gives_the_bits_of_a_trace(
    size: list[int] | None, precision: str, tmp_path: Path
) -> None:
    """DeepSeek 3's own form; some blocks are cut by the edges of matrices."""
    folder = save_folder("deepseek3", tmp_path / "checkpoint")
    weights = torch_files.load_file(folder / "model.safetensors")
    for name in [name for name in weights if "_proj" in name and weights[name].ndim == 2]:
        parts = to_fp8(weights.pop(name), bool(size))
        module = name.removesuffix("weight")
        weights |= {f"{module}{part}": each for part, each in parts.items()}
    torch_files.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings | {"weight_block_size": size}
    (folder / "config.json").write_text(json.dumps(config))
    direct(folder, tmp_path / "direct", precision=precision)
    traced(folder, tmp_path / "traced", precision=precision)
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def test_layers_in_fp8_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Also where torch is installed; in floats, the tracer makes a draft of them."""
    folder = save_folder("deepseek3", tmp_path / "checkpoint")
    weights = torch_files.load_file(folder / "model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    torch_files.save_file(weights, folder / "model.safetensors")
    with pytest.raises(NotDirectError, match=r"leaves out the layers of .* that predict further"):
        direct(folder, tmp_path / "floats", precision="fp32", complete=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    direct(folder, tmp_path / "fp8", precision="fp32", complete=True)


def test_fp8_that_is_damaged_or_not_known_is_refused(tmp_path: Path) -> None:
    folder = save_folder("llama", tmp_path / "checkpoint")
    weights = torch_files.load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    config = json.loads((folder / "config.json").read_text())

    def refused(why: str, *, factors: tuple[int, ...] | None = None, **settings: Any) -> None:
        named = {} if factors is None else {f"{name}_scale_inv": torch.ones(factors)}
        torch_files.save_file(weights | named, folder / "model.safetensors")
        stored = {"quant_method": "fp8", "weight_block_size": [16, 16]} | settings
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
        with pytest.raises(ExportError, match=why):
            direct(folder, tmp_path / "bundle", precision="fp32")

    refused(r"up_proj.weight of .* is damaged: it has no .*up_proj.weight_scale_inv")
    refused(r"it has factors of the shape \(6, 3\)", factors=(6, 3))
    refused(r"it has factors of the shape \(5, 4\)", factors=(5, 4))
    refused(r"it has factors of the shape \(6, 4\)", factors=(6, 4), weight_block_size=None)
    refused(r"it has factors of the shape \(6, 4\)", factors=(6, 4), weight_block_size=[32, 16])
    refused("quantization_config.weight_block_size", weight_block_size=[16, 0])
    refused("quantization_config.fmt 'e5m2' in config.json is not known", fmt="e5m2")
    refused("quantization_config.new_kind 1 in config.json is not known", new_kind=1)
    refused("quantization_config .* in config.json is not known", quant_method="fp6")
    weights[name] = weights[name].float()
    refused("1 weights that are not known .*up_proj.weight_scale_inv", factors=(6, 4))


def test_parts_of_matrices_are_written_as_wholes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("integers", "floats"):
        path = tmp_path / f"{kind}.gguf"
        write("llama", path, quantize=TYPES if kind == "integers" else None)
        whole = direct(path, tmp_path / f"{kind}-whole")
        with monkeypatch.context() as patched:
            patched.setattr(weights_module, "_CHUNK", 1000)
            parts = direct(path, tmp_path / f"{kind}-parts")
        assert parts.files == whole.files


def test_a_file_in_parts(tmp_path: Path) -> None:
    write("llama", tmp_path / "whole.gguf", quantize=TYPES)
    (tmp_path / "parts").mkdir()
    write("llama", tmp_path / "parts" / "model.gguf", quantize=TYPES, max_tensors=9)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 3
    whole = direct(tmp_path / "whole.gguf", tmp_path / "a")
    for source, name in ((parts[1], "b"), (tmp_path / "parts", "c")):
        found = direct(source, tmp_path / name)
        assert found.source == parts[0].name
        assert found.golden == whole.golden


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "onnxscript", "onnx_ir"}:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocked())
from maskdial.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_blocked(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`maskdial` in a process that cannot import torch."""
    command = [sys.executable, "-c", BLOCKED, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def unknown_folder(folder: Path) -> Path:
    """A checkpoint that says what the direct path does not know."""
    save_folder("llama", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "foo_scaling": 2}), encoding="utf-8")
    return folder


def test_it_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write("llama", path, quantize=TYPES)
    done = run_blocked("export", path, tmp_path / "bundle")
    assert done.returncode == 0, done.stderr
    assert "written directly from the file, without torch" in done.stderr
    assert (tmp_path / "bundle" / GRAPH).is_file()
    save_folder("mistral", tmp_path / "folder")
    done = run_blocked("export", tmp_path / "folder", tmp_path / "other", "--precision", "int8")
    assert done.returncode == 0, done.stderr
    done = run_blocked("export", unknown_folder(tmp_path / "new"), tmp_path / "third")
    assert done.returncode == 1
    assert "foo_scaling 2 in config.json is not known to the direct path" in done.stderr
    assert "install torch and transformers: " in done.stderr
    assert "pip install" in done.stderr
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}),
        ("qwen3-moe", {"num_experts_per_tok": 5}),
        ("qwen3-moe", {"num_experts": 3}),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "new": 1}}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"attention_bias": "yes"}),
        ("llama", {"num_experts": 4}),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("llama", {"head_dim": 24}),
        ("llama", {"rms_norm_eps": None}),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}),
        ("qwen2", {"layer_types": None}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma3", {"hidden_activation": "gelu"}),
        ("gemma3", {"attn_logit_softcapping": -1.0}),
        ("gemma3n", {"altup_active_idx": 1}),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 4}),
        ("gemma3n", {"intermediate_size": [96] * 3}),
        ("gemma4", {"use_bidirectional_attention": "all"}),
        ("gemma4", {"num_kv_shared_layers": 3}),
        ("gemma4", {"num_kv_shared_layers": -1}),
        ("gemma4", {"per_layer_config": {"1": {"hidden_size": 32}}}),
        ("gemma4", {"per_layer_config": {"4": {"head_dim": 32}}}),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}}}),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        ("gemma4", {"hidden_size_per_layer_input": -1}),
        ("gemma4", {"rope_parameters": GEMMA4_STILL}),
        ("gemma4-keys", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3n", {"altup_num_inputs": 10**9}),
        ("gemma3", {"num_hidden_layers": 10**9}),
        ("deepseek3", {"n_routed_experts": 10**9}),
        ("nemotron-h-moe", {"n_routed_experts": 2**31 - 1}),
        ("falcon-h1", {"mamba_conv_bias": None}),
        ("falcon-h1", {"projectors_bias": None}),
        ("gemma4-moe", {"top_k_experts": 5}),
        ("phi3", {"model_type": "phi4"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"activation_function": "relu"}),
        ("phi", {"qk_layernorm": True}),
        ("cohere", {"use_qk_norm": True}),
        ("cohere2", {"layer_switch": 3}),
        ("cohere2", {"use_parallel_block": False}),
    ],
)
def test_what_is_not_known_is_an_error(name: str, entry: dict[str, Any]) -> None:
    architecture, settings = FOLDERS[name]
    config = json.loads(make_model(architecture, **settings).config.to_json_string(use_diff=False))
    config |= {"architectures": [architecture]}
    read_decoder("mine", config)
    key = next(iter(entry))
    told = f"({key}|num_experts|use_sliding).*(not known|cannot go on)|heads of (24|32)"
    with pytest.raises(NotDirectError, match=told):
        read_decoder("mine", config | entry)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("gpt-oss", {"experts_per_token": 2, "initial_context_length": 4096}),
        (
            "qwen3-next",
            {"full_attention_interval": 4, "use_sliding_window": False, "rope_scaling": None},
        ),
        (
            "qwen3.5",
            {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": []}
            | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        ),
        (
            "lfm2",
            {"block_dim": 64, "block_ff_dim": 96, "block_use_swiglu": True, "block_norm_eps": 1e-5}
            | {"conv_dim": 64, "num_heads": 4, "use_pos_enc": True, "theta": 1e6},
        ),
        (
            "granite-hybrid",
            {"init_method": "mup", "normalization_function": "rmsnorm", "logits_to_keep": 1}
            | {"rope_scaling": None},
        ),
        ("glm4-moe", {"num_nextn_predict_layers": 1}),
    ],
)
def test_entries_of_released_models_are_known(name: str, entries: dict[str, Any]) -> None:
    """Beside those that transformers writes today."""
    architecture, settings = FOLDERS[name]
    config = make_model(architecture, **settings).config.to_dict()
    read_decoder("mine", config | entries)


@pytest.mark.parametrize("kind", ["small", "keys", "experts"])
def test_gemma_4_as_it_is_released(kind: str) -> None:
    """With heads in entries of their own, which transformers rewrites: the same weights."""
    text: dict[str, Any] = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "vocab_size": 300,
        "vocab_size_per_layer_input": 300,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "expert_intermediate_size": None,
        "final_logit_softcapping": 30.0,
    }
    if kind == "small":
        text |= {"num_kv_shared_layers": 5, "use_double_wide_mlp": True}
    else:
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
        text["hidden_size_per_layer_input"] = 0
    if kind == "experts":
        text |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        text["moe_intermediate_size"] = 32
    whole: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {},
        "audio_config": None,
        "vision_soft_tokens_per_image": 280,
        "image_token_id": 258,
        "boa_token_id": 200,
        "eoa_token_index": 201,
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
    }
    part = text_part(whole)
    assert part is not None
    assert part.media_tokens == (200, 201, 258)
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**text))
    expected = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    del expected["lm_head.weight"]
    found = {
        name: shape
        for name, shape in read_decoder("mine", part.config).shapes().items()
        if ".experts." not in name
    }
    assert found == {name: shape for name, shape in expected.items() if ".experts." not in name}


def test_the_text_part_of_gemma_3n(tmp_path: Path) -> None:
    """Whose towers need packages that text does not."""
    folder = save_folder("gemma3n", tmp_path / "checkpoint")
    plain = direct(folder, tmp_path / "plain", precision="fp32")
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": config,
        "vision_config": {},
        "audio_config": {},
        "audio_soft_tokens_per_image": 188,
        "image_token_id": 5,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    inner = {
        name.replace("model.", "model.language_model.", 1): each
        for name, each in load_file(file).items()
    }
    towers = {"model.embed_audio.embedding.weight": np.ones((4, 4), np.float32)}
    save_file(inner | towers, file)
    written = direct(folder, tmp_path / "whole", precision="fp32")
    assert written.golden == plain.golden
    assert written.media_tokens == (5,)
    assert len(written.left_out) == 4


def test_gemma_3_says_little_of_its_text_part() -> None:
    """Of its first files, which transformers 4 wrote: all else are defaults of the class."""
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
    }
    whole |= {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144}
    whole |= {"eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    part = text_part(whole)
    assert part is not None
    theirs = transformers.Gemma3Config(**whole).text_config
    ours = read_decoder("mine", part.config)
    with torch.device("meta"):
        model = transformers.Gemma3TextModel(theirs)
    assert ours.num_parameters == sum(each.numel() for each in model.parameters())
    assert (ours.max_length, ours.tied, ours.num_heads) == (131072, True, 8)
    assert part.media_tokens == (255999, 256000, 262144)
    assert part.config["eos_token_id"] == [1, 106]
    with pytest.raises(NotDirectError, match=r"new_entry in config.json is not known"):
        text_part(whole | {"new_entry": 1})
    with pytest.raises(NotDirectError, match="around a text model 'llama' is not known"):
        text_part(whole | {"text_config": text | {"model_type": "llama"}})


def test_graphs_whose_memory_is_not_planned_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write("qwen3-moe", path, quantize=TYPES)
    manifest = direct(path, tmp_path / "bundle")
    planned = logits(tmp_path / "bundle", manifest, kernels_here())
    monkeypatch.setattr(session_module, "LARGE_GRAPH", 0)
    for one, other in zip(
        planned, logits(tmp_path / "bundle", manifest, kernels_here()), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """They are left out, but where the tracer, which exports them, could be asked."""
    folder = save_folder("qwen3.5", tmp_path / "folder")
    direct(folder, tmp_path / "without", precision="fp32")
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = np.ones((64, 128), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(NotDirectError, match=r"leaves out the layers of .* that predict further"):
        direct(folder, tmp_path / "with", precision="fp32", complete=True)
    direct(folder, tmp_path / "with", precision="fp32")
    assert_same_bits(tmp_path / "without", tmp_path / "with")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
        YARN | {"original_max_position_embeddings": 512},
        YARN | {"factor": 16.0, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 0.5},
        YARN | {"factor": 4.0, "truncate": False, "attention_factor": 1.5},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 4096},
        LONGROPE | {"short_factor": [1.0 + i for i in range(32)], "long_factor": [4.0] * 32},
    ],
)
def test_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """To the last bit but one of each frequency."""
    entries = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
    }
    theirs = AutoConfig.for_model("llama", **entries)
    found = read_rotary(Config(entries), 64)
    if rope["rope_type"] == "default":
        size = int(64 * rope.get("partial_rotary_factor", 1))
        places = torch.arange(0, size, 2).float() / size
        expected, scale = 1.0 / (rope["rope_theta"] ** places), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    np.testing.assert_array_max_ulp(found.frequencies, expected.numpy(), 1)
    assert found.scale == pytest.approx(scale)
    assert Config(entries)


class Exchanged:
    """Weights of which some stand in the place of others."""

    def __init__(self, weights: Weights, left: str, right: str) -> None:
        self.name = weights.name
        self._weights = weights
        self._names = {left: right, right: left}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes()

    def values(self, name: str, rows: slice | None = None) -> Floats:
        return self._weights.values(self._names.get(name, name), rows)

    def bits(self, name: str) -> int | None:
        return self._weights.bits(self._names.get(name, name))

    def blocks(self, name: str, rows: slice | None = None) -> Any:
        return self._weights.blocks(self._names.get(name, name), rows)


class Damaged:
    """Weights of which one has other values, by what ``change`` does to them."""

    def __init__(self, weights: Weights, damaged: str, change: Callable[[Floats], Floats]) -> None:
        self.name = weights.name
        self._weights = weights
        self._damaged = damaged
        self._change = change

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes()

    def values(self, name: str, rows: slice | None = None) -> Floats:
        values = self._weights.values(name, rows)
        return self._change(values.copy()) if name == self._damaged else values

    def bits(self, name: str) -> int | None:
        return self._weights.bits(name)

    def blocks(self, name: str, rows: slice | None = None) -> Any:
        return self._weights.blocks(name, rows)


def exchanged_rows(values: Floats) -> Floats:
    values[[3, 4]] = values[[4, 3]]
    return values


def scaled_block(values: Floats) -> Floats:
    values[5, 32:64] *= np.float32(1.5)
    return values


L0, L1 = "model.layers.0", "model.layers.1"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (f"{L0}.mlp.gate_proj.weight", f"{L0}.mlp.up_proj.weight"),
        (f"{L0}.self_attn.k_proj.weight", f"{L0}.self_attn.v_proj.weight"),
        (f"{L0}.self_attn.o_proj.bias", f"{L1}.self_attn.o_proj.bias"),
        (f"{L0}.input_layernorm.weight", f"{L0}.post_attention_layernorm.weight"),
        ("model.norm.weight", f"{L1}.input_layernorm.weight"),
        (f"{L0}.mlp.down_proj.weight", f"{L1}.mlp.down_proj.weight"),
    ],
)
def test_a_wrong_weight_does_not_pass(
    left: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write("llama-bias", path, quantize=TYPES)

    def exchanged(config: Mapping[str, Any], weights: Weights) -> Reference:
        return make_reference(config, Exchanged(weights, left, right))

    monkeypatch.setattr(direct_module, "make_reference", exchanged)
    with pytest.raises(ExportError, match="the graph and the reference disagree on a ragged batch"):
        direct(path, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("change", [exchanged_rows, scaled_block])
@pytest.mark.parametrize(
    "name",
    [
        f"{L1}.self_attn.q_proj.weight",
        f"{L0}.self_attn.v_proj.weight",
        f"{L1}.mlp.up_proj.weight",
        f"{L1}.mlp.down_proj.weight",
    ],
)
def test_a_wrong_row_or_block_does_not_pass(
    name: str,
    change: Callable[[Floats], Floats],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even one block of one row."""
    path = tmp_path / "model.gguf"
    write("llama-bias", path, quantize=TYPES)

    def damaged(config: Mapping[str, Any], weights: Weights) -> Reference:
        return Reference(config, Damaged(weights, name, change))

    monkeypatch.setattr(direct_module, "make_reference", damaged)
    with pytest.raises(ExportError, match="the graph and the reference disagree on a ragged batch"):
        direct(path, tmp_path / "bundle")


@pytest.mark.skipif(kernels_here() is None, reason="the kernels are not built")
def test_a_type_that_is_read_wrongly_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, which read it for the graph and for the reference."""
    path = tmp_path / "model.gguf"
    write("llama", path, quantize=TYPES)
    unpack, restore = StoredBlockKernels.unpack, StoredBlockKernels.restore

    def other_unpack(self: StoredBlockKernels, *arguments: Any) -> bool:
        known = unpack(self, *arguments)
        arguments[3][...] *= np.float32(1.001)
        return known

    def other_restore(self: StoredBlockKernels, *arguments: Any) -> bool:
        known = restore(self, *arguments)
        arguments[2][...] *= np.float32(1.001)
        return known

    monkeypatch.setattr(StoredBlockKernels, "unpack", other_unpack)
    monkeypatch.setattr(StoredBlockKernels, "restore", other_restore)
    with pytest.raises(ExportError, match="other numbers than the gguf package reads"):
        direct(path, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
        ("granite", {"residual_multiplier": 0.6}),
        ("granite", {"attention_multiplier": 0.2}),
        ("granite", {"logits_scaling": 2.1}),
        ("gemma2", {"attn_logit_softcapping": 2.0}),
        ("gemma2", {"final_logit_softcapping": 20.0}),
        ("gemma3", {"sliding_window": 8}),
        ("gemma3", {"query_pre_attn_scalar": 20}),
        ("smollm3", {"no_rope_layer_interval": 3}),
        ("gpt-oss", {"swiglu_alpha": 1.5}),
        ("gpt-oss", {"sliding_window": 8}),
        ("qwen3.5", {"rms_norm_eps": 1e-2}),
        ("lfm2-moe", {"routed_scaling_factor": 1.2}),
        ("granite-hybrid", {"time_step_limit": [0.0, 0.5]}),
        ("glm4-moe", {"routed_scaling_factor": 1.0}),
        ("olmo3", {"sliding_window": 8}),
        ("deepseek2", {"topk_method": "greedy"}),
        ("falcon-h1", {"key_multiplier": 1.5}),
        ("falcon-h1", {"ssm_multipliers": [1, 1, 1, 1, 1.2]}),
        ("nemotron-h", {"time_step_min": 0.5}),
        ("nemotron-h-moe", {"routed_scaling_factor": 1.2}),
        ("deepseek3", {"topk_group": 1}),
        ("deepseek3", {"rope_parameters": MSCALE | {"mscale_all_dim": 0.5}}),
        ("minicpm3", {"scale_depth": 1.0}),
        ("minicpm3", {"dim_model_base": 64}),
        ("gemma3n", {"altup_correct_scale": False}),
        ("gemma3n", {"activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0]}),
        ("gemma4", {"sliding_window": 8}),
        ("gemma4", {"final_logit_softcapping": 20.0}),
        ("gemma4-moe", {"top_k_experts": 1}),
        ("gpt2", {"layer_norm_epsilon": 1e-2}),
        ("gpt2", {"scale_attn_weights": False}),
        ("starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    ],
)
def test_a_wrong_setting_does_not_pass(
    name: str, entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write(name, path)

    def other(config: Mapping[str, Any], weights: Weights) -> Reference:
        return make_reference({**config, **entry}, weights)

    monkeypatch.setattr(direct_module, "make_reference", other)
    with pytest.raises(ExportError, match="the graph and the reference disagree"):
        direct(path, tmp_path / "bundle", precision="fp32")


@pytest.mark.parametrize("quantize", [None, TYPES], ids=["floats", "integers"])
@pytest.mark.parametrize(
    ("name", "entry"),
    [("granite", {"logits_scaling": 2.1}), ("gemma2", {"final_logit_softcapping": 3.0})],
)
def test_a_wrong_output_layer_does_not_pass_where_logits_are_rounded(
    name: str,
    entry: dict[str, Any],
    quantize: dict[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "model.gguf"
    write(name, path, quantize=quantize)
    gate = Gate() if quantize else Gate(max_loss=math.inf)
    right = direct(path, tmp_path / "right", gate=gate)
    assert right.precision == ("int4" if quantize else "int8")

    def other(config: Mapping[str, Any], weights: Weights) -> Reference:
        return make_reference({**config, **entry}, weights)

    monkeypatch.setattr(direct_module, "make_reference", other)
    with pytest.raises(NotDirectError, match=r"disagree on the scale of the logits: .* as large"):
        direct(path, tmp_path / "wrong", gate=gate)


def test_a_graph_that_is_served_as_another_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output layer's product is not part of the comparison in floats."""
    path = tmp_path / "model.gguf"
    write("llama", path, quantize=TYPES)
    monkeypatch.setattr(check_module, "_MAX_DIVERGENCE", 1e-9)
    with pytest.raises(NotDirectError, match=r"the integers diverge by \S+ nats from float32"):
        direct(path, tmp_path / "bundle")


def edited(path: Path, name: str, *, shape: tuple[int, ...] | None) -> None:
    """Writes a file anew without a tensor, or with one of another shape."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = tensor.data
        if tensor.name == name:
            if shape is None:
                continue
            values = np.ones(shape, np.float32)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write("llama", path)
    whole = path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(ExportError, match=message):
            direct(path, tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()

    edited(path, "blk.1.ffn_up.weight", shape=None)
    refused(r"lacks 1 of the 21 weights that .* such as model.layers.1.mlp.up_proj.weight")
    path.write_bytes(whole)
    edited(path, "blk.0.ffn_up.weight", shape=(96, 32))
    refused(r"model.layers.0.mlp.up_proj.weight of .* has the shape \(96, 32\), and")
    path.write_bytes(whole[: len(whole) - 1000])
    refused("is incomplete or damaged: the tensor")
    path.write_bytes(whole[:3000])
    refused("is incomplete or damaged|is damaged")
    path.write_bytes(whole.replace(b"llama", b"lLama"))
    refused("has the architecture 'lLama', which is not supported as GGUF")
    write_with("llama", path, lambda writer: writer.add_type("mmproj"))
    refused("is no model, but a GGUF of the type 'mmproj'")
    path.write_bytes(b"PK" + whole[2:])
    refused("is not a GGUF file")


HEADERS = {
    "deep": b"[" * 100_000,
    "no object": b"[]",
    "an entry without fields": b'{"a": 3}',
    "an infinite shape": b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
    "a negative shape": b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "negative offsets": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    "offsets beyond the end": b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
    "a huge shape": b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_hostile_headers_of_safetensors_are_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ExportError, match=r"is damaged|is incomplete or damaged"):
        SafetensorsWeights("a", [file])


def test_damaged_safetensors_end_in_a_sentence(tmp_path: Path) -> None:
    folder = save_folder("llama", tmp_path / "folder")
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(0, size, random.integers(1, 4)):
            damaged[place] = random.integers(256)
        cut = len(whole) if random.random() < 0.7 else random.integers(len(whole))
        file.write_bytes(damaged[:cut])
        try:
            SafetensorsWeights("a", [file])
        except ExportError:
            refused += 1
    assert refused > 200


def test_folders_that_say_more_are_left_to_the_tracer(tmp_path: Path) -> None:
    folder = save_folder("mistral", tmp_path / "folder")

    def refused(message: str) -> None:
        with pytest.raises(NotDirectError, match=message):
            direct(folder, tmp_path / "bundle", precision="int8")

    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for entry, message in (
        ({"add_prefix_space": True}, "add_prefix_space True in tokenizer_config.json"),
        ({"pad_token": "<new>"}, "names '<new>', which tokenizer.json lacks"),
        ({"added_tokens_decoder": {"259": {"content": "<other>"}}}, "differ in"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | entry))
        refused(message)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "decision.json").write_text("{}")
    refused("decision.json of .* is not known to the direct path")
    (folder / "decision.json").unlink()
    with pytest.raises(NotDirectError, match="does not round to int4"):
        direct(folder, tmp_path / "bundle", precision="int4")
    with pytest.raises(ExportError, match="reads at most 128 tokens, fewer than --max-length 500"):
        direct(folder, tmp_path / "bundle", max_length=500)
    assert direct(folder, tmp_path / "bundle", max_length=50).max_length == 50


def test_the_route_is_the_direct_one_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write("llama", path, quantize=TYPES)
    calls: list[str] = []

    manifest = export_any_way(str(path), tmp_path / "a")
    assert manifest.parity.reference == "numpy"

    def tracer(source: str, dest: Path, **options: Any) -> Manifest:
        calls.append(source)
        return manifest

    monkeypatch.setattr(route, "load_tracer", lambda: tracer)
    asked: tuple[dict[str, Any], ...] = (
        {"trace": True},
        {"mask": "both"},
        {"adapter": tmp_path},
        {"strict": False},
        {"gate": Gate(max_loss=0.1)},
        {"precision": "fp16"},
    )
    for options in asked:
        assert export_any_way(str(path), tmp_path / "b", **options) is manifest
    assert calls == [str(path)] * 6
    unknown = str(unknown_folder(tmp_path / "unknown"))
    assert export_any_way(unknown, tmp_path / "b") is manifest
    assert calls[6:] == [unknown]
    folder, floats = str(save_folder("llama", tmp_path / "folder")), tmp_path / "floats.gguf"
    write("llama", floats)
    for number, each in enumerate((folder, str(floats))):
        found = export_any_way(each, tmp_path / f"floats{number}")
        assert (found.precision, found.parity.reference) == ("int8", "numpy")
        assert found.quality is not None
        assert 0 < found.quality.loss < 0.01
    monkeypatch.setattr(route, "_NEEDED", ("no_such_module",))
    with pytest.raises(ExportError, match=r"foo_scaling 2 .* is not known .* pip install"):
        export_any_way(unknown, tmp_path / "b")


@pytest.mark.parametrize(("layers", "hidden", "times"), [(2, 64, 1.0), (32, 4096, 8**0.5)])
def test_the_tolerance_follows_what_is_added_up(layers: int, hidden: int, times: float) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    assert read_decoder("model", config).rounding == pytest.approx(times)
