"""The bodies of Anthropic's API, and the dialect-neutral requests that they become."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from maskdial.bounds import Range, Size
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import PositiveShare
from maskdial.causal.tools import Tool, ToolChoice
from maskdial.dialects.anthropic.content import Blocks, MessageBody, check_results, conversation
from maskdial.dialects.body import BodyError, FieldError, TaskBody, example
from maskdial.dialects.openai.base import Lenient
from maskdial.dialects.sampling import CommonSampling, Stops, parameter
from maskdial.errors import ValidationError
from maskdial.grammar.source import GrammarRequest

_HABITS = frozenset(
    {
        "cache_control",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)


class ToolBody(Lenient):
    """A tool that the model may call. Its input satisfies the schema, ``strict`` or not."""

    habits = frozenset({"allowed_callers", "cache_control", "eager_input_streaming", "strict"})
    neutral = {"defer_loading": (False,)}  # noqa: RUF012

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _refuse_server_tools(cls, tool: object) -> object:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is not None and kind != "custom":
            raise FieldError("type", "server tools are not supported; send tools of type 'custom'")
        return tool

    def to_tool(self) -> Tool:
        """The tool of a dialect-neutral request."""
        return Tool(self.name, self.input_schema, self.description or "")


class ToolChoiceBody(Lenient):
    """Whether the model has to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="The tool to call, for the type tool.")
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("name", "belongs to the type 'tool', and only to that")
        return self

    def to_choice(self) -> ToolChoice | None:
        """The choice of a dialect-neutral request; None for none."""
        if self.name is not None:
            return ToolChoice("required", [self.name])
        if self.type == "none":
            return None
        return ToolChoice("required" if self.type == "any" else "auto")


class ThinkingBody(Lenient):
    """Whether the model thinks before it answers, where its chat template can be told."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Range(1)] | None = Field(
        None,
        description="Tokens of thinking after which the answer begins, for the type enabled; "
        "max_tokens covers both.",
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="With omitted, blocks of thinking are empty. Default: they are whole."
    )


class JsonFormat(Lenient):
    """A JSON schema that the text must match."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    """What the text must be, and how much effort goes into it."""

    effort: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="A variable of the chat template, reasoning_effort."
    )
    format: JsonFormat | None = None


class ConversationBody(Lenient, TaskBody):
    """A conversation, and the tools that it may use. ``timeout`` is an extension."""

    habits = _HABITS

    system: Blocks | None = Field(None, description="The system prompt: a text, or blocks of text.")
    messages: Annotated[list[MessageBody], Size(1, 1024, "messages")]
    tools: list[ToolBody] | None = Field(None, description="What the model may call.")
    tool_choice: ToolChoiceBody | None = Field(None, description="Default: auto.")
    thinking: ThinkingBody | None = Field(None, description="Default: the template's own.")
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        if any(block.type != "text" for block in self.system or ()):
            raise FieldError("system", "must be text")
        check_results(self.messages)
        if self.continues and any(block.type == "tool_use" for block in self.messages[-1].content):
            raise FieldError(
                "messages", "the last message calls a tool; send its result in a user message"
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the reply goes on with the last message, which is the assistant's."""
        return self.messages[-1].role == "assistant"

    @property
    def _budget(self) -> int | None:
        thinking = self.thinking
        return thinking.budget_tokens if thinking and thinking.type == "enabled" else None

    def chat(self, generation: GenerationRequest) -> ChatRequest:
        """The conversation as a dialect-neutral request, generated as given."""
        choice = self.tool_choice
        variables = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        return ChatRequest(
            [*conversation(self.system or (), self.messages)],
            generation,
            tools=[tool.to_tool() for tool in self.tools or ()],
            tool_choice=ToolChoice() if choice is None else choice.to_choice(),
            parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            thinking_budget=self._budget,
            template_variables=variables,
            continue_final_message=self.continues,
        )

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of a neutral request, where the names differ."""
        return {
            "prompts": "messages",
            "texts": "messages",
            "grammar": "output_config.format",
            "max_new_tokens": "max_tokens",
        }

    def locate(self, error: ValidationError) -> ValidationError:
        """An error begins with the field at fault: these errors have no other place for it."""
        if not isinstance(error, BodyError) and error.index is not None:
            error = ValidationError(error.message, field=error.field)
        return super().locate(error)


class CountBody(ConversationBody):
    """A conversation whose tokens to count."""

    model_config = example({"messages": [{"role": "user", "content": "Who lives here?"}]})


class MessagesBody(CommonSampling, ConversationBody):
    """A conversation to answer."""

    model_config = example(
        {"messages": [{"role": "user", "content": "Who lives here?"}], "max_tokens": 40}
    )

    max_tokens: Annotated[int, Range(1)] = Field(
        description="Maximum number of tokens to generate; no more than the context leaves."
    )
    stop: Stops | None = Field(
        None,
        alias="stop_sequences",
        description="Texts that end the answer; they are not included in it.",
    )
    top_p: PositiveShare | None = parameter("top_p")
    stream: bool | None = Field(None, description="Send server-sent events. Default: false.")

    @property
    def shows_thinking(self) -> bool:
        """Whether blocks of thinking have their text."""
        return self.thinking is None or self.thinking.display != "omitted"

    def request(self, model: CausalModel) -> ChatRequest:
        """The body as a dialect-neutral request."""
        form = None if self.output_config is None else self.output_config.format
        return self.chat(
            GenerationRequest(
                params=self.sampling(model.defaults, do_sample=True, include_stop=False),
                # Clients often send a limit meant for a larger model.
                max_new_tokens=min(self.max_tokens, model.max_length),
                grammar=None if form is None else GrammarRequest("json", form.json_schema),
            )
        )
