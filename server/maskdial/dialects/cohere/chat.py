"""`POST /v2/chat`: conversations, as Cohere has them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import Field

from maskdial.bounds import Range, Size
from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.chat.documents import document_of
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import MAX_DESCRIBED
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import Count, Penalty, Share
from maskdial.causal.tools import ToolChoice
from maskdial.dialects.body import MAX_MESSAGES, TaskBody, example
from maskdial.dialects.call import Call
from maskdial.dialects.cohere.errors import FORM
from maskdial.dialects.cohere.events import CohereChatReply, ReplyRenderer
from maskdial.dialects.cohere.messages import CohereMessage, ToolBody
from maskdial.dialects.flow import write
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.sampling import CommonSampling, Seed, Stops, parameter
from maskdial.grammar.source import GrammarRequest


class ResponseFormat(Lenient):
    """What the text must be: with json_object JSON, of the schema if there is one."""

    within = "response_format"
    renamed = {"schema": "json_schema"}  # noqa: RUF012

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None


class ThinkingBody(Lenient):
    """Whether the model thinks before it answers, where its chat template can be told."""

    within = "thinking"

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, Range(1)] | None = Field(
        None, description="Tokens of thinking after which the answer begins. Default: any number."
    )


class Document(Lenient):
    """A document, with whatever fields it has."""

    habits = frozenset({"id"})
    within = "documents"

    data: dict[str, Any]


class CohereChatBody(CommonSampling, Lenient, TaskBody):
    """A conversation to answer. ``timeout`` is an extension."""

    habits = frozenset({"priority"})
    neutral = {"documents": ([],), "tools": ([],)}  # noqa: RUF012
    model_config = example(
        {"messages": [{"role": "user", "content": "Who lives here?"}], "max_tokens": 40}
    )

    messages: Annotated[list[CohereMessage], Size(1, MAX_MESSAGES, "messages")]
    stream: bool | None = Field(None, description="Send server-sent events. Default: false.")
    tools: list[ToolBody] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["REQUIRED", "NONE"] | None = Field(
        None, description="Whether the model must call a tool, or must not. Default: it may."
    )
    strict_tools: bool | None = Field(
        None, description="Arguments satisfy the tools' schemas either way."
    )
    response_format: ResponseFormat | None = None
    max_tokens: Annotated[int, Range(1)] | None = Field(
        None, description="Maximum number of tokens to generate. Default: what the context leaves."
    )
    stop: Stops | None = Field(
        None,
        alias="stop_sequences",
        description="Texts that end the answer; they are not included in it.",
    )
    top_k: Count | None = parameter("top_k", "k")
    top_p: Share | None = parameter("top_p", "p")
    seed: Seed | None = Field(None, description="Random seed. Default: a new one.")
    frequency_penalty: Penalty | None = parameter("frequency_penalty")
    presence_penalty: Penalty | None = parameter("presence_penalty")
    logprobs: bool | None = Field(
        None, description="Return the tokens with their log-probabilities. Default: false."
    )
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF"] | None = Field(
        None, description="A variable of the chat template; most templates have none."
    )
    thinking: ThinkingBody | None = Field(None, description="Default: the template's own.")
    documents: Annotated[list[str | Document], Size(1, 1024, "documents")] | None = Field(
        None, description="What to answer from, for the chat template, or as a system message."
    )

    def names(self) -> Mapping[str, str]:
        return {
            "prompts": "messages",
            "prompt": "messages",
            "texts": "messages",
            "max_new_tokens": "max_tokens",
            "describe_tokens": "logprobs",
            "thinking_budget": "thinking.token_budget",
            "stop": "stop_sequences",
            "grammar": "response_format" if self._is_json else "tools",
        }

    @property
    def must_call(self) -> bool:
        """Whether the reply has to call a tool."""
        return self.tool_choice == "REQUIRED"

    @property
    def _is_json(self) -> bool:
        return self.response_format is not None and self.response_format.type == "json_object"

    def request(self, model: WritingModel) -> ChatRequest:
        """The body as a dialect-neutral request."""
        form, thinking = self.response_format, self.thinking
        variables: dict[str, Any] = self.given("safety_mode")
        if thinking is not None:
            variables["enable_thinking"] = thinking.type != "disabled"
        choice = None if self.tool_choice == "NONE" else ToolChoice()
        return ChatRequest(
            [message.to_message() for message in self.messages],
            GenerationRequest(
                params=self.sampling(model.defaults, do_sample=True, include_stop=False),
                seed=self.seed,
                max_new_tokens=self.max_tokens or self._rest_of_context(model),
                is_limited=self.max_tokens is not None,
                grammar=GrammarRequest("json", form.json_schema)
                if form and self._is_json
                else None,
                describe_tokens=bool(self.logprobs),
            ),
            tools=[tool.to_tool() for tool in self.tools or ()],
            tool_choice=ToolChoice("required") if self.must_call else choice,
            thinking_budget=None if thinking is None else thinking.token_budget,
            template_variables=variables,
            documents=[
                document_of(each if isinstance(each, str) else each.data)
                for each in self.documents or ()
            ],
        )

    def _rest_of_context(self, model: WritingModel) -> int:
        """The limit on a text that has none."""
        most = model.defaults.new_tokens(model.max_length, model.max_length)
        return min(most, MAX_DESCRIBED) if self.logprobs else most


async def cohere_chat(call: Call[CohereChatBody]) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    body = call.body
    model = await call.writer()
    chat = body.request(model)
    generation = await call.generation(chat, model)
    (prompt,) = generation.prompts
    reader = ReplyReader(chat, prompt, model)
    speller = TokenSpeller(model.tokenizer, prompt.ids) if body.logprobs else None
    renderer = ReplyRenderer(prompt, reader, speller, must_call=body.must_call)
    return await write(call, generation, renderer, streams=bool(body.stream))


ROUTES = (FORM.route("/v2/chat", cohere_chat, CohereChatBody, CohereChatReply, streams=True),)
