"""The encoders that are known: what each family's configuration means, by ``model_type``.

A family is an entry of `_FAMILIES`: how its configuration is read, and its heads by the end of the
class's name. Defaults are those of transformers' configuration classes, or of the makers' own code
(`maskdial_export.direct.makers`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from maskdial.bundle.manifest import ProblemType, TaskName
from maskdial_export.choices import LONGEST
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Attends
from maskdial_export.direct.encoder import (
    Dense,
    Disentangled,
    Encoder,
    Function,
    Head,
    LayerNames,
    Norm,
    Positions,
    Relative,
    Step,
    Vocabulary,
)
from maskdial_export.direct.experts import Experts, Router
from maskdial_export.direct.makers import kind_of, translated
from maskdial_export.direct.rotary import read_rotary, rotary

_FUNCTIONS: Mapping[str, Function] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Of training, of generation in old configurations, and of what no encoder here reads
_HARMLESS = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
    *("classifier_dropout_prob", "dropout", "seq_classif_dropout", "qa_dropout"),
    *("embedding_dropout", "mlp_dropout", "gradient_checkpointing", "initializer_cutoff_factor"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "directionality"),
    *("pooler_size_per_head", "pooler_type", "finetuning_task", "output_past", "torchscript"),
    *("use_bfloat16", "do_sample", "num_beams", "max_length", "num_return_sequences", "top_k"),
    *("top_p", "temperature", "length_penalty", "repetition_penalty", "eos_token_ids"),
    *("tokenizer_class", "sep_token_id", "cls_token_id", "problem_type", "num_labels"),
    "_num_labels",
    *("id2label", "label2id", "sentence_transformers", "sbert_ce_default_activation_function"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
    *("sparse_pred_ignore_index", "unpad_inputs", "net_structure_type", "summary_type"),
    *("summary_activation", "summary_last_dropout", "summary_use_proj", "down_scale_factor"),
    *("pooler_dropout", "tie_weights_", "layers_to_keep", "gap_size", "num_memory_blocks"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({}, None),
    "sinusoidal_pos_embds": (False, True),  # how the table began, which is in the checkpoint
    "inner_group_num": (1,),
    "is_decoder": (False,),
    "sparse_prediction": (False,),
    "classifier_bias": (False,),
    "decoder_bias": (True,),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """A module of a head: a norm, or a linear layer to so many columns.

    ``function`` "own" is that of the configuration. ``bias``: of the output layer over the
    vocabulary, its name in the checkpoint.
    """

    module: str
    to: Literal["norm", "hidden", "embedding", "labels", "vocabulary"]
    function: Function | Literal["own"] | None = None
    bias: str | None = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of encoders.

    Attributes:
        prefix: of the names of its classes.
        base: the attribute of a class with a head that has the encoder.
        read: its configuration; the head is put in afterwards.
        heads: by the rest of the class's name.
        ids: the special tokens that its configuration has by default.
        types: whether its tokenizer tells the parts of a text pair.
        tokenizer: what its tokenizer's model is called in tokenizer.json.
        special: the special tokens that its tokenizer's class has by default.
        traceable: whether transformers has its classes, so that the tracer knows it, too.
        stored: patterns in the names of weights that files have otherwise, and what they are in
            transformers; with several names, a matrix stands for as many, one below the other.
    """

    prefix: str
    base: str
    read: Callable[[Config, str], Encoder]
    heads: Mapping[str, tuple[_Part, ...]]
    ids: Mapping[str, int] = field(default_factory=lambda: {"pad_token_id": 0})
    tokenizer: str = "WordPiece"
    types: bool = False
    special: tuple[str, ...] = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
    traceable: bool = True
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_TASKS: Mapping[str, TaskName] = {
    "Model": "embed",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token-classify",
    "ForQuestionAnswering": "question-answering",
}


def knows(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of an encoder which is known."""
    return kind_of(values) in _FAMILIES and not values.get("is_decoder")


def architectures() -> frozenset[str]:
    """transformers' classes that are known."""
    return frozenset(
        f"{family.prefix}{rest}"
        for family in _FAMILIES.values()
        if family.traceable
        for rest in ("Model", *family.heads)
    )


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a configuration that is known."""
    return _FAMILIES[kind_of(values)]


def task_of(values: Mapping[str, Any], *, pools: bool) -> TaskName:
    """The task of the class that a configuration names, or embed if its hidden states are pooled.

    Raises:
        NotDirectError: it is not known.
    """
    kind = _class_of(Config(values), values, family_of(values))[1]
    return "embed" if pools else _TASKS[kind]


def read_encoder(
    values: Mapping[str, Any],
    *,
    sends_types: bool | None,
    limit: int | None,
    pools: bool = False,
) -> Encoder:
    """The encoder that a configuration describes, with its head; one that embeds has none yet.

    Args:
        values: config.json.
        sends_types: whether the tokenizer sends token types; None: as the family's does.
        limit: tokens of a text; None for as many as it has positions for, at most `LONGEST`.

        pools: whether a module behind the encoder pools its hidden states: its class is the
            family's without a head then, whichever is named.

    Raises:
        NotDirectError: the class or an entry is not known.
    """
    family, values = family_of(values), translated(values)
    config = Config(values, harmless=_HARMLESS, neutral=_NEUTRAL)
    architecture, kind = _class_of(config, values, family)
    config.take("architectures")
    if pools:
        architecture, kind = f"{family.prefix}Model", "Model"
    base = "" if kind == "Model" else f"{family.base}."
    found = family.read(config, base)
    head = _head(config, values, family, kind, found)
    config.flag("tie_word_embeddings", True)
    sends = family.types if sends_types is None else sends_types
    longest = found.max_length
    if found.positions is None:  # rotary tables have a row for each
        longest = min(longest, limit or LONGEST)
    config.finish()
    return replace(
        found,
        architecture=architecture,
        head=head,
        max_length=longest,
        reads_types=sends and found.num_types > 1,
    )


def _class_of(config: Config, values: Mapping[str, Any], family: Family) -> tuple[str, str]:
    """The class, and the rest of its name behind the family's."""
    given = values.get("architectures")
    name = given[0] if isinstance(given, list) and len(given) == 1 else None
    rest = str(name).removeprefix(family.prefix)
    if name is None or rest == name or (rest != "Model" and rest not in family.heads):
        config.refuse("architectures")
    return str(name), rest


def _head(
    config: Config, values: Mapping[str, Any], family: Family, kind: str, encoder: Encoder
) -> Head:
    task = _TASKS[kind]
    pooling = config.one_of("classifier_pooling", ("cls", "mean"), "cls")
    if task == "embed":
        return Head("embed", (), ())
    labels = read_labels(config, values)
    if task == "question-answering" and len(labels) != 2:
        config.refuse("num_labels")
    reads: tuple[str, ...] = ()
    problem: ProblemType | None = None
    if task == "classify":
        reads, problem = (pooling,), values.get("problem_type")
    steps = _steps(config, family.heads[kind], encoder, len(labels))
    classifies = task in ("classify", "token-classify")
    return Head(task, reads, steps, labels if classifies else (), problem)


def read_labels(config: Config, values: Mapping[str, Any]) -> tuple[str, ...]:
    """A classifier's labels; ``num_labels`` counts where it differs from their names.

    Raises:
        NotDirectError: they are not known.
    """
    named, count = values.get("id2label"), values.get("num_labels")
    if isinstance(named, dict) and count in (None, len(named)):
        try:
            return tuple(str(named[str(index)]) for index in range(len(named)))
        except KeyError:
            config.refuse("id2label")
    count = 2 if count is None else count
    if type(count) is not int or not 1 <= count <= 2**20:
        config.refuse("num_labels")
    return tuple(f"LABEL_{index}" for index in range(count))


def _steps(
    config: Config, parts: tuple[_Part, ...], encoder: Encoder, num_labels: int
) -> tuple[Step, ...]:
    steps: list[Step] = []
    width = encoder.hidden_size
    sizes = {"hidden": width, "embedding": encoder.embedding_size, "labels": num_labels}
    for part in parts:
        if part.to == "norm":
            steps.append(Norm(part.module, width, encoder.epsilon, encoder.norm_bias))
        elif part.to == "vocabulary":
            if not config.flag("tie_word_embeddings", True):
                config.refuse("tie_word_embeddings")
            bias = f"{part.module}.bias" if part.bias == "" else part.bias
            steps.append(Vocabulary(part.module, bias, encoder.vocab_size))
        else:
            function = encoder.function if part.function == "own" else part.function
            outputs = sizes[part.to]
            steps.append(Dense(part.module, width, outputs, part.bias is not None, function))
            width = outputs
    return tuple(steps)


def _function(config: Config, key: str, default: str) -> Function:
    return _FUNCTIONS[config.one_of(key, tuple(_FUNCTIONS), default)]


def _pad(config: Config, default: int) -> int:
    value = config.stated("pad_token_id", default)
    if value is not None and (type(value) is not int or value < 0):
        config.refuse("pad_token_id")
    return int(value or 0)


def _heads_of(config: Config, hidden: int, key: str = "num_attention_heads") -> int:
    count = config.count(key)
    if hidden % count:
        config.refuse(key)
    return count


_BERT_LAYER = LayerNames(
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    ("intermediate.dense",),
    "output.dense",
    "output.LayerNorm",
)
_DEBERTA_LAYER = replace(
    _BERT_LAYER,
    attention=tuple(f"attention.self.{each}_proj" for each in ("query", "key", "value")),
)
# What it may say, and what it says where it says nothing
_DEBERTA_SAYS: Mapping[str, tuple[Any, ...]] = {
    "norm_rel_ebd": ("layer_norm",),
    "relative_attention": (True,),
    "position_biased_input": (False,),
    "share_att_key": (True,),
    "pos_att_type": (["p2c", "c2p"], ["c2p", "p2c"], "p2c|c2p", "c2p|p2c"),
    "type_vocab_size": (0,),
    "conv_kernel_size": (0,),
    "legacy": (True,),
    "pooler_hidden_act": ("gelu",),
}
_DEBERTA_USUAL: Mapping[str, Any] = {
    "type_vocab_size": 0,
    "conv_kernel_size": 0,
    "legacy": True,
    "pooler_hidden_act": "gelu",
}
_ALBERT_LAYER = LayerNames(
    ("attention.query", "attention.key", "attention.value"),
    "attention.dense",
    "attention.LayerNorm",
    ("ffn",),
    "ffn_output",
    "full_layer_layer_norm",
)
_MPNET_LAYER = LayerNames(
    ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    "attention.attn.o",
    "attention.LayerNorm",
    ("intermediate.dense",),
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT_LAYER = LayerNames(
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    ("ffn.lin1",),
    "ffn.lin2",
    "output_layer_norm",
)
_ROTARY_LAYER = LayerNames(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    "post_mlp_layernorm",
)
_UNGATED_LAYER = replace(_ROTARY_LAYER, up=("mlp.up_proj",))
_JINA_LAYER = replace(
    _BERT_LAYER, up=("mlp.gated_layers",), down="mlp.wo", mlp_norm="mlp.layernorm"
)
_JINA_CODE_LAYER = replace(
    _BERT_LAYER,
    up=("mlp.gate_layer", "mlp.up_layer"),
    down="mlp.down_layer",
    mlp_norm="layer_norm_2",
    second_norm="layer_norm_1",
    inner_norms=("attention.self.layer_norm_q", "attention.self.layer_norm_k"),
)
_MODERN_LAYER = LayerNames(
    ("attn.Wqkv",), "attn.Wo", "attn_norm", ("mlp.Wi",), "mlp.Wo", "mlp_norm"
)


def _bert(
    config: Config,
    base: str,
    *,
    pad: int = 0,
    skips_padding: bool = False,
    num_types: int | None = None,
) -> Encoder:
    """BERT, and what has its embeddings and layers; ``num_types``: None for what it says."""
    hidden = config.count("hidden_size")
    padding, rows = _pad(config, pad), config.count("max_position_embeddings")
    first = padding + 1 if skips_padding else 0
    if rows <= first:
        config.refuse("max_position_embeddings")
    count = config.count("num_hidden_layers")
    table = Positions(f"{base}embeddings.position_embeddings", rows, first, skips_padding)
    width = config.count("embedding_size", hidden)
    mapping = Dense(f"{base}embeddings_project", width, hidden) if width != hidden else None
    return Encoder(
        architecture="",
        base=base,
        words=f"{base}embeddings.word_embeddings",
        vocab_size=config.count("vocab_size"),
        embedding_size=width,
        hidden_size=hidden,
        width=config.count("intermediate_size"),
        num_heads=_heads_of(config, hidden),
        names=_BERT_LAYER,
        layers=tuple(f"{base}encoder.layer.{index}" for index in range(count)),
        attends=(Attends(None),) * count,
        max_length=rows - first,
        pad=padding,
        function=_function(config, "hidden_act", "gelu"),
        embedding_norm=Norm(
            f"{base}embeddings.LayerNorm", width, config.real("layer_norm_eps", 1e-12)
        ),
        head=Head("embed", (), ()),
        positions=table,
        types=f"{base}embeddings.token_type_embeddings",
        num_types=num_types or config.count("type_vocab_size", 2),
        mapping=mapping,
        optional={
            f"{base}pooler.dense.weight": (hidden, hidden),
            f"{base}pooler.dense.bias": (hidden,),
        },
    )


def _roberta(config: Config, base: str) -> Encoder:
    return _bert(config, base, pad=1, skips_padding=True)


def _mpnet(config: Config, base: str) -> Encoder:
    found = _bert(config, base, pad=1, skips_padding=True)
    if found.pad != 1:  # positions skip this token whatever is stated
        config.refuse("pad_token_id")
    buckets = config.count("relative_attention_num_buckets", 32)
    if buckets % 4:
        config.refuse("relative_attention_num_buckets")
    return replace(
        found,
        names=_MPNET_LAYER,
        types=None,
        num_types=0,
        relative=Relative(f"{base}encoder.relative_attention_bias", buckets),
    )


def _deberta(config: Config, base: str) -> Encoder:
    """DeBERTa v2 and v3."""
    hidden, count = config.count("hidden_size"), config.count("num_hidden_layers")
    for key, known in _DEBERTA_SAYS.items():
        if config.take(key, _DEBERTA_USUAL.get(key)) not in known:
            config.refuse(key)
    positions = config.count("max_position_embeddings", 512)
    farthest = config.take("max_relative_positions", -1)
    if type(farthest) is not int:
        config.refuse("max_relative_positions")
    buckets = config.count("position_buckets")
    if buckets < 4:
        config.refuse("position_buckets")
    for key in ("embedding_size", "pooler_hidden_size"):
        if config.count(key, hidden) != hidden:
            config.refuse(key)
    heads = _heads_of(config, hidden)
    if config.count("attention_head_size", hidden // heads) != hidden // heads:
        config.refuse("attention_head_size")
    epsilon = config.real("layer_norm_eps", 1e-7)
    return Encoder(
        architecture="",
        base=base,
        words=f"{base}embeddings.word_embeddings",
        vocab_size=config.count("vocab_size"),
        embedding_size=hidden,
        hidden_size=hidden,
        width=config.count("intermediate_size"),
        num_heads=heads,
        names=_DEBERTA_LAYER,
        layers=tuple(f"{base}encoder.layer.{index}" for index in range(count)),
        attends=(Attends(None),) * count,
        max_length=positions,
        pad=_pad(config, 0),
        function=_function(config, "hidden_act", "gelu"),
        embedding_norm=Norm(f"{base}embeddings.LayerNorm", hidden, epsilon),
        head=Head("embed", (), ()),
        disentangled=Disentangled(
            f"{base}encoder.rel_embeddings",
            Norm(f"{base}encoder.LayerNorm", hidden, epsilon),
            buckets,
            farthest if farthest > 0 else positions,
        ),
    )


def _nomic(config: Config, base: str) -> Encoder:
    found = _rotary_bert(config, base, 1000.0, 0)
    has_bias, gated = config.flag("attention_bias", False), config.flag("gated", True)
    found = replace(
        found,
        function=_function(config, "hidden_act", "silu"),
        attention_bias=has_bias,
        mlp_bias=has_bias,
        up_bias=has_bias,
        gated=gated,
        names=_ROTARY_LAYER if gated else _UNGATED_LAYER,
    )
    return replace(found, experts=_nomic_experts(config, found))


def _nomic_experts(config: Config, encoder: Encoder) -> Experts | None:
    """Those of every second layer, in nomic-embed-text-v2-moe."""
    period, count = config.take("moe_every_n_layers", 0), config.take("num_experts", 0)
    if type(period) is not int or period == 0 or type(count) is not int or count == 0:
        for key in ("moe_every_n_layers", "num_experts"):
            if config.take(key):
                config.refuse(key)
        config.take("moe_top_k")
        return None
    chosen = config.count("moe_top_k", 1)
    if encoder.gated or encoder.function != "gelu":
        config.refuse("num_experts")
    if chosen > count:
        config.refuse("moe_top_k")
    return Experts(
        config.count("num_experts"),
        chosen,
        encoder.width,
        tuple(index % period == 1 for index in range(len(encoder.layers))),
        Router("router.layer"),
        names=("", "up", "down"),
        is_gated=False,
        activation="gelu",
        bias="experts.bias" if config.flag("expert_bias", True) else None,
    )


def _gte(config: Config, base: str) -> Encoder:
    return replace(_rotary_bert(config, base, 160_000.0, 1), mlp_bias=True)


def _new(config: Config, base: str) -> Encoder:
    return replace(_rotary_bert(config, base, 10_000.0, 0), mlp_bias=True)


def _jina(config: Config, base: str) -> Encoder:
    """BERT with ALiBi and a gated MLP, also with norms of queries and keys, as for code."""
    of_code = config.flag("qk_norms", False)
    return replace(
        _bert(config, base),
        names=_JINA_CODE_LAYER if of_code else _JINA_LAYER,
        positions=None,
        gated=True,
        up_bias=False,
        alibi=True,
    )


def _rotary_bert(config: Config, base: str, theta: float, pad: int) -> Encoder:
    """BERT whose queries and keys turn, and whose MLP has a gate."""
    typeless = config.take("type_vocab_size") == 0
    found = _bert(config, base, pad=pad, num_types=1 if typeless else None)
    size = found.hidden_size // found.num_heads
    rotation = read_rotary(config, size, theta)
    if config.count("head_dim", size) != size or 2 * len(rotation.frequencies) != size:
        config.refuse("head_dim")
    count = len(found.layers)
    return replace(
        found,
        names=_ROTARY_LAYER,
        layers=tuple(f"{base}layers.{index}" for index in range(count)),
        attends=(Attends(rotation),) * count,
        max_length=min(found.max_length, rotation.longest or LONGEST),
        positions=None,
        types=None if typeless else found.types,
        gated=True,
        mlp_bias=False,
        up_bias=False,
        optional={},
    )


def _albert(config: Config, base: str) -> Encoder:
    found = _bert(config, base)
    groups, count = config.count("num_hidden_groups", 1), len(found.layers)
    if count % groups:
        config.refuse("num_hidden_groups")
    layer = f"{base}encoder.albert_layer_groups.{{}}.albert_layers.0"
    module = f"{base}encoder.embedding_hidden_mapping_in"
    hidden = found.hidden_size
    return replace(
        found,
        names=_ALBERT_LAYER,
        layers=tuple(layer.format(index * groups // count) for index in range(count)),
        mapping=Dense(module, found.embedding_size, hidden),
        function=_function(config, "hidden_act", "gelu_new"),
        optional={f"{base}pooler.weight": (hidden, hidden), f"{base}pooler.bias": (hidden,)},
    )


def _distilbert(config: Config, base: str) -> Encoder:
    hidden, count = config.count("dim"), config.count("n_layers")
    rows = config.count("max_position_embeddings")
    return Encoder(
        architecture="",
        base=base,
        words=f"{base}embeddings.word_embeddings",
        vocab_size=config.count("vocab_size"),
        embedding_size=hidden,
        hidden_size=hidden,
        width=config.count("hidden_dim"),
        num_heads=_heads_of(config, hidden, "n_heads"),
        names=_DISTILBERT_LAYER,
        layers=tuple(f"{base}transformer.layer.{index}" for index in range(count)),
        attends=(Attends(None),) * count,
        max_length=rows,
        pad=_pad(config, 0),
        function=_function(config, "activation", "gelu"),
        embedding_norm=Norm(f"{base}embeddings.LayerNorm", hidden, 1e-12),
        head=Head("embed", (), ()),
        positions=Positions(f"{base}embeddings.position_embeddings", rows),
    )


def _modernbert(config: Config, base: str) -> Encoder:
    hidden = config.count("hidden_size")
    config.take("layer_norm_eps")  # stands in the first files, beside the one that is read
    heads, count = _heads_of(config, hidden), config.count("num_hidden_layers")
    epsilon, has_bias = config.real("norm_eps", 1e-5), config.flag("norm_bias", False)
    period = config.count("global_attn_every_n_layers", 3)
    kinds = config.take("layer_types")
    whole, near = "full_attention", "sliding_attention"
    if kinds is None:
        kinds = [near if index % period else whole for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {whole, near}:
        config.refuse("layer_types")
    rope = config.part("rope_parameters") or Config({})
    turns = {}
    for kind, key, theta in (
        (whole, "global_rope_theta", 160_000.0),
        (near, "local_rope_theta", 1e4),
    ):
        stated = config.take(key, theta)  # null stands for the default
        turns[kind] = rotary(rope.part(kind) or Config({}), config, hidden // heads, float(stated))
    rope.finish()
    window = config.count("local_attention", 128) // 2 + 1
    if config.one_of("classifier_activation", ("gelu",), "gelu") != "gelu":
        config.refuse("classifier_activation")
    return Encoder(
        architecture="",
        base=base,
        words=f"{base}embeddings.tok_embeddings",
        vocab_size=config.count("vocab_size"),
        embedding_size=hidden,
        hidden_size=hidden,
        width=config.count("intermediate_size"),
        num_heads=heads,
        names=_MODERN_LAYER,
        layers=tuple(f"{base}layers.{index}" for index in range(count)),
        attends=tuple(Attends(turns[kind], window if kind == near else None) for kind in kinds),
        max_length=config.count("max_position_embeddings"),
        pad=_pad(config, 50283),
        function=_function(config, "hidden_activation", "gelu"),
        embedding_norm=Norm(f"{base}embeddings.norm", hidden, epsilon, has_bias),
        head=Head("embed", (), ()),
        norm_first=True,
        final_norm=Norm(f"{base}final_norm", hidden, epsilon, has_bias),
        gated=True,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        norm_bias=has_bias,
    )


def _classifiers(*parts: _Part) -> dict[str, tuple[_Part, ...]]:
    """The heads that most families have, and that of a text classifier."""
    return {
        "ForSequenceClassification": parts,
        "ForTokenClassification": (_Part("classifier", "labels"),),
        "ForQuestionAnswering": (_Part("qa_outputs", "labels"),),
    }


def _pooled(module: str) -> dict[str, tuple[_Part, ...]]:
    return _classifiers(_Part(module, "hidden", "tanh"), _Part("classifier", "labels"))


_BERT_WORDS = "cls.predictions"
_ROBERTA_HEADS = _classifiers(
    _Part("classifier.dense", "hidden", "tanh"), _Part("classifier.out_proj", "labels")
) | {
    "ForMaskedLM": (
        _Part("lm_head.dense", "hidden", "gelu"),
        _Part("lm_head.layer_norm", "norm"),
        _Part("lm_head.decoder", "vocabulary", bias="lm_head.bias"),
    )
}
# No bias, as classifier_bias is false by default
_MODERN_HEAD = _Part("head.dense", "hidden", "gelu", None), _Part("head.norm", "norm")
_MODERN_LABELS = (*_MODERN_HEAD, _Part("classifier", "labels"))


def _roberta_family(prefix: str, tokenizer: str) -> Family:
    return Family(
        prefix,
        "roberta",
        _roberta,
        _ROBERTA_HEADS,
        {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        tokenizer,
        special=("<s>", "</s>", "<unk>", "<pad>", "<mask>"),
    )


def _gte_family(
    prefix: str, base: str, read: Callable[[Config, str], Encoder], *, pad: int
) -> Family:
    """transformers' gte, and what its makers' code calls new."""
    return Family(
        prefix,
        base,
        read,
        _pooled(f"{base}.pooler.dense")
        | {
            "ForMaskedLM": (
                _Part("lm_head.dense", "hidden", "gelu"),
                _Part("lm_head.layer_norm", "norm"),
                _Part("lm_head.decoder", "vocabulary"),
            )
        },
        ids={"pad_token_id": pad},
        tokenizer="Unigram",
        special=("<s>", "</s>", "<unk>", "<pad>", "<mask>"),
        traceable=base == "gte",
        stored={
            "encoder.layer.": ("layers.",),
            "attention.o_proj": ("self_attn.o_proj",),
            "attn_ln": ("post_attention_layernorm",),
            "mlp_ln": ("post_mlp_layernorm",),
            "lm_head.norm": ("lm_head.layer_norm",),
            "attention.qkv_proj": _ROTARY_LAYER.attention,
            "mlp.up_gate_proj": _ROTARY_LAYER.up[::-1],
        },
    )


_BERT_FAMILY = Family(
    "Bert",
    "bert",
    _bert,
    _pooled("bert.pooler.dense")
    | {
        "ForMaskedLM": (
            _Part(f"{_BERT_WORDS}.transform.dense", "hidden", "own"),
            _Part(f"{_BERT_WORDS}.transform.LayerNorm", "norm"),
            _Part(f"{_BERT_WORDS}.decoder", "vocabulary", bias=f"{_BERT_WORDS}.bias"),
        )
    },
    types=True,
)
_FAMILIES: Mapping[str, Family] = {
    "albert": Family(
        "Albert",
        "albert",
        _albert,
        _pooled("albert.pooler")
        | {
            "ForMaskedLM": (
                _Part("predictions.dense", "embedding", "own"),
                _Part("predictions.LayerNorm", "norm"),
                _Part("predictions.decoder", "vocabulary", bias="predictions.bias"),
            )
        },
        ids={"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
        tokenizer="Unigram",
        special=("[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"),
    ),
    "bert": _BERT_FAMILY,
    "camembert": _roberta_family("Camembert", "Unigram"),
    "deberta-v2": Family(
        "DebertaV2",
        "deberta",
        _deberta,
        _classifiers(_Part("pooler.dense", "hidden", "gelu"), _Part("classifier", "labels"))
        | {
            "ForMaskedLM": (
                _Part(f"{_BERT_WORDS}.transform.dense", "hidden", "own"),
                _Part(f"{_BERT_WORDS}.transform.LayerNorm", "norm"),
                _Part(f"{_BERT_WORDS}.decoder", "vocabulary", bias=f"{_BERT_WORDS}.bias"),
            )
        },
        tokenizer="Unigram",
        special=("[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"),
    ),
    "distilbert": Family(
        "DistilBert",
        "distilbert",
        _distilbert,
        _classifiers(_Part("pre_classifier", "hidden", "relu"), _Part("classifier", "labels"))
        | {
            "ForMaskedLM": (
                _Part("vocab_transform", "hidden", "own"),
                _Part("vocab_layer_norm", "norm"),
                _Part("vocab_projector", "vocabulary"),
            )
        },
    ),
    "electra": Family(
        "Electra",
        "electra",
        _bert,
        _classifiers(
            _Part("classifier.dense", "hidden", "gelu"), _Part("classifier.out_proj", "labels")
        )
        | {
            "ForMaskedLM": (
                _Part("generator_predictions.dense", "embedding", "gelu"),
                _Part("generator_predictions.LayerNorm", "norm"),
                _Part("generator_lm_head", "vocabulary"),
            )
        },
        types=True,
    ),
    "gte": _gte_family("Gte", "gte", _gte, pad=1),
    "jina_bert": replace(
        _BERT_FAMILY,
        prefix="JinaBert",
        read=_jina,
        traceable=False,
        stored={"mlp.up_gated_layer": ("mlp.up_layer", "mlp.gate_layer")},
    ),
    "modernbert": Family(
        "ModernBert",
        "model",
        _modernbert,
        {
            "ForMaskedLM": (*_MODERN_HEAD, _Part("decoder", "vocabulary")),
            "ForSequenceClassification": _MODERN_LABELS,
            "ForTokenClassification": _MODERN_LABELS,
            "ForQuestionAnswering": _MODERN_LABELS,
        },
        ids={"pad_token_id": 50283, "bos_token_id": 50281, "eos_token_id": 50282},
        tokenizer="BPE",
        special=(),
    ),
    "mpnet": Family(
        "MPNet",
        "mpnet",
        _mpnet,
        _ROBERTA_HEADS,
        {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        special=("<s>", "</s>", "[UNK]", "<pad>", "<mask>"),
    ),
    "new": _gte_family("New", "new", _new, pad=0),
    "nomic_bert": Family(
        "NomicBert",
        "nomic_bert",
        _nomic,
        _pooled("nomic_bert.pooler.dense")
        | {
            "ForMaskedLM": (
                _Part(f"{_BERT_WORDS}.transform.dense", "hidden", "own"),
                _Part(f"{_BERT_WORDS}.transform.layer_norm", "norm"),
                _Part(f"{_BERT_WORDS}.decoder", "vocabulary", bias=f"{_BERT_WORDS}.bias"),
            )
        },
        types=True,
        stored={
            "encoder.layers": ("layers",),
            "emb_ln": ("embeddings.LayerNorm",),
            "attn.out_proj": ("self_attn.o_proj",),
            "mlp.fc1.": ("mlp.up_proj.",),
            "fc11": ("up_proj",),
            "fc12": ("gate_proj",),
            "fc2": ("down_proj",),
            "norm1": ("post_attention_layernorm",),
            "norm2": ("post_mlp_layernorm",),
            "attn.Wqkv": _ROTARY_LAYER.attention,
        },
    ),
    "roberta": _roberta_family("Roberta", "BPE"),
    "xlm-roberta": _roberta_family("XLMRoberta", "Unigram"),
}
