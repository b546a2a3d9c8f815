"""The code that a checkpoint brings, which is never run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sentence import MODULES

# The packages whose modules modules.json may name
_MODULE_PACKAGES = frozenset({"sentence_transformers", "pylate"})
# Classes that their makers gave to transformers, and that their checkpoints still name: by
# model_type. A type whose class others change, as gte-Qwen2 does with Qwen2's, is none of these.
_TAKEN_OVER: Mapping[str, frozenset[str]] = {
    "deepseek_v2": frozenset(
        {"modeling_deepseek.DeepseekV2Model", "modeling_deepseek.DeepseekV2ForCausalLM"}
    ),
    "deepseek_v3": frozenset(
        {"modeling_deepseek.DeepseekV3Model", "modeling_deepseek.DeepseekV3ForCausalLM"}
    ),
    "eurobert": frozenset(
        f"modeling_eurobert.EuroBert{rest}"
        for rest in (
            *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
            "PreTrainedModel",  # what the others inherit from; it computes nothing
        )
    ),
    "minicpm3": frozenset(
        {"modeling_minicpm.MiniCPM3Model", "modeling_minicpm.MiniCPM3ForCausalLM"}
    ),
    "nemotron_h": frozenset({"modeling_nemotron_h.NemotronHForCausalLM"}),
    "phi": frozenset({"modeling_phi.PhiForCausalLM"}),
    "phi3": frozenset({"modeling_phi3.Phi3ForCausalLM"}),
}
_HEADS = (
    *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForMultipleChoice"),
)
# Those that transformers lacks, or has otherwise, and the direct path computes
_DIRECT: Mapping[str, frozenset[str]] = {
    "bert": frozenset(f"modeling_bert.JinaBert{rest}" for rest in _HEADS),
    "neobert": frozenset(
        f"model.NeoBERT{rest}" for rest in ("", "LMHead", "ForSequenceClassification")
    ),
    "new": frozenset(f"modeling.New{rest}" for rest in _HEADS),
    "nomic_bert": frozenset(
        f"modeling_hf_nomic_bert.NomicBert{rest}" for rest in (*_HEADS, "ForPreTraining")
    ),
}


def own_code(
    name: str, path: Path, config: Mapping[str, Any], *, direct: bool = False
) -> str | None:
    """What a checkpoint brings in place of the classes that are known; None if nothing.

    Args:
        name: of the checkpoint, for the sentence.
        path: its folder.
        config: config.json.
        direct: whether those count that the direct path alone computes.

    Returns:
        A sentence that names the first class.
    """
    kind = str(config.get("model_type"))
    ours = _TAKEN_OVER.get(kind, frozenset())
    if direct:
        ours |= _DIRECT.get(kind, frozenset())
    models = [
        each for each in _named_code(config, "AutoModel") if each.rpartition("--")[2] not in ours
    ]
    tokenizers = _named_code(read_json(path / "tokenizer_config.json"), "AutoTokenizer")
    listed = path / MODULES
    modules = re.findall(
        r'"type"\s*:\s*"([^"]+)"',
        listed.read_text(encoding="utf-8", errors="replace") if listed.is_file() else "",
    )
    others = [each for each in modules if each.partition(".")[0] not in _MODULE_PACKAGES]
    for found, file_name in (
        (models, "auto_map in config.json"),
        (tokenizers, "auto_map in tokenizer_config.json"),
        (others, MODULES),
    ):
        if found:
            return f"{name} brings code of its own ({found[0]}, {file_name})"
    return None


def _named_code(settings: Mapping[str, Any], prefix: str) -> list[str]:
    """The classes that ``auto_map`` names for auto classes of a prefix."""
    given = settings.get("auto_map") or {}
    if isinstance(given, list):  # of a tokenizer in an older form
        given = {"AutoTokenizer": given}
    if not isinstance(given, dict):  # what it means is not known, so it counts as code
        return [str(given)]
    found = [each for key, each in given.items() if str(key).startswith(prefix)]
    names = [each if isinstance(each, list) else [each] for each in found]
    return [str(name) for each in names for name in each if name]
