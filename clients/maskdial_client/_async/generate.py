"""Generation: texts from a prompt or a conversation, each in one reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client._async.fill_mask import Order
from maskdial_client._async.tokens import PromptToken, parse_prompt_tokens
from maskdial_client.call import Grammar, TaskOptions, task_body, task_call

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with ``role`` and ``content``, which is a text or a list of parts."""


class SamplingParameters(TaskOptions, total=False):
    """Parameters of ``generate`` and ``stream``. None means the server's default.

    A temperature of 0 is greedy. Of a client's requests, those with a lower ``priority`` start
    first. Prompts share cached prefixes only with prompts of the same ``cache_salt``. Languages are
    for encoder-decoder models; ``block_length``, ``steps``, ``order`` and ``threshold`` for text by
    unmasking, with a ``mask`` of ``full``.
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
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: list[str] | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    mirostat: Literal[0, 2] | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float | Literal[False]] | None
    bad_words: list[str] | None
    seed: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    return_full_text: bool | None
    truncate: int | None
    top_n_tokens: int | None
    grammar: Grammar | None
    no_repeat_ngram_size: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    src_lang: str | None
    tgt_lang: str | None
    block_length: int | None
    steps: int | None
    order: Order | None
    threshold: float | None
    priority: int | None
    cache_salt: str | None


class GenerateParameters(SamplingParameters, total=False):
    """Parameters of ``generate``. None means the server's default.

    ``n`` texts are returned, the best of ``best_of``. ``decoder_input_details`` adds the prompt's
    tokens to the details.
    """

    n: int | None
    best_of: int | None
    decoder_input_details: bool | None


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token. Those with ``special``, such as end of text, are not part of the text."""

    id: int
    text: str
    logprob: float | None
    special: bool


@dataclass(frozen=True, slots=True)
class GenerationDetails:
    """How a text was generated. ``finish_reason`` is length, eos_token or stop_sequence.

    ``input_length`` is the length of the prompt in tokens; ``prefill`` holds these tokens if
    ``decoder_input_details`` was set. With ``top_n_tokens``, ``top_tokens`` has the most likely
    tokens at each position of ``tokens``. ``best_of_sequences`` are the other texts of ``best_of``.
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
    """A generated text. ``details`` is None unless the call asked for them.

    With ``n``, this is the first text, and ``others`` are the rest.
    """

    generated_text: str
    details: GenerationDetails | None
    others: "tuple[Generation, ...]" = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All ``n`` texts, in the order of the reply."""
        return (self.generated_text, *(other.generated_text for other in self.others))


class AsyncGenerate(AsyncCaller):
    """The method for /generate without streaming."""

    @overload
    async def generate(
        self,
        prompt: str,
        *,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation: ...
    @overload
    async def generate(
        self,
        prompt: list[str],
        *,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> list[Generation]: ...
    @overload
    async def generate(
        self,
        *,
        messages: Messages,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation: ...
    async def generate(
        self,
        prompt: str | list[str] | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation | list[Generation]:
        """Continues a prompt, or answers a conversation; for a list, one result per prompt.

        With ``details`` the results carry the tokens and their log-probabilities.
        """
        inputs = prompt_inputs(prompt, messages)
        body = task_body(inputs, model, {**parameters, "details": details or None})
        call = task_call("/generate", prompt, body, parse_generation)
        results = await self._send(call, timeout)
        return results if isinstance(prompt, list) else results[0]


def prompt_inputs(prompt: str | list[str] | None, messages: Messages | None) -> dict[str, Any]:
    """The field of the body with the prompt or the conversation. Raises ValueError for both."""
    if (prompt is None) == (messages is None):
        raise ValueError("pass either a prompt or messages")
    if messages is None:
        return {"inputs": prompt}
    return {"messages": [dict(message) for message in messages]}


def parse_generation(document: Any) -> Generation:
    """One text, or the list that ``n`` makes of it."""
    if not isinstance(document, list):
        return _generation(document)
    first, *others = (_generation(item) for item in document)
    return replace(first, others=tuple(others))


def _generation(document: Mapping[str, Any]) -> Generation:
    details = document.get("details")
    return Generation(
        generated_text=str(document["generated_text"]),
        details=None if details is None else _details(details),
    )


def _details(details: Mapping[str, Any]) -> GenerationDetails:
    return GenerationDetails(
        finish_reason=str(details["finish_reason"]),
        generated_tokens=int(details["generated_tokens"]),
        seed=details.get("seed"),
        prefill=parse_prompt_tokens(details.get("prefill")),
        tokens=parse_tokens(details.get("tokens")),
        input_length=details.get("input_length"),
        top_tokens=tuple(parse_tokens(items) for items in details.get("top_tokens") or ()),
        best_of_sequences=tuple(
            Generation(str(item["generated_text"]), _details(item))
            for item in details.get("best_of_sequences") or ()
        ),
    )


def parse_tokens(items: Sequence[Mapping[str, Any]] | None) -> tuple[Token, ...]:
    """Generated tokens."""
    return tuple(parse_token(item) for item in items or ())


def parse_token(item: Mapping[str, Any]) -> Token:
    """A generated token."""
    return Token(int(item["id"]), str(item["text"]), item.get("logprob"), bool(item["special"]))
