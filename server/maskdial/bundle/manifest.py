"""Manifest: ``maskdial.json``: what a model is, how to feed it, and how it was checked."""

from collections.abc import Mapping
from math import lcm, prod
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

SCHEMA_VERSION: Literal[1] = 1
MANIFEST = "maskdial.json"
GRAPH: Literal["model.onnx"] = "model.onnx"
FULL_MANIFEST = "maskdial.full.json"
FULL_GRAPH: Literal["model.full.onnx"] = "model.full.onnx"
ENCODER_GRAPH = "encoder.onnx"
KERNEL_CHECK = "kernel_check.onnx"
BLOCK_SUMS = "int4.block_sums."
"""How the names of matrices begin that add up blocks of inputs, in graphs with minima of blocks."""
TABLE_ROWS = "lookup.rows."
"""How the names of values begin, in graphs, that are rows of a table in blocks, one for each token;
the module's name follows."""
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
DECISION_TEMPLATE = "decision_template.jinja"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
TOOL_TEMPLATE = f"{ADDITIONAL_TEMPLATES}/tool_use.jinja"
GENERATION_CONFIG = "generation_config.json"
COUNT_GRAPH = "counts.onnx"
BOUNDARY_GRAPH = "boundaries.onnx"
DRAFT_GRAPH = "draft.onnx"
DRAFT_TOKENS = "draft_tokens.npy"
QUERY_WEIGHTS = "query_weights.npy"
"""Of embed-sparse: the weight of each token of a query, of a model that reads documents alone."""
SCHEMA_MARKERS = (
    "[SEP_STRUCT]",
    "[SEP_TEXT]",
    "[P]",
    "[C]",
    "[E]",
    "[R]",
    "[L]",
    "[EXAMPLE]",
    "[OUTPUT]",
    "[DESCRIPTION]",
)
"""gliner2's tokens for the parts of a schema, in its order."""
LABEL_ENCODER = "labels"
"""The folder of the bundle that turns labels into vectors."""
TASK_ADAPTERS = "adapters"
"""The folder of the adapters that a bundle brings, one folder for each."""


CacheInteger = Literal["int8", "int16"]
CacheChoice = Literal["auto", "float"] | CacheInteger
"""What a KV cache is to consist of: the model's floats, or integers, which only our kernels can
read. ``auto``: int16 where they compute all of the model's attention and products of quantized
weights, otherwise floats.
"""
_BLOCK = 64  # tokens of a chunk without attention, which may be any number
CACHE_HEADERS: dict[CacheInteger, int] = {"int8": 8, "int16": 2}
"""Elements before a head's key or value in a cache of integers (``kernels/src/processor.h``)."""


Family = Literal["masked", "causal", "encoder-decoder"]
Mask = Literal["full", "causal"]
Side = Literal["left", "right"]
TaskName = Literal[
    "fill-mask",
    "classify",
    "token-classify",
    "entities",
    "extract",
    "question-answering",
    "multiple-choice",
    "decide",
    "rerank",
    "embed",
    "embed-sparse",
    "embed-all",
    "embed-hybrid",
    "generate",
    "block-diffusion",
]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SpecialTokens(_Frozen):
    """The ids of tokens with a role; None (or empty) if the model has none."""

    pad: _TokenId | None = None
    mask: _TokenId | None = None
    bos: _TokenId | None = None
    eos: tuple[_TokenId, ...] = ()


class Tokenization(_Frozen):
    """What a checkpoint's own tokenizer does that ``tokenizer.json`` does not say."""

    truncation_side: Side = Field(
        "right", description="where a text is cut if the request does not say"
    )
    leading_code: bool = Field(
        False,
        description="a code such as >>deu<< at the very start of a text is one token, the unknown "
        "one if the vocabulary does not have it (Marian)",
    )


class InfillTokens(_Frozen):
    """The tokens before the parts of a prompt that asks for the text of a gap, as they are spelled.

    Attributes:
        prefix: before the text before the gap.
        suffix: before the text after it.
        middle: before the gap's own text, if there is such a token.
        suffix_first: whether the text after the gap is read first.
        repository: before the name of a repository.
        file: before the name of a file.
        ends: tokens that end the gap's text.
    """

    prefix: str
    suffix: str
    middle: str | None = None
    suffix_first: bool = False
    repository: str | None = None
    file: str | None = None
    ends: tuple[str, ...] = ()


class Heads(NamedTuple):
    """The heads of a layer's keys and values."""

    num_heads: PositiveInt
    head_dim: PositiveInt


class KVLayout(_Frozen):
    """What a sequence keeps between passes.

    Each of ``layers`` has keys and values, (batch, num_heads, max_length, width). Their ``dtype``
    is float16 in bundles of the precisions fp16 and int4-fp16, otherwise float32.

    ``states`` are the shapes of the states of recurrent layers, which do not grow with the text:
    float32 (batch, *shape) each. A short convolution has its last inputs, (width - 1, channels);
    linear attention a matrix for each head, (num_heads, key_dim, value_dim).
    """

    layers: tuple[Heads, ...]
    dtype: Literal["float32", "float16"] = "float32"
    states: tuple[tuple[PositiveInt, ...], ...] = ()

    @property
    def element(self) -> np.dtype[Any]:
        """What the cache consists of."""
        return np.dtype(self.dtype)

    def width(self, heads: Heads) -> int:
        """Elements of one token's key or value in one head of a layer."""
        return heads.head_dim

    @property
    def elements_per_token(self) -> int:
        """Elements of one token's keys and values in all layers."""
        return 2 * sum(heads.num_heads * self.width(heads) for heads in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """The size of one token's keys and values in all layers."""
        return self.elements_per_token * self.element.itemsize

    @property
    def state_bytes(self) -> int:
        """The size of a sequence's states."""
        return sum(map(prod, self.states)) * np.dtype(np.float32).itemsize

    def stored_as(self, integer: CacheInteger | None) -> "KVLayout":
        """The layout of the same cache in integers, which a server may choose; None for floats."""
        if integer is None:
            return self
        return IntegerKVLayout(**self.model_dump(), integer=integer)

    @property
    def query_block(self) -> int:
        """How many tokens GroupQueryAttention processes at a time, counted from a chunk's first.

        Measured on ONNX Runtime 1.31's CPU provider: a block of one token goes through another
        kernel, whose last bits differ. So the logits of a prompt in chunks are bitwise those of the
        prompt in one piece if chunks start at multiples of the block and none is a single token.
        Layers have blocks of twice their head size, which this is a multiple of.
        """
        return lcm(*(2 * heads.head_dim for heads in self.layers)) if self.layers else _BLOCK


class IntegerKVLayout(KVLayout):
    """The same in integers; a header precedes each key and value."""

    integer: CacheInteger

    @property
    def element(self) -> np.dtype[Any]:
        return np.dtype(self.integer)

    def width(self, heads: Heads) -> int:
        return heads.head_dim + CACHE_HEADERS[self.integer]


class DraftHead(_Frozen):
    """What predicts the token after the next one by hidden states of the model: `DRAFT_GRAPH`.

    ``mtp`` is a checkpoint's own layer for multi-token prediction, ``eagle`` an EAGLE-3 head.
    ``hidden_size`` are the columns of the hidden states that it reads, ``vocab_size`` those of its
    logits, and ``kv`` is its own KV cache.
    """

    kind: Literal["mtp", "eagle"]
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    kv: KVLayout
    source: str | None = Field(None, description="its checkpoint, if that is not the model's")


class TokenPooling(_Frozen):
    """Which vectors of a text's tokens become one; see `maskdial.masked.tasks.token_pooling`.

    ``factor`` is about how many do. The first ``protected`` ones stay. ``normalizes``: to length 1,
    also those that stay.
    """

    factor: float = Field(1.0, ge=1)
    protected: int = Field(1, ge=0)
    normalizes: bool = True
    queries: bool = False
    documents: bool = True


class MultiVector(_Frozen):
    """How a model with a vector for each token reads queries and documents. Lengths in tokens.

    A query is extended to ``expansion_length`` by a token, which other tokens may not attend to.
    Tokens that are ``skipped`` have no vector.
    """

    query_length: int | None = Field(None, gt=0)
    document_length: int | None = Field(None, gt=0)
    expansion_length: int | None = Field(None, gt=0)
    expansion_token: int | None = None
    attends_to_expansion: bool = False
    skipped: tuple[int, ...] = ()
    skips_in_queries: bool = False
    pooling: TokenPooling | None = Field(None, description="of tokens; None: each has its vector")

    @property
    def hides_expansion(self) -> bool:
        """Whether queries are extended by tokens that no other token attends to."""
        return self.expansion_length is not None and not self.attends_to_expansion


class Hybrid(_Frozen):
    """A graph with a dense vector, sparse weights and token vectors from one pass.

    ``unweighted`` are tokens without a weight.
    """

    token_dimension: int = Field(gt=0)
    unweighted: tuple[_TokenId, ...] = ()


class EmbeddingTask(_Frozen):
    """What a model was trained to embed texts for, by an adapter (`maskdial.bundle.adapter`)."""

    adapter: str = Field(pattern=r"^\w[\w.-]*$", description="its folder in `TASK_ADAPTERS`")
    prompt: str | None = Field(
        None, description="the one that is put before every text if a request names none"
    )


class Embedding(_Frozen):
    """How the graph turns a text into one vector."""

    dimension: int = Field(gt=0, description="for embed-sparse, the size of the vocabulary")
    pooling: str = Field(
        description="of the tokens' hidden states or logits; results of several, joined by +, are "
        "concatenated"
    )
    normalized: bool
    prompts: dict[str, str] = Field(
        default_factory=dict, description="texts that a request may have put before its texts"
    )
    default_prompt: str | None = Field(
        None, description="the one that is put before every text if a request names none"
    )
    tasks: dict[str, EmbeddingTask] = Field(default_factory=dict)
    multi_vector: MultiVector | None = Field(
        None, description="of embed-all; its prompts are query and document"
    )
    hybrid: Hybrid | None = Field(
        None, description="of embed-hybrid, whose other fields describe the dense vector"
    )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters of its tasks, some of which may share one."""
        return tuple(dict.fromkeys(task.adapter for task in self.tasks.values()))

    @property
    def num_outputs(self) -> int:
        """Columns of the graph's output."""
        if self.hybrid is None:
            return self.dimension
        return self.dimension + self.hybrid.token_dimension + 1


class Decoding(_Frozen):
    """What `transformers.GenerationConfig` says of a checkpoint's texts, where it says something.

    Lengths are in generated tokens: without the token that a decoder starts from.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    prefix: str | None = Field(None, description="a text to put before the source text")


class TextToText(_Frozen):
    """The encoder of an encoder-decoder model, and how its decoder writes texts.

    ``tasks`` are ``task_specific_params`` of config.json, such as ``summarization`` and
    ``translation_en_to_de``. ``languages`` are the tokens of the languages that a model translates
    between, by their codes: the tokenizer adds one to the source text, and the text begins with
    one.
    """

    max_source_length: int = Field(gt=0)
    start_token_id: int
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = Field((), description="sequences that are never written")
    defaults: Decoding = Decoding()
    tasks: dict[str, Decoding] = Field(default_factory=dict)
    languages: dict[str, int] = Field(default_factory=dict)


class PairTemplate(_Frozen):
    """The text that a reranker reads: a query and a document between these.

    ``instruction`` is the part of ``before`` that a request may replace.
    """

    before: str
    between: str
    after: str
    instruction: str | None = None

    @model_validator(mode="after")
    def _has_instruction(self) -> Self:
        if self.instruction is not None and self.before.count(self.instruction) != 1:
            raise ValueError("the instruction must be in the text before the query, once")
        return self

    def instructed(self, instruction: str | None) -> "PairTemplate":
        """The template with another instruction; None for its own."""
        if instruction is None or self.instruction is None:
            return self
        start, end = self.before.split(self.instruction)
        return self.model_copy(update={"before": f"{start}{instruction}{end}"})


DecisionKind = Literal["noul", "choice", "score"]
"""A kind of question, as templates of decision models know it; a noul is true or false."""


class Decision(_Frozen):
    """How a model answers typed questions (`transformers.DecisionConfig`, ``decision.json``).

    Its prompts are written by ``decision_template.jinja``, if the bundle has one, otherwise by the
    chat template.

    Attributes:
        labels: single tokens that stand for the options, by kind. By default Yes and No, or A to Z.
        temperature: divides the scores, by kind; 1 by default.
        noul_options: the order of the options of a noul.
        keeps_control_tokens: whether a text's control tokens are read as such, as its template
            escapes them itself.
        control_tokens: those that the tokenizer names beside the special ones; None: those that
            the template writes.
        special_tokens: tokens of the tokenizer by the names that templates know them by.
        offsets: of a model with a head, by kind, the column of the first option's score.
        num_scores: the columns of the head.
        softcap: c, where a score s of the head stands for c * tanh(s / c).
    """

    labels: dict[DecisionKind, tuple[str, ...]] = Field(default_factory=dict)
    temperature: dict[DecisionKind, float] = Field(default_factory=dict)
    noul_options: tuple[str, str] = ("true", "false")
    keeps_control_tokens: bool = False
    control_tokens: tuple[str, ...] | None = None
    special_tokens: dict[str, str] = Field(default_factory=dict)
    offsets: dict[DecisionKind, int] = Field(default_factory=dict)
    num_scores: int | None = Field(None, gt=0)
    softcap: float | None = Field(None, gt=0)


class Entities(_Frozen):
    """How a model finds entities whose labels a request names (GLiNER).

    It reads the labels, each after a token that stands for it, a separator, and the words of a
    text. ``span``: the graph gives columns of each word and label, (start, end, query, bias), and
    a span from word i to word j has for a label the score relu(start_i + end_j) . query + bias.
    ``token``: the graph gives three scores of each pair of a word and a label: as the entity's
    start, as its end, and inside.

    A model without ``label_token`` reads the words alone. The graph gives (start, end) of each,
    and the bundle in `LABEL_ENCODER` (query, bias) of a label.
    """

    scores: Literal["span", "token"]
    max_words: int = Field(gt=0, description="of a text that the model reads at once")
    max_width: int = Field(gt=0, description="of an entity in words, where spans are scored")
    splitter: Literal["whitespace"] = "whitespace"
    label_token: _TokenId | None = None
    separator: tuple[_TokenId, ...] = ()
    markers: tuple[str, ...] = Field((), description="spellings that a label may not contain")
    reads_label: bool = Field(
        False, description="whether a label's vector is that of the token after the one for it"
    )
    subtoken: Literal["first", "last"] = Field("first", description="whose vector is the word's")
    num_columns: int = Field(gt=0, description="of the graph's output")

    @property
    def encodes_labels(self) -> bool:
        """Whether a second model turns labels into vectors."""
        return self.label_token is None


class Extraction(_Frozen):
    """How a model finds what a schema names (GLiNER2).

    It reads the schema, whose parts have markers (`maskdial.masked.tasks.extraction_prompt`), and
    the words of a text. The graph gives of each marker and word the columns (start, end, label,
    counts, hidden): ``start`` and ``end`` of a word, 4 * ``hidden_size`` each; the logit of a
    label, one; those of how often a task's fields occur, ``max_count``; and the hidden state.
    `COUNT_GRAPH` makes of the hidden states of a task's fields a query and a bias for each field of
    each occurrence. A span from word i to word j has for these the score
    relu(start_i + end_j) . query + bias.

    ``boundary`` (GLiNER2.5): the graph gives the columns (label, absent, hidden). A field whose
    marker's ``absent`` is positive has no spans as a type of entities. `BOUNDARY_GRAPH` makes of
    the hidden states of a text's words and of all fields the spans of each field and their logits.
    """

    scores: Literal["span", "boundary"] = "span"
    hidden_size: int = Field(gt=0)
    max_width: int = Field(0, ge=0, description="of a span in words; 0: any")
    max_count: int = Field(0, ge=0, description="of occurrences, plus one; 0: one occurrence")

    @property
    def graph(self) -> str:
        """The file of the second graph."""
        return COUNT_GRAPH if self.scores == "span" else BOUNDARY_GRAPH

    @property
    def num_columns(self) -> int:
        """Columns of the graph's output for each token."""
        if self.scores == "boundary":
            return 2 + self.hidden_size
        return 9 * self.hidden_size + 1 + self.max_count


class Denoising(_Frozen):
    """How a model writes canvases of tokens in several passes each (DiffusionGemma).

    A canvas of ``canvas_length`` tokens begins as noise. A pass over the text and its canvas gives
    of each of the canvas's tokens the columns (logits, soft): ``soft``, ``hidden_size`` columns, is
    what the next pass reads beside the tokens.

    Attributes:
        steps: passes of a canvas at most; N below.
        t_min, t_max: the pass that is followed by n - 1 others has the temperature
            t_min + (t_max - t_min) * n / N.
        entropy_bound: what the entropies of accepted tokens may sum up to, in nats.
        stability_threshold: passes before the last one that found the same text.
        confidence_threshold: what a finished canvas's mean entropy is below, in nats.
    """

    canvas_length: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    steps: int = Field(48, gt=0)
    t_min: float = Field(0.4, ge=0)
    t_max: float = Field(0.8, gt=0)
    entropy_bound: float = Field(0.1, gt=0)
    stability_threshold: int = Field(1, ge=0)
    confidence_threshold: float = Field(0.005, gt=0)


class GoldenCheck(_Frozen):
    """One short input and some of its logits; the server computes them again where it runs.

    ``input_ids`` is one text without padding; for encoder-decoder models a source text, and the
    logits are those of the first token. The logits are those of its ``row`` (a masked
    position or the last token; 0 if a text has one row of logits, or a vector), at ``columns``.
    ``logits`` are those of ONNX Runtime's operators, ``kernel_logits`` those of our own kernels,
    which round some inputs to other integers; None if they had no part, or were not built.
    ``centered``: whether logits are compared less their mean over the columns. Quantizing shifts
    all logits of a vocabulary alike by more than it changes what a softmax makes of them.
    """

    # A million ids would take gigabytes before anything else is checked.
    input_ids: Annotated[tuple[int, ...], Field(max_length=1024)]
    row: int
    columns: Annotated[tuple[int, ...], Field(max_length=4096)]
    logits: Annotated[tuple[float, ...], Field(max_length=4096)]
    kernel_logits: Annotated[tuple[float, ...], Field(max_length=4096)] | None = None
    centered: bool = False
    tolerance: float = Field(gt=0)

    def drift(self, computed: NDArray[Any], expected: NDArray[Any]) -> float:
        """How far logits (num_columns,) are from expected ones, at most; NaN if some are NaN."""
        difference = np.asarray(computed, np.float64) - np.asarray(expected, np.float64)
        if self.centered:
            difference -= difference.mean()
        return float(np.abs(difference).max())


class ParityReport(_Frozen):
    """The largest absolute difference between ONNX Runtime's logits and those of a reference.

    It is measured in fp32: of a traced graph against torch, before a lower precision is applied,
    which has a quality report; of one that was written directly against a decoder in NumPy, with
    the integers that the graph has, and activations that are not rounded; of one that another
    exporter wrote, against ONNX Runtime's run of that by itself.
    """

    reference: Literal["torch", "numpy", "onnxruntime"] = "torch"
    tolerance: float
    ragged_batch: float
    chunked_prompt: float | None = None
    decode_steps: float | None = None
    long_text: float | None = Field(
        None, description="of a text beyond every window that the configuration names"
    )
    doubt: str | None = Field(
        None, description="why torch's logits are not known to be those of the original model"
    )


def with_unit(loss: float, figures: Mapping[str, float]) -> str:
    """A loss as nats, if these figures are a language model's, or as a percentage."""
    return f"{loss:.4g} nats" if "kl_divergence" in figures else f"{loss:.2%}"


def loss_in_words(loss: float, figures: Mapping[str, float], than: str = "") -> str:
    """What a precision does: it diverges by nats, if these figures are a language model's, or loses
    a percentage; ``than`` is what it is compared with.
    """
    verb, other = "loses", " against "
    if "kl_divergence" in figures:
        verb, other = "diverges by", " from "
    return f"{verb} {with_unit(loss, figures)}{other + than if than else ''}"


class Calibration(_Frozen):
    """What labelled texts have shown of a classifier's scores (`maskdial calibrate`).

    Attributes:
        temperature: by which logits are divided before they become scores (Guo et al. 2017, "On
            Calibration of Modern Neural Networks").
        isotonic: by label, what its scores mean: pairs of a score and the share of texts with that
            score that have the label, in rising order; between them lie straight lines (Zadrozny
            and Elkan 2002, "Transforming classifier scores into accurate multiclass probability
            estimates"). Empty where the temperature alone does it.
        thresholds: by label, the score from which on it is said of a text.
        texts: how many there were.
    """

    temperature: PositiveFloat = 1.0
    isotonic: dict[str, tuple[tuple[float, float], ...]] = Field(default_factory=dict)
    thresholds: dict[str, float] = Field(default_factory=dict)
    texts: int = 0


class QualityReport(_Frozen):
    """How far a lower precision agrees with fp32 on a sample text.

    ``figures`` by task: perplexity, perplexity_fp32, top1_agreement, and in nats kl_divergence, its
    standard error kl_error (of several windows) and kl_worst_window (generate); agreement, top1 and
    top1_fp32 (fill-mask); agreement (classify, token-classify, entities, question-answering,
    multiple-choice); mean_cosine and least_cosine (embed). ``loss`` is the share of decisions that
    changed, the divergence (in older bundles the relative increase of the perplexity), or 1 minus
    the mean cosine.
    """

    text: str
    text_sha256: str
    positions: int
    figures: dict[str, float]
    loss: float
    max_loss: float | None = Field(description="None if the export was told to accept any loss")
    kept: tuple[str, ...] = Field(
        description="modules of the checkpoint that stayed fp32, or fp16 in int4-fp16"
    )
    raised: tuple[str, ...] = Field((), description="modules that are int8 in a bundle of int4")
    calibrated: int = Field(
        0, description="number of modules with one input scale for all rows, in older bundles"
    )
    by_row: bool = Field(
        True, description="whether int8 products have one scale for each row; otherwise for blocks"
    )
    measured_with: Literal["onnxruntime", "kernels"] = Field(
        "onnxruntime", description="whose products the loss was measured with"
    )
    portable: dict[str, float] | None = Field(
        None, description="loss and figures with ONNX Runtime's products, if the others are not"
    )
    calibration_text: str | None = Field(
        None, description="the text whose inputs chose scales and 4-bit integers"
    )
    weights_only: dict[str, float] | None = Field(
        None, description="loss and figures of int4 if activations were not rounded to int8"
    )


class Manifest(_Frozen):
    """``maskdial.json``. Lengths are in tokens, special tokens included."""

    schema_version: Literal[1] = SCHEMA_VERSION
    graph: Literal["model.onnx", "model.full.onnx"] = Field(
        GRAPH, description="file name of the graph"
    )
    family: Family
    task: TaskName
    architecture: str
    precision: Literal["fp32", "fp16", "int8", "int4", "int4-fp16"]
    batch_invariant: bool
    vocab_size: int = Field(gt=0)
    num_parameters: int | None = Field(None, description="of the checkpoint's model")
    max_length: int = Field(gt=0)
    special_tokens: SpecialTokens
    tokenization: Tokenization = Tokenization()
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    embedding: Embedding | None = None
    reads_left: bool = Field(
        False, description="of the masked family: whether tokens attend to earlier ones only"
    )
    kv: KVLayout | None = None
    draft_head: DraftHead | None = Field(
        None, description="what drafts for the model by its hidden states"
    )
    text_to_text: TextToText | None = None
    pair_template: PairTemplate | None = None
    decision: Decision | None = Field(
        None, description="how the checkpoint answers questions, where it says so"
    )
    entities: Entities | None = Field(
        None, description="of a model that finds entities of any labels"
    )
    extraction: Extraction | None = Field(
        None, description="of a model that finds what a schema names"
    )
    denoising: Denoising | None = Field(
        None, description="of a model that writes canvases in several passes each"
    )
    infill: InfillTokens | None = Field(
        None, description="of a causal model whose tokenizer has fill-in-the-middle tokens"
    )
    tool_format: dict[str, Any] | None = Field(
        None,
        description="how the model writes tool calls (`ToolFormat.to_json`); None: derived from "
        "the chat template",
    )
    thinking_marks: tuple[str, str] | None = Field(
        None, description="the tags around the model's reasoning; None: derived likewise"
    )
    response_template: dict[str, Any] | None = Field(
        None,
        description="the checkpoint's `response_template` (transformers 5), for what the chat "
        "template does not show of calls and reasoning",
    )
    left_out: tuple[str, ...] = Field(
        (), description="modules of the checkpoint that read images or sound"
    )
    media_tokens: tuple[_TokenId, ...] = Field(
        (), description="tokens that stand for images or sound; a request must not have them"
    )
    source: str
    source_sha256: str
    tool_versions: dict[str, str]
    parity: ParityReport
    quality: QualityReport | None = None
    calibration: Calibration | None = None
    golden: GoldenCheck
    files: dict[str, str] = Field(description="file name -> SHA-256, for every file of the model")

    @property
    def mask(self) -> Mask:
        """The attention mask that the graph runs under."""
        return "full" if self.family == "masked" else "causal"

    @property
    def task_adapters(self) -> tuple[str, ...]:
        """The adapters that the bundle brings."""
        return () if self.embedding is None else self.embedding.adapters

    @property
    def num_outputs(self) -> int | None:
        """The width of the graph's output, where one of these fields says it."""
        if self.task in ("generate", "fill-mask"):
            return self.vocab_size
        if self.task == "classify":
            return len(self.labels)
        if self.task == "decide" and self.decision is not None:
            return self.decision.num_scores
        if self.entities is not None:
            return self.entities.num_columns
        if self.extraction is not None:
            return self.extraction.num_columns
        if self.denoising is not None:
            return self.vocab_size + self.denoising.hidden_size
        return None if self.embedding is None else self.embedding.num_outputs

    @property
    def translates(self) -> bool:
        """Whether the model may be one that translates: it has languages, that task, or none."""
        own = self.text_to_text
        if own is None:
            return False
        named = any(name.startswith("translation") for name in own.tasks)
        return named or bool(own.languages) or not own.tasks

    @property
    def summarizes(self) -> bool:
        """Whether the model may be one that summarizes: it has that task, or none."""
        own = self.text_to_text
        if own is None or own.languages or self.architecture == "MarianMTModel":
            return False
        return "summarization" in own.tasks or not own.tasks

    @property
    def entailment(self) -> int | None:
        """The index of the label for entailment, recognized by its name; None if there is none."""
        names = (label.lower() for label in self.labels)
        return next((i for i, name in enumerate(names) if name.startswith("entail")), None)
