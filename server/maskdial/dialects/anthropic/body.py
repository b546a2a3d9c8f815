"""The bodies of Anthropic's API, and the dialect-neutral requests that they become."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from maskdial.bounds import Range, Size
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.model import WritingModel
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import PositiveShare
from maskdial.causal.tools import ToolChoice
from maskdial.dialects.anthropic.content import (
    Block,
    Blocks,
    MessageBody,
    check_results,
    conversation,
    referred,
)
from maskdial.dialects.anthropic.tools import ToolChoiceBody, Tools
from maskdial.dialects.body import MAX_MESSAGES, BodyError, FieldError, TaskBody, example
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.sampling import CommonSampling, Stops, parameter
from maskdial.errors import ValidationError, shortened
from maskdial.grammar.source import GrammarRequest
from maskdial.http.ignored import note_field, noted

_HABITS = frozenset(
    {
        "betas",
        "cache_control",
        "client_metadata",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
# What first blocks begin with that differ between sessions, or requests, and say nothing to a
# model: with one, no prompt would share a prefix with another. Claude Code's has its version and
# digits of the first message.
_SPOILING = ("x-anthropic-billing-header:",)


def _without_spoiling(blocks: list[Block]) -> list[Block]:
    """Instructions without such a block, where the reply tells that it is left out."""
    first = blocks[0].text if blocks and noted() is not None else None
    found = next((each for each in _SPOILING if first is not None and first.startswith(each)), None)
    if found is None:
        return blocks
    note_field(found.rstrip(":"), "system")
    return blocks[1:]


def _read_edits(value: object) -> object:
    """Edits of the context that save tokens change nothing that is asked for; a summary would."""
    edits = value.get("edits") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(edits, list | None):
        raise ValueError('must be {"edits": [...]}')
    for edit in edits or ():
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str):
            raise ValueError("an edit must be an object with a type")
        if kind.startswith("compact"):
            raise ValueError(f"{shortened(kind)} is not supported; summarize in a request of yours")
    note_field("context_management")
    return value


def _read_display(value: object) -> object:
    if isinstance(value, str) and value not in ("summarized", "omitted"):
        note_field("display", "thinking")
        return None
    return value


class ThinkingBody(Lenient):
    """Whether the model thinks before it answers, where its chat template can be told."""

    within = "thinking"

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Range(1)] | None = Field(
        None,
        description="Tokens of thinking after which the answer begins, for the type enabled; "
        "max_tokens covers both.",
    )
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        BeforeValidator(_read_display, json_schema_input_type=str | None),
    ] = Field(
        None,
        description="With omitted, blocks of thinking are empty. Default, and with any other "
        "value: they are whole.",
    )


class JsonFormat(Lenient):
    """A JSON schema that the text must match."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    """What the text must be, and how much effort goes into it."""

    within = "output_config"

    effort: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="A variable of the chat template, reasoning_effort."
    )
    format: JsonFormat | None = None


class ConversationBody(Lenient, TaskBody):
    """A conversation, and the tools that it may use. ``timeout`` is an extension."""

    habits = _HABITS

    system: Annotated[Blocks, AfterValidator(_without_spoiling)] | None = Field(
        None, description="The system prompt: a text, or blocks of text."
    )
    messages: Annotated[list[MessageBody], Size(1, MAX_MESSAGES, "messages")]
    tools: Tools | None = Field(
        None,
        description="What the model may call. Tools that Anthropic runs are left out, and named in "
        "the header x-ignored-tools.",
    )
    tool_choice: ToolChoiceBody | None = Field(None, description="Default: auto.")
    thinking: ThinkingBody | None = Field(None, description="Default: the template's own.")
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(
        None, description="The older place of output_config.format."
    )
    context_management: Annotated[Any, BeforeValidator(_read_edits)] = Field(
        None, description="Edits that clear what is old are not made; those that compact, refused."
    )

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
    def form(self) -> JsonFormat | None:
        """What the text must match."""
        newer = None if self.output_config is None else self.output_config.format
        return self.output_format if newer is None else newer

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
        described = referred(self.messages)
        chosen = None if choice is None else choice.name
        found = [
            (tool.to_tool(), bool(tool.defer_loading) and tool.name != chosen)
            for tool in self.tools or ()
        ]
        # A tool that waits can be called once the conversation has described it.
        tools = [tool for tool, waits in found if not waits or tool.name in described]
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        return ChatRequest(
            [*conversation(self.system, self.messages, {tool.name: tool for tool, _ in found})],
            generation,
            tools=tools,
            described_in_messages=frozenset(tool.name for tool, waits in found if waits),
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
            "grammar": "output_config.format" if self.output_format is None else "output_format",
            "max_new_tokens": "max_tokens",
        }

    def locate(self, error: ValidationError) -> ValidationError:
        """An error begins with the field at fault: these errors have no other place for it."""
        if not isinstance(error, BodyError) and error.index is not None:
            error = type(error)(error.message, field=error.field)
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

    def request(self, model: WritingModel) -> ChatRequest:
        """The body as a dialect-neutral request."""
        form = self.form
        return self.chat(
            GenerationRequest(
                params=self.sampling(model.defaults, do_sample=True, include_stop=False),
                max_new_tokens=self.max_tokens,
                grammar=None if form is None else GrammarRequest("json", form.json_schema),
            )
        )
