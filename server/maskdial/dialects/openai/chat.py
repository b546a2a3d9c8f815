"""`POST /v1/chat/completions`: conversations, rendered with the model's chat template."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from fastapi import Response
from pydantic import Field, model_validator

from maskdial.ask.write import AnyGeneration
from maskdial.bounds import Range, Size
from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.chat.documents import document_of
from maskdial.causal.chat.request import ChatRequest, ReplyFinish, ReplyReader, read_reply
from maskdial.causal.drafts.sources import PredictionFollower
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.causal.model import WritingModel
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolChoice,
)
from maskdial.dialects.body import MAX_MESSAGES, FieldError, example
from maskdial.dialects.call import Call
from maskdial.dialects.flow import write
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.logprobs import chat_logprobs
from maskdial.dialects.openai.calls import CallWriter
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.generation import FINISH_REASONS, ChoiceRenderer, ending
from maskdial.dialects.openai.messages import Message, PredictionBody, check_opening
from maskdial.dialects.openai.replies import ChatReply
from maskdial.dialects.openai.sampling import GenerationBody
from maskdial.dialects.openai.tools import ToolChoiceInput, Tools
from maskdial.dialects.unsupported import Unsupported
from maskdial.http.ignored import note_field, noted

_USE_TOOLS = "the older form of tool calls is not supported; send tools and tool_choice"


_EFFORT = "A variable of the chat template, such as low; none also sets enable_thinking to false."


class ReasoningBody(Lenient):
    """OpenRouter's way to say how much to think."""

    within = "reasoning"

    max_tokens: Annotated[int, Range(0)] | None = Field(
        None, description="Another name of thinking_budget."
    )
    effort: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="Another name of reasoning_effort."
    )
    enabled: bool | None = Field(None, description="Another name of enable_thinking.")
    exclude: bool | None = Field(None, description="The opposite of include_reasoning.")


class ThinkingBody(Lenient):
    """DeepSeek's and GLM's way to say whether to think."""

    within = "thinking"

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class ChatBody(GenerationBody):
    """A conversation to answer."""

    model_config = example(
        {"messages": [{"role": "user", "content": "Who lives here?"}], "max_tokens": 40}
    )

    habits = (GenerationBody.habits - {"parallel_tool_calls"}) | {"verbosity", "audio"}
    neutral = {  # noqa: RUF012
        **GenerationBody.neutral,
        "add_special_tokens": (False,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "max_completion_tokens": (-1,),
        "modalities": (["text"],),
    }

    messages: Annotated[list[Message], Size(1, MAX_MESSAGES, "messages")]
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
    tools: Tools | None = Field(
        None,
        description="Functions, and custom tools, that the model may call. Tools of other types "
        "are left out, and named in the header x-ignored-tools.",
    )
    tool_choice: ToolChoiceInput | None = Field(
        None,
        description="none, auto, required (or any), a tool, or some of them. Default: auto.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether a reply may call several functions. Default: true."
    )
    reasoning_effort: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description=_EFFORT
    )
    thinking_budget: Annotated[int, Range(0)] | None = Field(
        None,
        description="Extension: tokens of reasoning after which the answer begins. Default: any "
        "number.",
    )
    reasoning: ReasoningBody | None = Field(None, description="Extension: how much of it.")
    thinking: ThinkingBody | None = Field(
        None, description="Extension: whether to think; disabled sets enable_thinking to false."
    )
    enable_thinking: bool | None = Field(
        None, description="Extension: a variable of the chat template."
    )
    include_reasoning: bool | None = Field(
        None, description="Extension: whether the reply has the reasoning. Default: true."
    )
    prediction: PredictionBody | None = Field(
        None,
        description="What the reply is expected to be like, such as the file to be edited: the "
        "same reply, sooner where it is.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], Size(0, 64, "variables")] | None = Field(
        None, description="Extension: further variables of the chat template."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Extension: open the assistant's next turn after the messages. Default: true, "
        "unless continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        None,
        description="Extension: go on with the content of the final message. Default: false.",
    )
    documents: Annotated[list[dict[str, Any]], Size(1, 1024, "documents")] | None = Field(
        None,
        description="Extension: what to answer from, for the chat template, or as a system "
        "message; each with a text, and possibly a title.",
    )
    functions: Annotated[Any, Unsupported(_USE_TOOLS)] = None
    function_call: Annotated[Any, Unsupported(_USE_TOOLS)] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "set logprobs to true as well")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            if noted() is None:
                raise FieldError("max_tokens", "also given as max_completion_tokens; leave it out")
            note_field("max_tokens")
        if None not in (self.thinking_budget, self.reasoning and self.reasoning.max_tokens):
            raise FieldError("reasoning", "thinking_budget is given as well; leave one of them out")
        check_opening(self.add_generation_prompt, self.continue_final_message)
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
        limit = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        names = {
            **super().names(),
            "prompts": "messages",
            "max_new_tokens": limit,
        }
        if self.tools and self.constraint is None:
            names["grammar"] = "tools"
        return names

    def chat(self, model: WritingModel) -> ChatRequest:
        """The body as a dialect-neutral request."""
        choice, prediction = self.tool_choice, self.prediction
        reasoning = self.reasoning or ReasoningBody()
        budget, effort = self.thinking_budget, self.reasoning_effort
        limit = self.max_completion_tokens or self.max_tokens
        return ChatRequest(
            [message.to_message() for message in self.messages],
            self.generation(
                model.defaults,
                max_new_tokens=limit or self.rest_of_context(model, self.n or 1),
                is_limited=limit is not None,
                num_sequences=self.n or 1,
                prediction="" if prediction is None else prediction.content,
            ),
            tools=[tool.to_tool() for tool in self.tools or ()],
            tool_choice=ToolChoice() if choice is None else choice.to_choice(),
            reasoning_effort=reasoning.effort if effort is None else effort,
            thinking_budget=reasoning.max_tokens if budget is None else budget,
            template_variables=self._variables(reasoning.enabled),
            documents=[document_of(each) for each in self.documents or ()],
            **self.given("parallel_tool_calls", "add_generation_prompt", "continue_final_message"),
        )

    def _variables(self, enabled: bool | None) -> dict[str, Any]:
        """The variables of the chat template."""
        if self.thinking is not None:
            enabled = self.thinking.type != "disabled"
        if self.enable_thinking is not None:
            enabled = self.enable_thinking
        own = {} if enabled is None else {"enable_thinking": enabled}
        return own | (self.chat_template_kwargs or {})

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of tools that take a text."""
        return frozenset(tool.custom.name for tool in self.tools or () if tool.custom is not None)

    @property
    def shows_reasoning(self) -> bool:
        """Whether the reply has the reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded


class ChatRenderer(ChoiceRenderer[ChatBody]):
    """Writes messages, and their deltas in streams."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    empty = {"delta": {}, "logprobs": None, "finish_reason": None}  # noqa: RUF012
    seconds_per_token = 5e-6  # to tell calls and reasoning from the text

    def __init__(
        self, body: ChatBody, chat: ChatRequest, generation: AnyGeneration, model: WritingModel
    ) -> None:
        super().__init__(body, generation, model)
        self._request = chat
        (self._prompt,) = generation.prompts
        self._model = model
        self._streams: list[_Stream] = []
        """One for each choice of a stream that has begun."""
        self._num_reasoning = 0
        self._followers: list[PredictionFollower] = []
        """One for each text, if there is a prediction."""

    @property
    def details(self) -> Mapping[str, int]:
        """Tokens of the reasoning so far, and of the prediction."""
        reading = (each.reader.num_reasoning for each in self._streams)
        counts = {"reasoning_tokens": self._num_reasoning + sum(reading)}
        if self._body.prediction is not None:
            counts["accepted_prediction_tokens"] = sum(f.num_right for f in self._followers)
            counts["rejected_prediction_tokens"] = sum(f.num_wrong for f in self._followers)
        return counts

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        """The answer as a message."""
        reply = read_reply(self._request, completion.prompt, text.events, self._model)
        self._num_reasoning += reply.num_reasoning
        self._follow(len(self._followers), text.events)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.content,
            "refusal": None,
            "annotations": [],
        }
        if reply.reasoning and self._body.shows_reasoning:
            message |= _reasoning(reply.reasoning)
        if reply.tool_calls:
            calls = CallWriter(self._body.custom_tools)
            message["content"] = reply.content or None
            message["tool_calls"] = [calls.whole(call) for call in reply.tool_calls]
        logprobs = None
        if self._body.describes_tokens:
            logprobs = chat_logprobs(text.events, self._speller())
        return {
            "message": message,
            "logprobs": logprobs,
            **ending(text.finish, _finish_reason(reply.finish_reason)),
        }

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        """One chunk per token; the first of a choice has its role.

        The SDK takes choices by their indices as they appear, so those before this one begin first.
        """
        delta: dict[str, Any] = {}
        while len(self._streams) <= index:
            begun = len(self._streams)
            reader = ReplyReader(self._request, self._prompt, self._model)
            writer = CallWriter(self._body.custom_tools)
            self._streams.append(_Stream(reader, writer, self._speller()))
            if begun < index:
                first = {"role": "assistant", "content": ""}
                yield begun, {"delta": first, "logprobs": None, "finish_reason": None}
            else:
                delta = {"role": "assistant"}
        self._follow(index, [event])
        stream = self._streams[index]
        calls = []
        for part in stream.reader.push(event):
            if isinstance(part, ToolCallDelta):
                calls += stream.calls.push(part)
            elif self._body.shows_reasoning or not isinstance(part, ReasoningDelta):
                _add(delta, part)
        reason = stream.reader.finish_reason
        if reason is not None:
            calls += stream.calls.finish()
        if calls:
            delta["tool_calls"] = calls
        if reason is not None and not stream.reader.num_calls:
            delta.setdefault("content", "")  # an empty text is not null, as it is beside calls
        logprobs = None
        if self._body.describes_tokens:
            logprobs = chat_logprobs([event], stream.speller)
        chunk = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if reason is not None and event.finish is not None:
            chunk |= ending(event.finish, _finish_reason(reason))
        yield index, chunk

    def _follow(self, index: int, events: Iterable[TokenEvent]) -> None:
        """Compares tokens of a text with the prediction."""
        if self._body.prediction is None:
            return
        while len(self._followers) <= index:
            self._followers.append(PredictionFollower(self._prompt.sequences[0].prediction))
        for event in events:
            self._followers[index].push(event.token_id)

    def _speller(self) -> TokenSpeller:
        return TokenSpeller(self._model.tokenizer, self._prompt.ids)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A choice that is being streamed."""

    reader: ReplyReader
    calls: CallWriter
    speller: TokenSpeller


def _add(delta: dict[str, Any], part: ContentDelta | ReasoningDelta) -> None:
    """Adds a part of a reply to what a chunk says of it."""
    match part:
        case ContentDelta(text):
            delta["content"] = delta.get("content", "") + text
        case ReasoningDelta(text):
            delta |= _reasoning(text)


def _reasoning(text: str) -> dict[str, Any]:
    """Clients read one name or the other."""
    return {"reasoning": text, "reasoning_content": text}


def _finish_reason(reason: ReplyFinish) -> str:
    return reason if reason == "tool_calls" else FINISH_REASONS[reason]


async def chat_completions(call: Call[ChatBody]) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    model = await call.writer()
    body = call.body
    chat = body.chat(model)
    generation = await call.generation(chat, model)
    renderer = ChatRenderer(body, chat, generation, model)
    return await write(call, generation, renderer, streams=bool(body.stream))


# InferenceClient names a model that does not exist where the path names it; llama.cpp has its paths
# also without a version.
ROUTES = tuple(
    FORM.route(path, chat_completions, ChatBody, ChatReply, streams=True)
    for path in (
        "/v1/chat/completions",
        "/chat/completions",
        "/models/{name:path}/v1/chat/completions",
    )
)
