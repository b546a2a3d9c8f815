"""`POST /v1/chat/completions`: conversations, rendered with the model's chat template."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from fastapi import Request, Response
from pydantic import Field, model_validator

from maskdial.causal.events import TokenEvent
from maskdial.dialects.openai_errors import openai_route
from maskdial.dialects.openai_generation import answer
from maskdial.dialects.openai_logprobs import TokenSpeller, chat_logprobs
from maskdial.dialects.openai_sampling import GenerationBody
from maskdial.dialects.openai_schema import Lenient, Unsupported
from maskdial.dialects.schema import FieldError, Range, Size, join_parts, parse_body
from maskdial.models.registry import CausalModel
from maskdial.models.tokenizer import Tokenizer
from maskdial.requests import chat
from maskdial.requests.chat import ChatRequest
from maskdial.requests.generation import Completion, Generation, GenerationRequest, Text


class TextPart(Lenient):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Lenient):
    """One message of a conversation. Parts of its ``content`` are joined by newlines."""

    habits = frozenset(
        {"annotations", "audio", "name", "reasoning", "reasoning_content", "refusal"}
    )
    neutral = {"tool_calls": ([],)}  # noqa: RUF012

    role: Literal["developer", "system", "user", "assistant"]
    content: Annotated[
        str, pydantic.BeforeValidator(join_parts, json_schema_input_type=str | list[TextPart])
    ]

    def neutral_message(self) -> chat.Message:
        """The message as part of a dialect-neutral request."""
        role = "system" if self.role == "developer" else self.role
        return chat.Message(role, self.content)


class ToolFields(Lenient):
    """The fields of tool calls and of reasoning."""

    tools: Annotated[Any, Unsupported("tool calls are not supported")] = None
    tool_choice: Annotated[Any, Unsupported("tool calls are not supported")] = None
    functions: Annotated[Any, Unsupported("tool calls are not supported")] = None
    function_call: Annotated[Any, Unsupported("tool calls are not supported")] = None
    reasoning_effort: Annotated[Any, Unsupported("reasoning is not supported")] = None
    chat_template_kwargs: Annotated[
        Any, Unsupported("variables of the chat template are not supported")
    ] = None


_NO_TOOLS: Mapping[str, tuple[object, ...]] = {
    "chat_template_kwargs": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class ChatBody(GenerationBody, ToolFields):
    """A conversation to answer."""

    habits = GenerationBody.habits | {"verbosity"}
    neutral = {  # noqa: RUF012
        **GenerationBody.neutral,
        **_NO_TOOLS,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "continue_final_message": (False,),
        "echo": (False,),
        "modalities": (["text"],),
    }

    messages: Annotated[list[Message], Size(1, 1024, "messages")]
    max_tokens: Annotated[int, Range(1)] | None = Field(
        None, description="The older name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Range(1)] | None = Field(
        None, description="Maximum number of tokens to generate. Default: what the context leaves."
    )
    logprobs: bool | None = Field(None, description="Describe each token. Default: false.")
    top_logprobs: Annotated[int, Range(0, 20)] | None = Field(
        None, description="Describe each token with this many of the most likely ones. Default: 0."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "set logprobs to true as well")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise FieldError("max_tokens", "also given as max_completion_tokens; leave it out")
        return self

    @property
    def batch(self) -> bool:
        return False

    @property
    def describes_tokens(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    def names(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_tokens else "max_completion_tokens"
        return {**super().names(), "prompts": "messages", "max_new_tokens": limit}

    def chat_request(self, model: CausalModel) -> ChatRequest:
        """The body as a dialect-neutral request."""
        return ChatRequest(
            [message.neutral_message() for message in self.messages],
            GenerationRequest(
                params=self.sampling_params(top_n_tokens=self.num_top, prompt_logprobs=False),
                max_new_tokens=self.max_completion_tokens or self.max_tokens or model.max_length,
                num_sequences=self.n or 1,
                grammar=self.grammar(),
                truncate=self.truncate_prompt_tokens,
                priority=self.priority or 0,
                cache_salt=self.cache_salt or "",
                describe_tokens=self.describes_tokens,
            ),
        )

    def request(self, model: CausalModel) -> GenerationRequest:
        return self.chat_request(model).generation_for(model)


class ChatWriter:
    """Writes messages, and their deltas in streams."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation, tokenizer: Tokenizer) -> None:
        self._body = body
        (self._prompt,) = generation.prompts
        self._tokenizer = tokenizer
        self._spellers: list[TokenSpeller] = []
        """One for each choice of a stream that has begun."""

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        """The answer as a message."""
        content = {"role": "assistant", "content": text.finish.generated_text, "refusal": None}
        logprobs = None
        if self._body.describes_tokens:
            logprobs = chat_logprobs(text.events, self._speller())
        return {"message": content, "logprobs": logprobs}

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        """One delta per token; the first of a choice has its role.

        The SDK takes choices by their indices as they appear, so those before this one begin first.
        """
        delta: dict[str, Any] = {"content": event.text}
        while len(self._spellers) <= index:
            begun = len(self._spellers)
            self._spellers.append(self._speller())
            if begun < index:
                yield begun, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            else:
                delta = {"role": "assistant"} | delta
        logprobs = None
        if self._body.describes_tokens:
            logprobs = chat_logprobs([event], self._spellers[index])
        yield index, {"delta": delta, "logprobs": logprobs}

    def _speller(self) -> TokenSpeller:
        return TokenSpeller(self._tokenizer, self._prompt.ids)


async def chat_completions(request: Request) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    body = parse_body(ChatBody, await request.body())

    def writer(generation: Generation, model: CausalModel) -> ChatWriter:
        return ChatWriter(body, generation, model.tokenizer)

    # InferenceClient names a model that does not exist where the path names it.
    return await answer(request, body, writer, request.path_params.get("name"))


ROUTES = tuple(
    openai_route(f"{prefix}/v1/chat/completions", chat_completions, ChatBody)
    for prefix in ("", "/models/{name}")
)
