"""Text to text: summaries and translations, by encoder-decoder models."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import TaskOptions, task_body, task_call


class WritingParameters(TaskOptions, total=False):
    """Parameters of ``summarize`` and ``translate``. None means the checkpoint's default.

    ``num_beams`` of more than 1 is a beam search. With ``truncate`` a source text that is too long
    loses its end, instead of being refused.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    seed: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    no_repeat_ngram_size: int | None
    truncate: bool | None


class AsyncTextToText(AsyncCaller):
    """The methods for /summarize and /translate."""

    @overload
    async def summarize(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[WritingParameters],
    ) -> str: ...
    @overload
    async def summarize(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[WritingParameters],
    ) -> list[str]: ...
    async def summarize(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[WritingParameters],
    ) -> str | list[str]:
        """The summary of a text; for a list, one per text."""
        body = task_body({"inputs": inputs}, model, _parameters(parameters))
        call = task_call("/summarize", inputs, body, _parse("summary_text"), always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def translate(
        self,
        inputs: str,
        *,
        source: str | None = None,
        target: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[WritingParameters],
    ) -> str: ...
    @overload
    async def translate(
        self,
        inputs: list[str],
        *,
        source: str | None = None,
        target: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[WritingParameters],
    ) -> list[str]: ...
    async def translate(
        self,
        inputs: str | list[str],
        *,
        source: str | None = None,
        target: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[WritingParameters],
    ) -> str | list[str]:
        """The translation of a text; for a list, one per text.

        ``source`` and ``target`` are the model's codes of the languages, where it has several.
        """
        languages = {"src_lang": source, "tgt_lang": target}
        body = task_body({"inputs": inputs}, model, {**_parameters(parameters), **languages})
        call = task_call("/translate", inputs, body, _parse("translation_text"), always_list=True)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as the routes take them: those of the text in an object of their own."""
    options = {name: given.get(name) for name in TaskOptions.__annotations__}
    generation = {
        name: value
        for name, value in given.items()
        if value is not None and name != "truncate" and name not in options
    }
    return {
        **options,
        "truncation": "longest_first" if given.get("truncate") else None,
        "generate_parameters": generation or None,
    }


def _parse(key: str) -> Callable[[Mapping[str, Any]], str]:
    def parse(entry: Mapping[str, Any]) -> str:
        return str(entry[key])

    return parse
