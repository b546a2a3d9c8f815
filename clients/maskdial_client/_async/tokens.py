"""Tokens: texts to tokens and back, and the log-probability of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import TaskOptions, TextOptions, flat_body, task_body, task_call


class TokenizeParameters(TaskOptions, total=False):
    """Parameters of ``tokenize``. None means the server's default.

    ``add_special_tokens`` adds the model's special tokens around the text.
    """

    add_special_tokens: bool | None


class DetokenizeParameters(TaskOptions, total=False):
    """Parameters of ``detokenize``. None means the server's default.

    ``skip_special_tokens`` leaves special tokens out of the text.
    """

    skip_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a given text. ``logprob`` is None if the model does not predict the token."""

    id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TextScore:
    """How likely a text is; ``log_likelihood`` is the sum of the tokens' ``logprob``.

    ``perplexity`` is exp(-mean logprob), None if no token has a ``logprob``. ``method`` is
    ``causal`` (each token given the ones before it) or ``pseudo`` (each given all the others).
    """

    tokens: tuple[PromptToken, ...]
    log_likelihood: float
    perplexity: float | None
    method: str


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token, and its character offsets into the text, ``stop`` exclusive.

    The offsets are None for special tokens that the tokenizer added.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class AsyncTokens(AsyncCaller):
    """The methods for /score, /tokenize and /detokenize."""

    @overload
    async def score(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> TextScore: ...
    @overload
    async def score(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> list[TextScore]: ...
    async def score(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TextOptions],
    ) -> TextScore | list[TextScore]:
        """The log-probability of a text and of its tokens; for a list, one result per text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/score", inputs, body, parse_score, always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def tokenize(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenizeParameters],
    ) -> tuple[TextToken, ...]: ...
    @overload
    async def tokenize(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenizeParameters],
    ) -> list[tuple[TextToken, ...]]: ...
    async def tokenize(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenizeParameters],
    ) -> tuple[TextToken, ...] | list[tuple[TextToken, ...]]:
        """The tokens of a text; for a list, one result per text."""
        body = flat_body({"inputs": inputs}, model, parameters)
        call = task_call("/tokenize", inputs, body, parse_text_tokens, always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def detokenize(
        self,
        ids: list[int],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[DetokenizeParameters],
    ) -> str: ...
    @overload
    async def detokenize(
        self,
        ids: list[list[int]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[DetokenizeParameters],
    ) -> list[str]: ...
    async def detokenize(
        self,
        ids: list[int] | list[list[int]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[DetokenizeParameters],
    ) -> str | list[str]:
        """The text of a list of token ids; for a list of such lists, one text per list."""
        batch = bool(ids) and isinstance(ids[0], list)
        body = flat_body({"ids": ids}, model, parameters)
        texts = ids if batch else None
        call = task_call("/detokenize", texts, body, parse_text, always_list=True)
        results = await self._send(call, timeout)
        return results if batch else results[0]


def parse_score(entry: Mapping[str, Any]) -> TextScore:
    """The score of one text."""
    return TextScore(
        tokens=parse_prompt_tokens(entry["tokens"]),
        log_likelihood=float(entry["log_likelihood"]),
        perplexity=entry["perplexity"],
        method=str(entry["method"]),
    )


def parse_prompt_tokens(items: Sequence[Mapping[str, Any]] | None) -> tuple[PromptToken, ...]:
    """The tokens of one text, with their log-probabilities."""
    return tuple(
        PromptToken(int(item["id"]), str(item["text"]), item.get("logprob")) for item in items or ()
    )


def parse_text_tokens(entry: Sequence[Mapping[str, Any]]) -> tuple[TextToken, ...]:
    """The tokens of one text, with their offsets."""
    return tuple(
        TextToken(
            id=int(item["id"]),
            text=str(item["text"]),
            special=bool(item["special"]),
            start=item["start"],
            stop=item["stop"],
        )
        for item in entry
    )


def parse_text(entry: Any) -> str:
    """One text."""
    if not isinstance(entry, str):
        raise TypeError("expected a string")
    return entry
