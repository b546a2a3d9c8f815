"""What the clients' methods take: the shapes of inputs, and the parameters of each task."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

ClassifyInput = str | tuple[str, str]
"""A text, or a pair of texts."""
ClassifyBatch = list[str] | list[tuple[str, str]] | list[ClassifyInput]

Question = tuple[str, str]
"""A question, and the text that holds its answer."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings of ``role`` and ``content``, the latter a text or a list of parts."""


class TaskOptions(TypedDict, total=False):
    """``deadline``: seconds after which the server itself gives up (DeadlineError).

    A deadline longer than the client's own timeout needs a longer timeout.
    """

    deadline: float | None


class TextOptions(TaskOptions, total=False):
    """``truncate`` a text that is longer than the model, at the end of ``truncation_direction``.

    Without it such a text is refused. None means not given.
    """

    truncate: bool | None
    truncation_direction: Literal["left", "right"] | None


class FillMaskParameters(TextOptions, total=False):
    """``top_k`` candidates a mask; ``targets`` scores these words only. None means not given."""

    top_k: int | None
    targets: list[str] | None


class ClassifyParameters(TextOptions, total=False):
    """``top_k`` labels a text; what is done to the logits. None means not given."""

    top_k: int | None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None


class TokenClassifyParameters(TaskOptions, total=False):
    """How tokens become entities, and which labels are left out. None means not given.

    A long text is read in windows, of which two neighbours share ``stride`` tokens.
    """

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None
    ignore_labels: list[str] | None
    stride: int | None


class QuestionAnsweringParameters(TaskOptions, total=False):
    """``top_k`` answers a question; lengths are in tokens. None means not given.

    A long context is read in windows of ``max_seq_len`` tokens, of which two neighbours share
    ``doc_stride``.
    """

    top_k: int | None
    doc_stride: int | None
    max_answer_len: int | None
    max_question_len: int | None
    max_seq_len: int | None
    handle_impossible_answer: bool | None
    align_to_words: bool | None


class ZeroShotClassifyParameters(TextOptions, total=False):
    """With ``multi_label`` each label is judged for itself. None means not given.

    ``hypothesis_template`` is a sentence with ``{}`` for the label.
    """

    multi_label: bool | None
    hypothesis_template: str | None


class EmbedParameters(TextOptions, total=False):
    """Whether vectors have length 1; how many ``dimensions`` to keep. None means not given."""

    normalize: bool | None
    dimensions: int | None


class RerankParameters(TextOptions, total=False):
    """``raw_scores``: logits; ``return_text``: with the texts. None means not given."""

    raw_scores: bool | None
    return_text: bool | None


class TokenizeParameters(TaskOptions, total=False):
    """Whether the model's special tokens are put around a text. None means not given."""

    add_special_tokens: bool | None


class DetokenizeParameters(TaskOptions, total=False):
    """Whether special tokens are left out. None means not given."""

    skip_special_tokens: bool | None


class Grammar(TypedDict):
    """What a text has to be: a JSON schema, a regular expression or a Lark grammar."""

    type: Literal["json", "json_schema", "regex", "lark"]
    value: Any


class SamplingParameters(TaskOptions, total=False):
    """How a text is generated. None means not given; a temperature of 0 is greedy.

    ``priority`` (lower is earlier) and ``cache_salt`` (prompts share cached prefixes only under the
    same one) are the request's, the others its parameters.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    return_full_text: bool | None
    truncate: int | None
    top_n_tokens: int | None
    grammar: Grammar | None
    priority: int | None
    cache_salt: str | None


class GenerateParameters(SamplingParameters, total=False):
    """``n`` texts, the best of ``best_of``; the prompt's tokens if ``decoder_input_details``."""

    n: int | None
    best_of: int | None
    decoder_input_details: bool | None
