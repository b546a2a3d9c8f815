"""The families that are known: what each one's configuration means, by ``model_type``.

Defaults are those of transformers' configuration classes. An entry that no family knows is an
error, and never passed over; see `Config`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Decoder, NotDirectError
from maskdial_export.direct.describe import (
    gemma,
    gemma3n,
    gemma4,
    hybrids,
    latent,
    layer_norms,
    mambas,
    mixtures,
    plain,
)
from maskdial_export.errors import ExportError


@dataclass(frozen=True, slots=True)
class Family:
    """An entry of the table.

    Attributes:
        architecture: transformers' class, which writes.
        read: reads a configuration; its third argument is the limit of a text's tokens, if any.
        token_ids: the special tokens where a configuration names none.
        embeds: whether its classes without the output layer are known, too.
        writes: whether there is one with it; otherwise ``architecture`` is how they all begin.
    """

    architecture: str
    read: Callable[[Config, str, int | None], Decoder]
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    embeds: bool = False
    writes: bool = True

    @property
    def prefix(self) -> str:
        """Of the names of its other classes."""
        found = self.architecture.removesuffix("ForCausalLM")
        return {"Gemma3": "Gemma3Text"}.get(found, found)


def family_of(values: Mapping[str, Any]) -> Family | None:
    """The family of a configuration; None if it is not known."""
    return _FAMILIES.get(str(values.get("model_type")))


def read_decoder(name: str, values: Mapping[str, Any], limit: int | None = None) -> Decoder:
    """The decoder that a configuration describes.

    Args:
        name: of the checkpoint, for errors.
        values: config.json.
        limit: tokens of a text; None for as many as it has positions for, at most `LONGEST`.

    Raises:
        NotDirectError: the family or an entry is not known.
        ExportError: there are fewer positions than the limit.
    """
    kind = str(values.get("model_type"))
    family = family_of(values)
    if family is None or not family.writes:
        known = sorted(name for name, each in _FAMILIES.items() if each.writes)
        raise NotDirectError(
            f"model_type {kind!r} is not known to the direct path (these are: {', '.join(known)})"
        )
    config = Config(values)
    if values.get("architectures") not in ([family.architecture], None):
        config.refuse("architectures")
    found = family.read(config, family.architecture, limit)
    if found.reads_ahead:
        config.refuse("use_bidirectional_attention")
    config.finish()
    if limit is not None and found.max_length < limit:
        raise ExportError(
            f"{name} reads at most {found.max_length} tokens, fewer than --max-length {limit}"
        )
    return found


def architectures() -> frozenset[str]:
    """transformers' classes that are known and write."""
    return frozenset(family.architecture for family in _FAMILIES.values() if family.writes)


def prefixes() -> frozenset[str]:
    """How the names of classes without the output layer begin that are known."""
    return frozenset(
        family.prefix for family in _FAMILIES.values() if family.embeds and family.writes
    )


def token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that a configuration names, with those that its class has by default."""
    family = family_of(values)
    return {**({} if family is None else family.token_ids), **values}


_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_ZERO_IDS = {"bos_token_id": 0, "eos_token_id": 1}
_GEMMA_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_GLM_IDS: Mapping[str, Any] = {
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
}
_YOUTU_IDS = {"bos_token_id": 128000, "eos_token_id": 128001}
_OLMO_IDS = {"pad_token_id": 1, "eos_token_id": 50279}
_LFM_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COHERE_IDS = {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 255001}
_GPT_IDS = {"bos_token_id": 50256, "eos_token_id": 50256}
_FAMILIES: Mapping[str, Family] = {
    "bamba": Family("BambaForCausalLM", mambas.bamba, _LFM_IDS),
    "cohere": Family("CohereForCausalLM", layer_norms.cohere, _COHERE_IDS),
    "cohere2": Family("Cohere2ForCausalLM", layer_norms.cohere2, _COHERE_IDS),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", latent.deepseek_v2, _LLAMA_IDS),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", latent.deepseek_v3, _ZERO_IDS),
    "eurobert": Family(
        "EuroBert",
        plain.llama,
        {"pad_token_id": 128001, "bos_token_id": 128000, "eos_token_id": 128001},
        embeds=True,
        writes=False,
    ),
    "exaone4": Family("Exaone4ForCausalLM", plain.exaone4, {"bos_token_id": 0, "eos_token_id": 2}),
    "falcon_h1": Family("FalconH1ForCausalLM", mambas.falcon_h1, _LFM_IDS),
    "gemma": Family("GemmaForCausalLM", gemma.gemma, _GEMMA_IDS, embeds=True),
    "gemma2": Family("Gemma2ForCausalLM", gemma.gemma2, _GEMMA_IDS, embeds=True),
    "gemma3n_text": Family("Gemma3nForCausalLM", gemma3n.gemma3n, _GEMMA_IDS),
    "gemma4_text": Family("Gemma4ForCausalLM", gemma4.gemma4, _GEMMA_IDS),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma.gemma3, _GEMMA_IDS, embeds=True),
    "glm4": Family("Glm4ForCausalLM", plain.glm4, _GLM_IDS),
    "glm4_moe": Family("Glm4MoeForCausalLM", mixtures.glm4_moe),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", latent.glm4_moe_lite, _ZERO_IDS),
    "gpt2": Family("GPT2LMHeadModel", layer_norms.gpt2, _GPT_IDS),
    "gpt_oss": Family("GptOssForCausalLM", mixtures.gpt_oss),
    "granite": Family("GraniteForCausalLM", plain.granite, _LLAMA_IDS),
    "granitemoe": Family("GraniteMoeForCausalLM", mixtures.granite_moe, _LLAMA_IDS),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", hybrids.granite_hybrid, _LLAMA_IDS),
    "lfm2": Family("Lfm2ForCausalLM", hybrids.lfm2, _LFM_IDS),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", hybrids.lfm2_moe, _LFM_IDS),
    "llama": Family("LlamaForCausalLM", plain.llama, _LLAMA_IDS, embeds=True),
    "minicpm3": Family("MiniCPM3ForCausalLM", latent.minicpm3, _LLAMA_IDS),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        plain.ministral3,
        {"pad_token_id": 11, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mistral": Family("MistralForCausalLM", plain.mistral, _LLAMA_IDS, embeds=True),
    "mixtral": Family("MixtralForCausalLM", mixtures.mixtral, _LLAMA_IDS),
    "nemotron_h": Family("NemotronHForCausalLM", mambas.nemotron_h, _LFM_IDS),
    "neobert": Family("NeoBERT", plain.llama, {"pad_token_id": 0}, embeds=True, writes=False),
    "olmo2": Family("Olmo2ForCausalLM", plain.olmo2, _OLMO_IDS),
    "olmo3": Family("Olmo3ForCausalLM", plain.olmo3, _OLMO_IDS),
    "olmoe": Family("OlmoeForCausalLM", mixtures.olmoe, _OLMO_IDS),
    "phi": Family("PhiForCausalLM", layer_norms.phi, _LLAMA_IDS),
    "phi3": Family(
        "Phi3ForCausalLM",
        plain.phi3,
        {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
    ),
    "qwen2": Family("Qwen2ForCausalLM", plain.qwen2, embeds=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", mixtures.qwen2_moe),
    "qwen3": Family("Qwen3ForCausalLM", plain.qwen3, embeds=True),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", hybrids.qwen3_5_moe),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", hybrids.qwen3_5),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", mixtures.qwen3_moe),
    "qwen3_next": Family("Qwen3NextForCausalLM", hybrids.qwen3_next),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        plain.seed_oss,
        {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", layer_norms.starcoder2, _GPT_IDS),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        plain.smollm3,
        {"pad_token_id": 128004, "bos_token_id": 128000, "eos_token_id": 128001},
    ),
    "youtu": Family("YoutuForCausalLM", latent.youtu, _YOUTU_IDS),
}
