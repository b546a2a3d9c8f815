"""Decoders that embed or classify, and encoders that are made as those: their layers in one pass,
and a head on the hidden states."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from maskdial.bundle.manifest import TaskName
from maskdial_export.checkpoint.reranking import TOKENS
from maskdial_export.direct import encoders, families
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Attends, Decoder
from maskdial_export.direct.encoder import Dense, Head, OnePass, Shapes, Vocabulary
from maskdial_export.direct.encoders import Family, read_labels
from maskdial_export.direct.makers import NEOBERT_CLASSES, translated

_BASE, SCORE = "model", "score"
_TASKS: Mapping[str, TaskName] = {
    "Model": "embed",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token-classify",
}
# Of those that never write, whose classifiers read a text's first token or all of them
_OF_ENCODERS: Mapping[str, Mapping[str, TaskName]] = {
    "eurobert": {**_TASKS, "ForMaskedLM": "fill-mask"},
    "neobert": {
        "Model": "embed",
        "ForMaskedLM": "fill-mask",
        "ForSequenceClassification": "classify",
    },
}
_HEAD_LAYER = {"eurobert": "lm_head", "neobert": "decoder"}
# NeoBERT's modules, by the names of Llama's
_NEOBERT: Mapping[str, tuple[str, ...]] = {
    "transformer_encoder.": ("layers.",),
    "encoder.weight": ("embed_tokens.weight",),
    "layer_norm.": ("norm.",),
    ".attention_norm.": (".input_layernorm.",),
    ".ffn_norm.": (".post_attention_layernorm.",),
    ".wo.": (".self_attn.o_proj.",),
    ".ffn.w3.": (".mlp.down_proj.",),
    ".ffn.w12.": (".mlp.gate_proj.", ".mlp.up_proj."),
}
# Of training, and of what other classes read
_HARMLESS = ("num_labels", "problem_type", "classifier_dropout", "sentence_transformers")
_OF_RERANKERS = (TOKENS, "is_original_qwen3_reranker")  # what vLLM reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone(OnePass):
    """A decoder without its output layer.

    Attributes:
        output: the module of that layer, of whose rows a reranker has some.
        packed: the module in each layer whose matrix has the rows of queries, keys and values by
            heads, those that turn together side by side; None: there is none.
    """

    decoder: Decoder
    output: str
    packed: str | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """How many tokens one sees in layers that do not attend to all."""
        layers = (each for each in self.decoder.layers if isinstance(each, Attends))
        return tuple(each.window for each in layers if each.window is not None)

    def shapes(self) -> Shapes:
        """The name and the shape of every weight that the graph needs, as the checkpoint has it."""
        found = dict(self.decoder.shapes())
        for step in (*self.head.before, *self.head.steps):
            found |= step.shapes()
        return found


def knows(values: Mapping[str, Any], *, pools: bool) -> bool:
    """Whether a configuration is that of a decoder which is known, and does not write.

    ``pools``: whether a module behind it pools its hidden states.
    """
    family = families.family_of(values)
    return (
        family is not None
        and family.embeds
        and (pools or _kind(values, family.prefix) in _tasks_of(values))
    )


def architectures() -> frozenset[str]:
    """transformers' classes that are known."""
    decoders = {f"{prefix}{rest}" for prefix in families.prefixes() for rest in _TASKS}
    return frozenset(decoders | {f"EuroBert{rest}" for rest in _OF_ENCODERS["eurobert"]})


def one_pass_task(values: Mapping[str, Any], *, pools: bool) -> TaskName | None:
    """The task of a model that reads a text in one pass, an encoder or a decoder without its output
    layer; None if the configuration is that of another one.

    Raises:
        NotDirectError: the class of an encoder is not known.
    """
    if encoders.knows(values):
        return encoders.task_of(values, pools=pools)
    return _task_of(values, pools=pools) if knows(values, pools=pools) else None


def _task_of(values: Mapping[str, Any], *, pools: bool) -> TaskName:
    family = families.family_of(values)
    assert family is not None, "it is known"
    return "embed" if pools else _tasks_of(values)[_kind(values, family.prefix)]


def _tasks_of(values: Mapping[str, Any]) -> Mapping[str, TaskName]:
    return _OF_ENCODERS.get(str(values.get("model_type")), _TASKS)


def tokenizer_family(values: Mapping[str, Any]) -> Family:
    """What is known of the tokenizers of a decoder's family, as of those of encoders."""
    kind = str(values["model_type"])
    found = Family(
        "", _BASE, lambda *_: NotImplemented, {}, families.token_ids({"model_type": kind})
    )
    if kind == "neobert":
        return replace(found, stored=_NEOBERT, traceable=False)
    return replace(found, special=())


def ranks(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a decoder that may be a reranker, whichever its head."""
    family = families.family_of(values)
    if family is None or not (family.embeds and family.writes):
        return False
    return _kind(values, family.prefix) in {"ForCausalLM", "ForSequenceClassification"}


def read_backbone(values: Mapping[str, Any], *, limit: int | None, task: TaskName) -> Backbone:
    """The decoder that a configuration describes, with its head; one that embeds has none yet.

    Args:
        values: config.json.
        limit: tokens of a text; None for as many as it has positions for, at most `LONGEST`.
        task: what it is for.

    Raises:
        NotDirectError: an entry is not known.
    """
    family = families.family_of(values)
    assert family is not None, "it is known"
    kinds, kind = _tasks_of(values), str(values["model_type"])
    values = translated(values)
    config = Config(values, harmless=(*_HARMLESS, *(_OF_RERANKERS if task == "rerank" else ())))
    reads_ahead = not config.flag("is_causal", True)
    decoder = family.read(config, family.architecture, limit)
    if kind in _OF_ENCODERS:
        head = _encoder_head(config, values, task, decoder)
    else:
        head = _head(config, values, task, decoder.hidden_size)
    config.finish()
    pad = values.get("pad_token_id")
    if (pad is not None and (type(pad) is not int or pad < 0)) or (pad is None and head.labels):
        config.refuse("pad_token_id")
    if task == "rerank":
        _check_logits(config, decoder)
    if reads_ahead:
        if any(isinstance(each, Attends) and each.window is not None for each in decoder.layers):
            config.refuse("is_causal")
        decoder = replace(decoder, reads_ahead=True)
    _check_layers(config, decoder)
    base = "" if task == "embed" else f"{_BASE}."
    names = decoder.names
    modules = (names.table, names.layers, names.last_norm)
    table, layers, last_norm = (f"{base}{each.removeprefix(f'{_BASE}.')}" for each in modules)
    architecture = family.architecture
    if task != "rerank":
        architecture = family.prefix + next(rest for rest, each in kinds.items() if each == task)
    return Backbone(
        architecture=architecture,
        base=base,
        words=table,
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        max_length=decoder.max_length,
        pad=pad or 0,
        head=head,
        reads_left=not decoder.reads_ahead,
        output=table if decoder.tied else "lm_head",
        packed="qkv" if kind == "neobert" else None,
        decoder=replace(
            decoder,
            tied=True,  # there is no output layer
            names=replace(names, table=table, layers=layers, last_norm=last_norm),
        ),
    )


def _kind(values: Mapping[str, Any], prefix: str) -> str:
    """The rest of the class's name behind the family's."""
    given = values.get("architectures")
    name = str(given[0]) if isinstance(given, list) and len(given) == 1 else ""
    name = NEOBERT_CLASSES.get(name, name)
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


def _head(config: Config, values: Mapping[str, Any], task: TaskName, width: int) -> Head:
    if task == "embed":
        return Head("embed", (), ())
    if task == "rerank":
        return Head(task, ("last",), (Dense(SCORE, width, 1, has_bias=False),))
    labels = read_labels(config, values)
    if task == "token-classify":
        has_bias = config.flag("token_classification_bias", True)
        return Head(task, (), (Dense(SCORE, width, len(labels), has_bias),), labels)
    score = Dense(SCORE, width, len(labels), has_bias=False)
    return Head(task, ("last",), (score,), labels, values.get("problem_type"))


def _check_logits(config: Config, decoder: Decoder) -> None:
    """Refuses logits that are more than a product of hidden states and weights."""
    if decoder.logits_softcap is not None:
        config.refuse("final_logit_softcapping")
    assert decoder.logits_scale is None, "no family that embeds scales its logits"


def _encoder_head(
    config: Config, values: Mapping[str, Any], task: TaskName, decoder: Decoder
) -> Head:
    """That of an encoder that is made as a decoder."""
    width, kind = decoder.hidden_size, str(values["model_type"])
    pooling = config.one_of("classifier_pooling", ("bos", "mean", "late"), "late")
    if kind == "neobert":
        pooling = "bos"
    if task == "embed":
        return Head("embed", (), ())
    if task == "fill-mask":
        module, has_bias = _HEAD_LAYER[kind], kind == "neobert" or decoder.biases.mlp
        bias = f"{module}.bias" if has_bias else None
        own = None if decoder.tied else width
        return Head(task, (), (Vocabulary(module, bias, decoder.vocab_size, own),))
    labels = read_labels(config, values)
    classifier = Dense("classifier", width, len(labels))
    if task == "token-classify":
        return Head(task, (), (classifier,), labels)
    if "clf_pooling" in config:  # what the makers' code calls it, which is not known for certain
        config.refuse("clf_pooling")
    dense = Dense("dense", width, width, function="tanh" if kind == "neobert" else "gelu")
    reads = ("cls",) if pooling == "bos" else ("mean",)
    parts = (dense, classifier)
    before, steps = (parts, ()) if pooling == "late" else ((), parts)
    return Head(task, reads, steps, labels, values.get("problem_type"), before=before)


def _check_layers(config: Config, decoder: Decoder) -> None:
    """Refuses what the operator of attention both ways does not compute."""
    if not decoder.reads_ahead:
        return
    if decoder.attention_softcap is not None:
        config.refuse("attn_logit_softcapping")
    for each in decoder.layers:
        turns = each.rotary if isinstance(each, Attends) else None
        if turns is None or 2 * len(turns.frequencies) != decoder.head_dim:
            config.refuse("is_causal")
