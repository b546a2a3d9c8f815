"""The body of `/v1/responses`, and the conversation that it becomes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from maskdial.bounds import Range
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.model import WritingModel
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.openai.base import Metadata
from maskdial.dialects.openai.responses.items import Input, Item, conversation
from maskdial.dialects.openai.responses.tools import Choice, Offered, Tools, offered, to_choice
from maskdial.dialects.openai.sampling import SamplingBody
from maskdial.dialects.unsupported import Unsupported
from maskdial.grammar.source import GrammarRequest

_LOGPROBS = "message.output_text.logprobs"
_NO_PROMPTS = "prompts are not stored here; send instructions and input"
_STATELESS = "conversations are not stored; send the items in input, or previous_response_id"


class TextFormat(Lenient):
    """What the text must be. Schemas are always enforced, ``strict`` or not."""

    model_config = ConfigDict(validate_by_name=True)
    within = "text.format"

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise FieldError("schema", "this field is required")
        if self.type != "json_schema" and self.schema_ is not None:
            raise FieldError("schema", "belongs to the type json_schema, and only to that")
        return self

    def grammar(self) -> GrammarRequest | None:
        """As a neutral request; None for any text."""
        return None if self.type == "text" else GrammarRequest("json", self.schema_)


class TextOptions(Lenient):
    """The format and the verbosity of the text."""

    habits = frozenset({"verbosity"})
    within = "text"

    format: TextFormat = Field(default_factory=TextFormat)


class ReasoningOptions(Lenient):
    """Options of the reasoning, which is always returned in full, never as a summary."""

    habits = frozenset({"context", "generate_summary", "mode", "summary"})
    within = "reasoning"

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A variable of the chat template; none also turns thinking off."
    )
    max_tokens: Annotated[int, Range(0)] | None = Field(
        None,
        description="Extension: tokens of reasoning after which it is closed. Default: no limit.",
    )


class ResponsesBody(SamplingBody):
    """A conversation to continue. It is stored only where the server has a store."""

    model_config = example({"input": "Who lives here?", "max_output_tokens": 40})

    # Only OpenAI's own tools count for max_tool_calls. Metadata is returned, so it is a field.
    habits = SamplingBody.habits - {"metadata", "store"} | {"max_tool_calls", "stream_options"}
    neutral = {  # noqa: RUF012
        **SamplingBody.neutral,
        "max_output_tokens": (-1,),
        "n": (1,),
        "truncation": ("disabled",),
    }
    renamed = {  # noqa: RUF012
        **SamplingBody.renamed,
        "max_tokens": "max_output_tokens",
    }

    input: Input
    instructions: str | None = Field(
        None, description="Inserted before the input as a system message."
    )
    max_output_tokens: Annotated[int, Range(1)] | None = Field(
        None, description="Maximum number of tokens to generate. Default: what the context leaves."
    )
    stream: bool | None = Field(None, description="Reply with server-sent events. Default: false.")
    text: TextOptions = Field(default_factory=TextOptions)
    metadata: Metadata | None = Field(None, description="Any 16 pairs, which are returned.")
    include: list[str] | None = Field(
        None,
        description=f"With {_LOGPROBS}, each token of the text is described. Other values are "
        "accepted, for nothing else is left out: reasoning is always included, in full.",
    )
    top_logprobs: Annotated[int, Range(0, 20)] | None = Field(
        None, description="Describe each token with this many of the most likely ones. Default: 0."
    )
    tools: Tools = Field(default_factory=list)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one response.")
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    thinking_budget: Annotated[int, Range(0)] | None = Field(
        None, description="Extension: another name of reasoning.max_tokens."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extension: variables of the chat template."
    )
    store: bool | None = Field(
        None,
        description="Keep the response, so that it can be retrieved and continued. Default: true, "
        "where the server has a store (--responses-store).",
    )
    previous_response_id: str | None = Field(
        None, description="The stored response whose conversation goes on with this input."
    )
    background: bool | None = Field(
        None,
        description="Reply at once, and write the response meanwhile; GET /v1/responses/ID says "
        "how far it is. Default: false.",
    )
    conversation: Annotated[Any, Unsupported(_STATELESS)] = None
    prompt: Annotated[Any, Unsupported(_NO_PROMPTS)] = None
    truncation: Annotated[
        Any, Unsupported("conversations are not truncated; shorten the input")
    ] = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if None not in (self.thinking_budget, self.reasoning.max_tokens):
            raise FieldError(
                "thinking_budget", "reasoning.max_tokens is given as well; leave one of them out"
            )
        return self

    @property
    def describes_tokens(self) -> bool:
        """Whether the reply has log-probabilities."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def constraint(self) -> GrammarRequest | None:
        return self.text.format.grammar()

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of a neutral request, where the names differ."""
        return {
            "prompts": "input",
            "messages": "input",
            "max_new_tokens": "max_output_tokens",
            "min_new_tokens": "min_tokens",
            "grammar": "text.format",
        }

    @property
    def offered(self) -> list[Offered]:
        """The tools as the model knows them."""
        return offered(self.tools)

    def chat_request(self, model: WritingModel, before: Sequence[Item] = ()) -> ChatRequest:
        """The body as a dialect-neutral request that goes on with earlier items."""
        return ChatRequest(
            conversation(self.instructions, [*before, *self.input]),
            self.generation(
                model.defaults,
                max_new_tokens=self.max_output_tokens or self.rest_of_context(model),
                is_limited=self.max_output_tokens is not None,
            ),
            tools=[each.tool for each in self.offered],
            tool_choice=to_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
            thinking_budget=(
                self.reasoning.max_tokens if self.thinking_budget is None else self.thinking_budget
            ),
            template_variables=self.chat_template_kwargs,
        )

    def echoed(self, defaults: GenerationDefaults, *, stored: bool) -> dict[str, Any]:
        """The settings that a response repeats, and whether it is stored."""
        params = self.sampling(defaults)
        return {
            "background": bool(self.background),
            "frequency_penalty": params.frequency_penalty,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": stored,
            "temperature": params.temperature,
            "text": {"format": self.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": (
                choice
                if isinstance(choice := self.tool_choice, str)
                else choice.model_dump(exclude_none=True)
            ),
            "tools": self.tools,
            "top_logprobs": self.num_top,
            "top_p": params.top_p,
            "truncation": "disabled",
        }
