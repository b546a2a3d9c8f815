"""Writes ``docs/supported-models.md``: the architectures that the tests prove.

    make format

A test fails when the page is out of date.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from maskdial_export.direct import backbones, encoders, families, text_parts
from tests.export.zoo import ZOO, Specimen

PAGE = Path(__file__).resolve().parents[1] / "docs" / "supported-models.md"
_INTRODUCTION = """# Supported models

Generated from `tests/export/zoo.py` by `make format`.

`maskdial export` tries every architecture that transformers can load, and compares with torch. \
That comparison ([what is checked](export.md#what-is-checked)) decides for those that are not \
listed.

**Proven with random weights:** all of the tables below, by our tests, with tiny checkpoints. \
Logits equal torch's in ragged batches, and each row has the same bits in every batch, unless a \
table says otherwise. Of `generate` also in chunks and decode steps, and greedy texts equal \
`transformers.generate`. \
`make test` proves those in bold, `make test-zoo` the others.

**Run with published weights:**

| model | architecture | what was done |
|---|---|---|
| SmolLM2-135M-Instruct, GGUF and checkpoint | `LlamaForCausalLM` | losses of each precision, \
speed, chats ([performance](performance.md#what-each-loses)) |
| Gemma 3 270M, GGUF | `Gemma3ForCausalLM` | export both ways, speed \
([export](export.md#two-ways)) |
| all-MiniLM-L6-v2 | `BertModel` | vectors against sentence-transformers, recall of int8 \
([int8](lab/int8.md)) |
| rxnfp's BERTs of reactions | `BertForMaskedLM`, `BertForSequenceClassification` | choices of \
int8 against fp32 ([int8](lab/int8.md)) |
| the starter models | `Qwen3ForCausalLM`, `ModernBertForSequenceClassification` | trained by this \
project, in every test |

## By name

| models | architecture |
|---|---|
"""
_NAMES = {
    "Llama 2 and 3, TinyLlama, Yi, SmolLM2": ("LlamaForCausalLM",),
    "Qwen2, Qwen2.5, Qwen2.5-Coder": ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    "Qwen3-Next, Qwen3.5": ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"),
    "Mistral, Mixtral, Mistral Small 3.1": (
        *("MistralForCausalLM", "MixtralForCausalLM", "Mistral3ForConditionalGeneration"),
    ),
    "Gemma, Gemma 2, Gemma 3": (
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        "Gemma3ForConditionalGeneration",
    ),
    "Phi-2, Phi-3, Phi-4": ("PhiForCausalLM", "Phi3ForCausalLM"),
    "gpt-oss": ("GptOssForCausalLM",),
    "DeepSeek-V2, DeepSeek-V3, DeepSeek-R1": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    "GLM-4, GLM-4.5": ("Glm4ForCausalLM", "Glm4MoeForCausalLM"),
    "Granite 3, Granite 4": ("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"),
    "OLMo 2, OLMo 3, OLMoE": ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"),
    "LFM2": ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    "SmolLM3": ("SmolLM3ForCausalLM",),
    "StarCoder2": ("Starcoder2ForCausalLM",),
    "Command R": ("CohereForCausalLM", "Cohere2ForCausalLM"),
    "GPT-2, OPT, BLOOM, Falcon": (
        *("GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM"),
    ),
    "Mamba, Jamba": ("MambaForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM"),
    "T5, FLAN-T5, mT5": ("T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
    "BART, mBART, Pegasus": (
        *("BartForConditionalGeneration", "MBartForConditionalGeneration"),
        "PegasusForConditionalGeneration",
    ),
    "opus-mt (Marian), M2M-100, NLLB": ("MarianMTModel", "M2M100ForConditionalGeneration"),
    "BERT, RoBERTa, DistilBERT, ALBERT": (
        *("BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "AlbertForMaskedLM"),
    ),
    "DeBERTa v3, ELECTRA, ModernBERT": (
        *("DebertaV2ForMaskedLM", "ElectraForMaskedLM", "ModernBertForMaskedLM"),
    ),
    "XLM-RoBERTa, CamemBERT": ("XLMRobertaForMaskedLM", "CamembertForMaskedLM"),
    "all-MiniLM-L6-v2, bge-base-en, e5-base-v2, gte-base": ("BertModel",),
    "bge-m3, multilingual-e5-large": ("XLMRobertaModel",),
    "all-mpnet-base-v2": ("MPNetModel",),
    "nomic-embed-text": ("NomicBertModel",),
    "jina-embeddings-v3": ("JinaEmbeddingsV3Model",),
    "Qwen3-Embedding, E5-Mistral, EmbeddingGemma": (
        *("Qwen3Model", "MistralModel", "Gemma3TextModel"),
    ),
    "cross-encoders (ms-marco-MiniLM)": ("BertForSequenceClassification",),
    "openai/privacy-filter": ("OpenAIPrivacyFilterForTokenClassification",),
}
"""What people search for, and what config.json says there."""
_DIRECT = frozenset[str]().union(
    *(each.architectures() for each in (backbones, encoders, families, text_parts))
)


# The zoo has none of them: it is exported in a way of its own, or no architecture of transformers.
_OTHERS = """## block-diffusion

| architecture | proven with |
|---|---|
| `DiffusionGemmaForBlockDiffusion` | the text part in fp32: passes equal torch's, and texts \
those of `generate` with the same random numbers; `make test-zoo` |

## Checkpoints of other libraries

| library | proven with, in `make test` | |
|---|---|---|
| gliner 0.2 | spans and tokens, BERT, DeBERTa-v3 and ModernBERT, an LSTM, an encoder for labels | \
[GLiNER](export.md#gliner) |
| gliner2 2.1 | the architecture `span` on BERT; `boundary` (GLiNER2.5) in `make test-zoo` | \
[GLiNER2](export.md#gliner2) |
"""


def page() -> str:
    """The whole page, as Markdown."""
    names = (f"| {name} | {', '.join(f'`{a}`' for a in of)} |\n" for name, of in _NAMES.items())
    parts = [
        _INTRODUCTION + "".join(names),
        "GLiNER and rerankers that are language models: see [export](export.md#gliner).\n\n"
        "Architectures that are written [directly](export.md#two-ways), without torch, are marked "
        "so; all can be traced.\n",
    ]
    for task, zoo in ZOO.items():
        parts.append(f"## {task}\n\n| architecture | proven with | |\n|---|---|---|\n" + _rows(zoo))
    return "\n".join([*parts, _OTHERS])


def named() -> set[str]:
    """The architectures that stand beside names."""
    return {architecture for of in _NAMES.values() for architecture in of}


def proven() -> set[str]:
    """Those of the zoo."""
    return {specimen.architecture for zoo in ZOO.values() for specimen in zoo.values()}


def _rows(zoo: Mapping[str, Specimen]) -> str:
    specimens = defaultdict(list)
    for specimen in zoo.values():
        specimens[specimen.architecture].append(specimen)
    return "".join(_row(name, of) for name, of in sorted(specimens.items(), key=_by_name))


def _by_name(entry: tuple[str, list[Specimen]]) -> str:
    return entry[0].lower()


def _row(architecture: str, specimens: list[Specimen]) -> str:
    name = f"`{architecture}`"
    if any(specimen.quick for specimen in specimens):
        name = f"**{name}**"
    notes = [specimen.note for specimen in specimens if specimen.note]
    if not all(specimen.batch_invariant for specimen in specimens):
        notes.append("not batch-invariant")
    direct = " direct" if architecture in _DIRECT else ""
    return f"| {name} | {'; '.join(notes)} |{direct} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
