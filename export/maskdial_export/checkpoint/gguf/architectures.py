"""The models that GGUF files hold: transformers' configuration, from the metadata.

llama.cpp's converter and its own reading of the metadata (``src/models``) are the source of both
the keys and the defaults; transformers' tables lack the rope scaling, the widths of experts, the
caps and scales of Gemma, and all encoders.
"""

from collections.abc import Callable, Mapping

from maskdial_export.checkpoint.gguf import (
    decoders,
    encoders,
    gemma,
    gemma3n,
    gemma4,
    hybrids,
    latent,
    mambas,
)
from maskdial_export.checkpoint.gguf.common import check_unread
from maskdial_export.checkpoint.gguf.model import Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError


def read_model(settings: Settings) -> Model:
    """Describes the model of a file.

    Raises:
        ExportError: the architecture or one of its settings is not supported, or settings are
            missing.
    """
    read = _READERS.get(settings.architecture)
    if read is None:
        raise ExportError(
            f"{settings.file.path} has the architecture {settings.architecture!r}, which is not "
            f"supported as GGUF (these are: {', '.join(sorted(_READERS))}); export the checkpoint "
            "that it was made from"
        )
    model = read(settings)
    check_unread(settings, model)
    return model


_READERS: Mapping[str, Callable[[Settings], Model]] = {
    "bert": encoders.bert,
    "cohere2": decoders.cohere2,
    "command-r": decoders.command_r,
    "deepseek2": latent.deepseek2,
    "eurobert": encoders.eurobert,
    "exaone4": decoders.exaone4,
    "falcon-h1": mambas.falcon_h1,
    "gemma": gemma.gemma,
    "gemma-embedding": gemma.embedding_gemma,
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "gemma3n": gemma3n.gemma3n,
    "gemma4": gemma4.gemma4,
    "gpt2": decoders.gpt2,
    "glm4": decoders.glm4,
    "glm4moe": decoders.glm4_moe,
    "gpt-oss": decoders.gpt_oss,
    "granite": decoders.granite,
    "granitehybrid": hybrids.granite_hybrid,
    "granitemoe": decoders.granite_moe,
    "lfm2": hybrids.lfm2,
    "lfm2moe": hybrids.lfm2_moe,
    "jina-bert-v2": encoders.jina_bert_v2,
    "llama": decoders.llama,
    "minicpm3": latent.minicpm3,
    "mistral3": decoders.mistral3,
    "modern-bert": encoders.modernbert,
    "nemotron_h": mambas.nemotron_h,
    "nemotron_h_moe": mambas.nemotron_h,
    "nomic-bert": encoders.nomic_bert,
    "nomic-bert-moe": encoders.nomic_bert_moe,
    "olmo2": decoders.olmo2,
    "olmoe": decoders.olmoe,
    "phi2": decoders.phi2,
    "phi3": decoders.phi3,
    "qwen2": decoders.qwen2,
    "qwen2moe": decoders.qwen2_moe,
    "qwen3": decoders.qwen3,
    "qwen35": hybrids.qwen35,
    "qwen35moe": hybrids.qwen35_moe,
    "qwen3next": hybrids.qwen3_next,
    "qwen3vl": decoders.qwen3_vl,
    "qwen3vlmoe": decoders.qwen3_vl_moe,
    "qwen3moe": decoders.qwen3_moe,
    "seed_oss": decoders.seed_oss,
    "smollm3": decoders.smollm3,
    "starcoder2": decoders.starcoder2,
}
