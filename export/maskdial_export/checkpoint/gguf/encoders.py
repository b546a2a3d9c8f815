"""Encoders: BERT and RoBERTa, Jina's with ALiBi, Nomic BERT, ModernBERT, EuroBERT."""

from collections.abc import Mapping
from dataclasses import replace

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    NORM,
    RMS,
    check_ranks,
    head_dim,
    read_pooling,
    read_rope,
    shared,
    width,
)
from maskdial_export.checkpoint.gguf.model import Config, Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_BERT: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{}.attn_q": "encoder.layer.{}.attention.self.query",
    "blk.{}.attn_k": "encoder.layer.{}.attention.self.key",
    "blk.{}.attn_v": "encoder.layer.{}.attention.self.value",
    "blk.{}.attn_output": "encoder.layer.{}.attention.output.dense",
    "blk.{}.attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blk.{}.ffn_up": "encoder.layer.{}.intermediate.dense",
    "blk.{}.ffn_down": "encoder.layer.{}.output.dense",
    "blk.{}.layer_output_norm": "encoder.layer.{}.output.LayerNorm",
}

# The classifier of RoBERTa. That of BERT lacks its pooler in files
_RANK_HEAD: Mapping[str, str] = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}


def bert(settings: Settings) -> Model:
    """BERT by its WordPiece tokenizer; otherwise RoBERTa or XLM-RoBERTa, whose positions from the
    padding token's id on are all that the file has."""
    types = settings.file.tensors.get("token_types.weight")
    if types is None:
        raise ExportError(
            f"{settings.file.path} is a DistilBERT (it has no token_types.weight), which is not "
            "supported as GGUF; export the checkpoint that it was made from"
        )
    config = shared(
        settings,
        intermediate_size=width(settings),
        layer_norm_eps=settings.real(NORM),
        hidden_act="gelu",
        type_vocab_size=types.shape[0],
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    kind = settings.text("tokenizer.ggml.model")
    tensors = settings.file.tensors
    ranks = kind != "bert" and all(f"{name}.weight" in tensors for name in _RANK_HEAD)
    pooling = None if ranks else read_pooling(settings)
    if kind == "bert":
        config |= {"model_type": "bert"}
        return Model("BertModel", config, _BERT, prefix="", pooling=pooling)
    padding = settings.number("tokenizer.ggml.padding_token_id", 1)
    config |= {
        "model_type": "xlm-roberta" if kind == "t5" else "roberta",
        "pad_token_id": padding,
    }
    config["max_position_embeddings"] += padding + 1
    family = "XLMRoberta" if kind == "t5" else "Roberta"
    if not ranks:
        architecture = f"{family}Model"
        return Model(architecture, config, _BERT, prefix="", padding=padding + 1, pooling=pooling)
    config |= _labels(settings)
    names = {**{key: f"roberta.{name}" for key, name in _BERT.items()}, **_RANK_HEAD}
    return Model(
        f"{family}ForSequenceClassification", config, names, prefix="", padding=padding + 1
    )


def _labels(settings: Settings) -> Config:
    """The labels of a classifier, by the rows of its output; a reranker has one."""
    check_ranks(settings)
    count = settings.file.tensors["cls.output.weight"].shape[0]
    if settings.find(".classifier.output_labels") is None:
        return {"num_labels": count}
    labels = settings.texts(".classifier.output_labels")
    if len(labels) != count:
        raise ExportError(
            f"{settings.file.path} names {len(labels):,} labels, and its classifier has {count:,}"
        )
    return {"id2label": {str(index): label for index, label in enumerate(labels)}}


def jina_bert_v2(settings: Settings) -> Model:
    """jina-embeddings-v2; that for code has further norms, for which there is no place here."""
    types = settings.file.tensors.get("token_types.weight")
    config = shared(
        settings,
        model_type="bert",
        intermediate_size=width(settings),
        layer_norm_eps=settings.real(NORM),
        hidden_act="gelu",
        position_embedding_type="alibi",
        type_vocab_size=2 if types is None else types.shape[0],
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    names = {
        **{key: name for key, name in _BERT.items() if key != "position_embd"},
        "blk.{}.ffn_up": "encoder.layer.{}.mlp.gated_layers",
        "blk.{}.ffn_down": "encoder.layer.{}.mlp.wo",
        "blk.{}.layer_output_norm": "encoder.layer.{}.mlp.layernorm",
    }
    pooling = read_pooling(settings)
    return Model("JinaBertModel", config, names, prefix="", pooling=pooling, traceable=False)


def nomic_bert_moe(settings: Settings) -> Model:
    """nomic-embed-text-v2-moe. llama.cpp has no bias behind the experts, nor have its files."""
    found = nomic_bert(settings)
    experts: Config = {
        "attention_bias": True,
        "expert_bias": False,
        "gated": False,
        "hidden_act": "gelu",
        "moe_every_n_layers": settings.number(".moe_every_n_layers"),
        "moe_top_k": settings.number(".expert_used_count"),
        "num_experts": settings.number(".expert_count"),
    }
    names = {
        **found.names,
        "blk.{}.ffn_up": "encoder.layers.{}.mlp.fc1",
        "blk.{}.ffn_gate_inp": "encoder.layers.{}.mlp.router.layer",
        "blk.{}.ffn_up_exps": "encoder.layers.{}.mlp.experts.*.up",
        "blk.{}.ffn_down_exps": "encoder.layers.{}.mlp.experts.*.down",
    }
    del names["blk.{}.ffn_gate"]
    return replace(found, config=found.config | experts, names=names, traceable=False)


def nomic_bert(settings: Settings) -> Model:
    """Nomic BERT."""
    types = settings.file.tensors.get("token_types.weight")
    config = shared(
        settings,
        model_type="nomic_bert",
        intermediate_size=width(settings),
        layer_norm_eps=settings.real(NORM),
        hidden_act="silu",
        type_vocab_size=2 if types is None else types.shape[0],
        rope_parameters=read_rope(settings),
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    names = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "blk.{}.attn_qkv": "encoder.layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "encoder.layers.{}.attn.out_proj",
        "blk.{}.attn_output_norm": "encoder.layers.{}.norm1",
        "blk.{}.ffn_up": "encoder.layers.{}.mlp.fc11",
        "blk.{}.ffn_gate": "encoder.layers.{}.mlp.fc12",
        "blk.{}.ffn_down": "encoder.layers.{}.mlp.fc2",
        "blk.{}.layer_output_norm": "encoder.layers.{}.norm2",
    }
    return Model("NomicBertModel", config, names, prefix="", pooling=read_pooling(settings))


def modernbert(settings: Settings) -> Model:
    """ModernBERT."""
    num_layers = min(settings.number(".block_count"), 2**16)
    period = settings.number(".attention.sliding_window_pattern", 3) or 1
    theta = settings.real(".rope.freq_base", 160_000.0)
    config = shared(
        settings,
        model_type="modernbert",
        intermediate_size=width(settings),
        norm_eps=settings.real(NORM if settings.find(RMS) is None else RMS),
        hidden_activation=settings.text(".hidden_activation", "gelu"),
        local_attention=settings.number(".attention.sliding_window", 128),
        layer_types=[
            "sliding_attention" if layer % period else "full_attention"
            for layer in range(num_layers)
        ],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": settings.real(".rope.freq_base_swa", 10_000.0),
            },
        },
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    names = {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "blk.{}.attn_norm": "layers.{}.attn_norm",
        "blk.{}.attn_qkv": "layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "layers.{}.attn.Wo",
        "blk.{}.ffn_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_up": "layers.{}.mlp.Wi",
        "blk.{}.ffn_down": "layers.{}.mlp.Wo",
    }
    return Model("ModernBertModel", config, names, prefix="", pooling=read_pooling(settings))


def eurobert(settings: Settings) -> Model:
    """EuroBERT."""
    config = shared(
        settings,
        model_type="eurobert",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
    )
    return Model("EuroBertModel", config, DECODER, prefix="", pooling=read_pooling(settings))
