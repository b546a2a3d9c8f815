"""What the server's replies become: frozen dataclasses, one per thing that a reply can hold."""

from dataclasses import dataclass

Embedding = list[float]
"""A text's vector."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One candidate for a masked position.

    ``score`` is its probability over the whole vocabulary, ``sequence`` the text with it filled in
    (the other masks of the text stay masks).
    """

    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, slots=True)
class FillMaskResult:
    """The candidates for every mask of one text, in the text's order, best candidate first."""

    masks: tuple[tuple[Fill, ...], ...]

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The candidates of the only mask. Raises ValueError when the text had several."""
        if len(self.masks) != 1:
            raise ValueError(f"the text has {len(self.masks)} masks: read .masks, one entry each")
        return self.masks[0]


@dataclass(frozen=True, slots=True)
class LabelScore:
    """One label of a classifier, and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """The labels of one text, best first."""

    labels: tuple[LabelScore, ...]

    @property
    def label(self) -> str:
        """The best label."""
        return self.labels[0].label

    @property
    def score(self) -> float:
        """The best label's score."""
        return self.labels[0].score


@dataclass(frozen=True, slots=True)
class Entity:
    """A stretch of a text and its label: an entity's, or with aggregation ``none`` one token's.

    ``start`` and ``end`` count the text's characters, the end exclusive. ``index`` is the token's
    place among the text's tokens; an entity of several has none.
    """

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a question, and where it stands in the context, in characters.

    It is empty where the context holds no answer, which only ``handle_impossible_answer`` allows.
    """

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one question, best first: as many as ``top_k``, or one."""

    answers: tuple[Answer, ...]

    @property
    def answer(self) -> str:
        """The best answer."""
        return self.answers[0].answer

    @property
    def score(self) -> float:
        """The best answer's score."""
        return self.answers[0].score


@dataclass(frozen=True, slots=True)
class RankedText:
    """A text's place in the given list, and how well it answers the query.

    ``text`` is there with ``return_text``.
    """

    index: int
    score: float
    text: str | None


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token of a text, and the characters of the text from ``start`` to ``stop``, exclusive.

    A special token that was put around the text is no part of it, and has neither.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a given text. ``logprob`` is None where nothing comes before it."""

    id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TextScore:
    """How likely a model finds a text; ``log_likelihood`` is the sum of the tokens' ``logprob``.

    ``perplexity`` is the exponential of minus their mean, None where no token has one. ``method``
    is causal (each token after those before it) or pseudo (each among all others).
    """

    tokens: tuple[PromptToken, ...]
    log_likelihood: float
    perplexity: float | None
    method: str


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token. ``special`` ones (end of text, say) are no part of the text."""

    id: int
    text: str
    logprob: float | None
    special: bool


@dataclass(frozen=True, slots=True)
class GenerationDetails:
    """How a text came about. ``finish_reason`` is length, eos_token or stop_sequence.

    ``input_length`` counts the prompt's tokens; ``prefill`` holds them with their log-probabilities
    if ``decoder_input_details`` was given. With ``top_n_tokens``, ``top_tokens`` has for each token
    the likeliest ones in its place. ``best_of_sequences`` are the other texts of ``best_of``.
    """

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: tuple[PromptToken, ...]
    tokens: tuple[Token, ...]
    input_length: int | None = None
    top_tokens: tuple[tuple[Token, ...], ...] = ()
    best_of_sequences: "tuple[Generation, ...]" = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text; ``details`` only when they were asked for.

    With ``n``, it is the first of the texts and ``others`` are the rest.
    """

    generated_text: str
    details: GenerationDetails | None
    others: "tuple[Generation, ...]" = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All ``n`` texts, in the reply's order."""
        return (self.generated_text, *(other.generated_text for other in self.others))


@dataclass(frozen=True, slots=True)
class StreamDetails:
    """How a streamed text ended. ``finish_reason`` is length, eos_token or stop_sequence."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int | None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream: a token, and with the last one the whole text and its details.

    With ``top_n_tokens``, ``top_tokens`` are the likeliest ones in the token's place.
    """

    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    top_tokens: tuple[Token, ...] = ()

    @property
    def text(self) -> str:
        """The text that this event adds: the token's, or nothing for a special token."""
        return "" if self.token.special else self.token.text


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. ``family`` is masked or causal, ``max_length`` its limit in tokens."""

    name: str
    family: str
    tasks: tuple[str, ...]
    architecture: str
    precision: str
    batch_invariant: bool
    max_length: int
    labels: tuple[str, ...]
    provider: str
    ready: bool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server: its version, its phase of life, its limits by name, and what it serves."""

    version: str
    phase: str
    limits: dict[str, int]
    models: tuple[ModelInfo, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server takes requests, the state it names, and the models that are down."""

    ready: bool
    status: str
    models_down: tuple[str, ...]
