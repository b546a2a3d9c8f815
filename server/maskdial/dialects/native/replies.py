"""What the native routes reply, for the OpenAPI document; tests compare real replies with it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from maskdial.ask.score import Score
from maskdial.bundle.card import Measured
from maskdial.causal.events import FinishReason, Verdict
from maskdial.masked.tasks.classify import LabelScore, WindowScore
from maskdial.masked.tasks.embed import SparseVector
from maskdial.masked.tasks.fill_jointly import JointFilling
from maskdial.masked.tasks.fill_mask import Filling
from maskdial.masked.tasks.question_answering import Answer
from maskdial.masked.tasks.token_classify import Entity, TaggedToken
from maskdial.metrics import ModelState


class RerankedText(TypedDict):
    """A text by its index in the request, its score, and itself if that was wanted."""

    index: int
    score: float
    text: NotRequired[str]


# One mask in a text; several; several texts, of each kind.
_Fillings = list[Filling] | list[list[Filling]]
FillMaskReply = _Fillings | list[_Fillings] | list[JointFilling] | list[list[JointFilling]]
ClassifyReply = list[list[WindowScore | LabelScore]]
_Tags = list[TaggedToken] | list[Entity]
TokenClassifyReply = _Tags | list[_Tags]


class ReplacedSpan(TypedDict):
    """A part of a text that was replaced: where in it, and where in the redacted one."""

    label: str
    score: float
    start: int
    end: int
    redacted_start: int
    redacted_end: int
    original: NotRequired[str]


class RedactedText(TypedDict):
    """A redacted text, and its replacements in the order of the text."""

    text: str
    replacements: list[ReplacedSpan]


class MuveraVectors(TypedDict):
    """A vector for each text, and what they were made with."""

    muvera: dict[str, int | None]
    vectors: list[list[float]]


_Extracted = dict[str, Any]
ExtractReply = _Extracted | list[_Extracted]
RedactReply = RedactedText | list[RedactedText]
_Answers = Answer | list[Answer]
QuestionAnsweringReply = _Answers | list[_Answers]
EmbedReply = list[list[float]] | list[str]
EmbedAllReply = list[list[list[float]]] | MuveraVectors
SparseEmbedReply = SparseVector | list[SparseVector]
ZeroShotReply = list[LabelScore] | list[list[LabelScore]]
RerankReply = list[RerankedText]
SimilarityReply = list[float]
ScoreReply = Score | list[Score]


class HybridVector(TypedDict):
    """The vectors of a text, of the kinds that were wanted."""

    dense: NotRequired[list[float]]
    sparse: NotRequired[SparseVector]
    multi_vector: NotRequired[list[list[float]]]


ChunkEmbedReply = list[list[float]]
HybridEmbedReply = HybridVector | list[HybridVector]


class SummaryText(TypedDict):
    """A summary."""

    summary_text: str


class TranslationText(TypedDict):
    """A translation."""

    translation_text: str


SummarizeReply = list[SummaryText]
TranslateReply = list[TranslationText]


class TextToken(TypedDict):
    """A token of a text, with its offsets in characters; special tokens have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


TokenizeReply = list[list[TextToken]]
DetokenizeReply = list[str]


class PromptToken(TypedDict):
    """A token of a prompt. The first has no probability."""

    id: int
    text: str
    logprob: float | None


class GeneratedToken(TypedDict):
    """A generated token. Special tokens have no text. Under the full mask, ``step`` is the pass
    that unmasked it, counted from 0.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    step: NotRequired[int]


class FinishDetails(TypedDict):
    """Why a generation ended, how many tokens it has, and its seed."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int
    policy: NotRequired[list[Verdict]]


class GenerateDetails(FinishDetails):
    """The tokens of a generation, where they were wanted."""

    prefill: list[PromptToken]
    tokens: list[GeneratedToken]
    top_tokens: NotRequired[list[list[GeneratedToken]]]


class OtherGeneration(GenerateDetails):
    """One of the generations that ``best_of`` has not chosen."""

    generated_text: str


class BestDetails(GenerateDetails):
    """The same of the best generation."""

    best_of_sequences: NotRequired[list[OtherGeneration]]


class Generated(TypedDict):
    """A generated text, with its details where the request asked for them."""

    generated_text: str
    details: NotRequired[BestDetails]


_Generated = Generated | list[Generated]
GenerateReply = _Generated | list[_Generated]


class DefaultSampling(TypedDict, total=False):
    """How a causal model samples where a request does not say; empty for others."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    max_new_tokens: int | None


class ModelDescription(TypedDict):
    """A served model; what is not known before it is loaded is empty or 0.

    Models without a KV cache leave its type empty, too.
    """

    name: str
    state: ModelState
    reason: str | None
    mask: str
    family: str
    tasks: list[str]
    architecture: str
    precision: str
    batch_invariant: bool
    max_length: int
    max_source_length: NotRequired[int]
    labels: list[str]
    chat: bool
    generation_defaults: DefaultSampling
    provider: str
    kernels: str
    numerics: str
    bundle: str
    card: list[Measured]
    kv_cache_dtype: str
    ready: bool


class Limits(TypedDict):
    """What a request may ask for at most."""

    max_batch_inputs: int
    max_batch_tokens: int
    max_body_bytes: int
    max_queue: int
    slots: int


class DiskTierInfo(TypedDict):
    """What a model has measured of its prefix cache on disk: rates are null if nothing was lately.

    Blocks are read and written while it ``pays``: while reading a token takes less time than
    computing it.
    """

    model: str
    bytes_per_token: int
    read_bytes_per_second: float | None
    prefill_tokens_per_second: float | None
    pays: bool


class PrefixDiskInfo(TypedDict):
    """The prefix cache on disk, and why it is not used, if there is a problem."""

    problem: str
    bytes: int
    max_bytes: int
    blocks: int
    models: list[DiskTierInfo]


class ServerInfo(TypedDict):
    """The server's version, its limits and its models."""

    name: str
    version: str
    phase: Literal["loading", "serving", "draining"]
    limits: Limits
    models: list[ModelDescription]
    policies: list[str]
    prefix_disk: NotRequired[PrefixDiskInfo]


class Health(TypedDict):
    """Whether the server is alive, or ready, and what is down."""

    status: str
    error: NotRequired[str]
    models: NotRequired[list[str]]


class ModelChange(TypedDict):
    """The state of a model after a load or an unload."""

    model: str
    state: ModelState
    reason: str | None
