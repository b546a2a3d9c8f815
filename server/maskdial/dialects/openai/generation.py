"""Choices and their chunks, as completions and chat of the OpenAI dialect have them."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from maskdial.ask.unmasking import UnmaskedBlock
from maskdial.ask.write import AnyGeneration
from maskdial.causal.events import Finish, FinishReason, TokenEvent
from maskdial.causal.generate import Completion, Text, count_generated
from maskdial.causal.model import WritingModel
from maskdial.dialects.flow import Renderer
from maskdial.dialects.logprobs import usage
from maskdial.dialects.openai.errors import error_frame
from maskdial.dialects.openai.sampling import GenerationBody
from maskdial.dialects.unmasking import describe_unmasked
from maskdial.errors import MaskdialError
from maskdial.http.replies import encode_json
from maskdial.http.sse import data_frame

_SECONDS_PER_TOKEN = 2e-6  # to render one
FINISH_REASONS: Mapping[FinishReason, str] = {
    "length": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "content_filter": "content_filter",
}
DONE = data_frame(b"[DONE]")

BodyT = TypeVar("BodyT", bound=GenerationBody)


class ChoiceRenderer(Renderer, Generic[BodyT]):
    """Writes the choices of one request; the replies and chunks around them are all alike.

    Args:
        body: the request.
        generation: admitted.
        model: writes the texts.

    Attributes:
        id_prefix: of the reply's id.
        object: of a whole reply.
        chunk_object: of a stream's chunks.
        empty: what a chunk has of a choice that gets nothing.
    """

    id_prefix: str
    object: str
    chunk_object: str
    empty: Mapping[str, Any]

    def __init__(self, body: BodyT, generation: AnyGeneration, model: WritingModel) -> None:
        self._body = body
        self._prompts = generation.prompts
        self._tokenizer = model.tokenizer
        self._model_name = model.name
        self._header: dict[str, Any] = {}
        self._num_generated = 0

    @property
    def details(self) -> Mapping[str, int] | None:
        """What the generated tokens are, so far; None where there is nothing to report."""
        return None

    @abstractmethod
    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        """A finished text, without its index."""

    @abstractmethod
    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        """What a token adds to a stream: the indices and contents of the chunks to send.

        Args:
            index: of the choice that the token belongs to.
            event: the token.
        """

    def reply(self, completions: Sequence[Completion]) -> dict[str, Any]:
        content = reply_header(self.id_prefix, self.object, self._model_name)
        n = self._body.n or 1
        texts = [(each, text) for each in completions for text in each.best(n)[:n]]
        content["choices"] = [
            {"index": index} | self.choice(completion, text)
            for index, (completion, text) in enumerate(texts)
        ]
        self._num_generated = 0 if self._body.echoes_only else count_generated(completions)
        return content | self._usage()

    def seconds(self, completions: Sequence[Completion]) -> float:
        num_described = _count_described(completions) if self._body.describes_tokens else 0
        seconds = num_described * _SECONDS_PER_TOKEN * (1 + self._body.num_top)
        return seconds + super().seconds(completions)

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        self._num_generated += not self._body.echoes_only
        return b"".join(self._frame(*numbered) for numbered in self.chunks(index, event))

    async def block(self, index: int, block: UnmaskedBlock) -> bytes:
        """One chunk, which also has what the last pass has unmasked."""
        content: dict[str, Any] = dict(self.empty)
        for event in block.tokens:
            self._num_generated += not self._body.echoes_only
            for _, more in self.chunks(index, event):
                content = _joined(content, more)
        if block.unmasked is not None:
            content["unmasked"] = list(map(describe_unmasked, block.unmasked))
        return self._frame(index, content)

    def end(self) -> bytes:
        if not self._body.includes_usage:
            return DONE
        return data_frame(encode_json(self._chunk([]) | self._usage())) + DONE

    def error_frame(self, error: MaskdialError) -> bytes:
        return error_frame(error)

    def _frame(self, index: int, content: Mapping[str, Any]) -> bytes:
        """A chunk with what it adds to a choice."""
        chunk = self._chunk([{"index": index} | dict(content)])
        if self._body.continuous_usage:
            chunk |= self._usage()
        elif self._body.includes_usage:
            chunk["usage"] = None
        return data_frame(encode_json(chunk))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._header:
            self._header = reply_header(self.id_prefix, self.chunk_object, self._model_name)
        return self._header | {"choices": choices}

    def _usage(self) -> dict[str, Any]:
        return {"usage": usage(self._prompts, self._num_generated, self.details)}


def ending(finish: Finish, reason: str) -> dict[str, Any]:
    """How a choice ended, with what policies found by their rules, in the form of Azure's."""
    results = {
        each.rule: {"filtered": each.action != "flag", "detected": True, **asdict(each)}
        for each in sorted(finish.verdicts, key=lambda verdict: verdict.score)
    }
    return {"finish_reason": reason} | ({"content_filter_results": results} if results else {})


def _joined(first: Any, second: Any) -> Any:
    """What two chunks have of a choice, as one: texts and lists one after the other."""
    if isinstance(first, dict):
        keys = dict.fromkeys([*first, *second])
        return {key: _joined(first.get(key), second.get(key)) for key in keys}
    if first is None or second is None:
        return first if second is None else second
    return first + second


def _count_described(completions: Sequence[Completion]) -> int:
    """About how many tokens a reply describes."""
    num_echoed = sum(
        len(text.finish.prompt_logprobs) for each in completions for text in each.texts
    )
    return num_echoed + count_generated(completions)


def reply_header(id_prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """The fields that a reply, and every chunk of a stream, begins with."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
    }
