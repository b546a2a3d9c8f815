"""Tiny checkpoints of every architecture, random weights, and their bundles."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from maskdial_export.export import export

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = [
    *SPECIAL,
    *"abcdefghijklmnopqrstuvwxyz.,",
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
]
SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
# Two query heads to one key head, of a size (16) that the operator rotates
GROUPED = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}
MODERN = SHAPE | {
    "num_hidden_layers": 3,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
DEBERTA = SHAPE | {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
SPREAD_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0] * 8,
}
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
# A head has the same body as its fill-mask model, so one layer of it is enough
SMALL = SHAPE | {"num_hidden_layers": 1}
DISTILLED: dict[str, Any] = {
    "vocab_size": 101,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 128,
}

# checkpoint name -> (class, configuration); windows are smaller than the texts of the tests
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SHAPE),
    "bert-classify": ("BertForSequenceClassification", SHAPE | {"id2label": LABELS}),
    "roberta": ("RobertaForMaskedLM", SHAPE | {"pad_token_id": 1, "bos_token_id": 0}),
    "roberta-classify": ("RobertaForSequenceClassification", SHAPE | {"pad_token_id": 1}),
    "albert": ("AlbertForMaskedLM", SHAPE | {"embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", DISTILLED),
    "electra": ("ElectraForMaskedLM", SHAPE | {"embedding_size": 16}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", SHAPE | {"pad_token_id": 1, "bos_token_id": 0}),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "modernbert-classify": (
        "ModernBertForSequenceClassification",
        MODERN | {"classifier_pooling": "mean"},
    ),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA),
    "distilbert-classify": ("DistilBertForSequenceClassification", DISTILLED | {"n_layers": 1}),
    "albert-classify": ("AlbertForSequenceClassification", SMALL | {"embedding_size": 16}),
    "electra-classify": ("ElectraForSequenceClassification", SMALL | {"embedding_size": 16}),
    "deberta-v2-classify": (
        "DebertaV2ForSequenceClassification",
        DEBERTA | {"num_hidden_layers": 1, "problem_type": "multi_label_classification"},
    ),
    "bert-next-sentence": ("BertForNextSentencePrediction", SMALL),
    "bert-token-classify": ("BertForTokenClassification", SMALL | {"id2label": TAGS}),
    "xlm-roberta-token-classify": (
        "XLMRobertaForTokenClassification",
        SMALL | {"pad_token_id": 1, "id2label": TAGS},
    ),
    "modernbert-token-classify": (
        "ModernBertForTokenClassification",
        MODERN | {"num_hidden_layers": 1, "id2label": TAGS},
    ),
    "deberta-v2-token-classify": (
        "DebertaV2ForTokenClassification",
        DEBERTA | {"num_hidden_layers": 1, "id2label": TAGS},
    ),
    "roberta-question-answering": ("RobertaForQuestionAnswering", SMALL | {"pad_token_id": 1}),
    "distilbert-question-answering": (
        "DistilBertForQuestionAnswering",
        DISTILLED | {"n_layers": 1},
    ),
    "albert-question-answering": ("AlbertForQuestionAnswering", SMALL | {"embedding_size": 16}),
    "modernbert-question-answering": (
        "ModernBertForQuestionAnswering",
        MODERN | {"num_hidden_layers": 1},
    ),
    "bert-embed": ("BertModel", SMALL),
    "xlm-roberta-embed": ("XLMRobertaModel", SMALL | {"pad_token_id": 1}),
    "modernbert-embed": ("ModernBertModel", MODERN | {"num_hidden_layers": 1}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        | {"bos_token_id": 2, "eos_token_id": 3},
    ),
    "opt": ("OPTForCausalLM", SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        SHAPE | {"hidden_size": 64, "num_attention_heads": 2, "rotary_pct": 0.5},
    ),
    "llama": ("LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED | {"head_dim": 16}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 16, "num_attention_heads": 4}),
    "phi3": (
        "Phi3ForCausalLM",
        GROUPED
        | {"sliding_window": 7, "max_position_embeddings": 256, "rope_parameters": SPREAD_ROPE}
        | {"original_max_position_embeddings": 128},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        GROUPED
        | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
}

# checkpoint name -> how sentence-transformers pools for it, and whether it normalizes then
POOLING = {
    "bert-embed": ("mean_tokens", True),
    "xlm-roberta-embed": ("cls_token", True),
    "modernbert-embed": ("lasttoken", False),
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products are faster on one thread, and other tests run beside these."""
    torch.set_num_threads(1)


def make_tokenizer() -> tokenizers.Tokenizer:
    """A WordPiece tokenizer that spells; it pads and truncates, as saved ones may."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(16)
    return tokenizer


def make_checkpoint(name: str, folder: Path) -> Path:
    """Saves a checkpoint of random weights, biases and norms among them."""
    architecture, settings = CHECKPOINTS[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    if name in POOLING:
        write_modules(folder, *POOLING[name])
    return folder


def write_modules(folder: Path, pooling: str, normalizes: bool) -> None:
    """Writes what sentence-transformers keeps beside a model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if normalizes else []
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path}
                | {"type": f"sentence_transformers.models.{module}"}
                for index, (path, module) in enumerate(modules)
            ]
        )
    )
    ways = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {"word_embedding_dimension": SHAPE["hidden_size"]}
            | {f"pooling_mode_{way}": way == pooling for way in ways}
        )
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint, made once a session; tests that change one make their own."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        folder = root / name
        return folder if folder.is_dir() else make_checkpoint(name, folder)

    return get


@pytest.fixture(scope="session")
def bundle(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a checkpoint's bundle, exported once a session."""
    root = tmp_path_factory.mktemp("bundles")

    def get(name: str) -> Path:
        folder = root / name
        if not folder.is_dir():
            source = checkpoint(name)
            add_json(source / "tokenizer_config.json", chat_template="{{ messages }}")
            if name == "llama":
                add_json(source / "generation_config.json", eos_token_id=[3, 5], temperature=0.7)
            export(str(source), folder)
        return folder

    return get


def add_json(path: Path, **entries: Any) -> None:
    """Adds entries to a JSON object in a file, which need not exist yet."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


@pytest.fixture(scope="session", name="add_json")
def add_json_fixture() -> Callable[..., None]:
    return add_json


@pytest.fixture
def new_checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that the test may change."""
    return lambda name: make_checkpoint(name, tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def serve(start_server: Callable[..., Any]) -> Iterator[Callable[..., str]]:
    """Serves bundles by name and returns the URL."""
    running: list[Any] = []

    def start(**models: Path) -> str:
        running.append(start_server(models=models))
        return running[-1].url

    yield start
    for server in running:
        server.stop()


def load_reference(folder: Path) -> transformers.PreTrainedModel:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, architecture)
    return model_class.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="session", name="load_reference")
def load_reference_fixture() -> Callable[[Path], transformers.PreTrainedModel]:
    return load_reference
