"""A request to answer a conversation: the reply may call tools and contain reasoning.

Every dialect parses its bodies into a `ChatRequest`, generates as for any other request, and reads
the tokens with a `ReplyReader`::

    generation = await Generation.prepare(chat.generation_for(model), model, config, deadline)
    reader = ReplyReader(chat, generation.prompts[0], model)    # one for each text
    async with generation.stream() as stream:
        async for _, event in stream:
            deltas = reader.push(event)
    reader.reply                                                # all of it, at the end

Errors name the fields of `ChatRequest` and of `GenerationRequest`.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from maskdial.causal.chat.documents import as_text
from maskdial.causal.chat.history import render_messages
from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.events import FinishReason, ReadToken, TokenEvent
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import Prompt
from maskdial.causal.request import Conversation, GenerationRequest
from maskdial.causal.stop import Reasoning
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ReplyFormat,
    Tool,
    ToolCallDelta,
    ToolChoice,
    check_tools,
)
from maskdial.causal.tools.events import merged
from maskdial.causal.tools.incremental import IncrementalParser
from maskdial.errors import ValidationError, about
from maskdial.grammar.source import GrammarRequest

ReplyFinish = Literal[FinishReason, "tool_calls"]
"""How a reply ended; ``tool_calls``: with complete calls, before any limit."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer.

    Attributes:
        messages: the conversation so far.
        generation: how to generate; its ``prompts`` and ``conversation`` are ignored. A JSON schema
            or regular expression in ``grammar`` describes the content: reasoning may precede it,
            and calls may replace it. A Lark grammar describes the whole reply.
        tools: what the model may call.
        described_in_messages: the names of tools that the template is not given: the messages
            describe those of them that may be called, where they came up.
        tool_choice: whether it must call a tool, and which it may call; None: none.
        parallel_tool_calls: whether a reply may have several calls, if the model's format allows
            several.
        reasoning_effort: a variable of the template, such as ``low``; ``none`` also sets
            ``enable_thinking`` to false. None: the template's default.
        thinking_budget: tokens of reasoning after which the model's closing mark follows; None for
            any number. Means nothing for models without marks.
        template_variables: further variables of the template.
        documents: what to write the reply from; each has a ``text``. A template that has no place
            for them gets a system message.
        add_generation_prompt: whether the prompt opens the assistant's next turn.
        continue_final_message: whether the reply goes on with the final message; no turn is opened.
    """

    messages: Sequence[ChatMessage]
    generation: GenerationRequest = field(default_factory=GenerationRequest)
    tools: Sequence[Tool] = ()
    described_in_messages: frozenset[str] = frozenset()
    tool_choice: ToolChoice | None = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] = ()

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the reply may call."""
        return () if self.tool_choice is None else self.tools

    def generation_for(self, model: WritingModel) -> GenerationRequest:
        """The generation request for a model.

        Raises:
            ValidationError: the tools are unusable, or not supported by the model.
        """
        self._check(model)
        messages = render_messages(self.messages, model.reply_format)
        variables = self._variables()
        if self.documents:
            if model.chat_template.takes_documents(with_tools=bool(self.callable_tools)):
                variables["documents"] = [*self.documents]
            else:
                about_them = {"role": "system", "content": as_text(self.documents)}
                messages = [about_them, *messages]
        return dataclasses.replace(
            self.generation,
            prompts=(),
            conversation=Conversation(
                messages,
                [
                    tool.as_openai()
                    for tool in self.callable_tools
                    if tool.name not in self.described_in_messages
                ],
                variables,
                self.add_generation_prompt,
                self.continue_final_message,
            ),
            grammar_for=partial(self._grammar_for, model.reply_format),
            reasoning_for=partial(self._reasoning_for, model.reply_format, self._closing(model)),
            spelled_tokens=self._spelled_tokens(model),
        )

    def parser(self, reply_format: ReplyFormat, prompt: str = "") -> IncrementalParser:
        """A parser of one reply to a rendered prompt."""
        return reply_format.parser(
            self.callable_tools,
            opened=self._opens(reply_format, prompt),
            answering=reply_format.answers(prompt),
            plain=self._is_lark,
        )

    def _check(self, model: WritingModel) -> None:
        if not self.tools:
            if self.tool_choice is not None and self.tool_choice != ToolChoice():
                raise ValidationError("there are no tools to call", field="tool_choice")
            return
        with _about_item():
            check_tools(self.tools)
        if self.tool_choice is None:
            return
        self.tool_choice.select(self.tools)
        if self._is_lark:
            raise ValidationError(
                "a Lark grammar describes the whole reply, so it cannot be combined with tools; "
                "send a JSON schema or a regular expression, or set tool_choice to none",
                field="grammar",
            )
        if model.reply_format.calls is None and self.tool_choice.mode == "auto":
            raise ValidationError(
                f"the chat template of model {model.name!r} does not support tools, so the model "
                "cannot choose to call one; set tool_choice to required, or name a tool",
                field="tools",
            )

    def _spelled_tokens(self, model: WritingModel) -> tuple[tuple[int, str], ...]:
        """The special tokens among the parser's tags, with their ids."""
        tags = sorted(self.parser(model.reply_format).special_tags)
        ids = ((model.tokenizer.token_to_id(tag), tag) for tag in tags)
        return tuple((token_id, tag) for token_id, tag in ids if token_id is not None)

    def _variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        return variables | dict(self.template_variables)

    def _closing(self, model: WritingModel) -> tuple[int, ...]:
        """The tokens that end the reasoning once its budget is spent."""
        thinking = model.reply_format.thinking
        if thinking is None or self.thinking_budget is None:
            return ()
        return tuple(model.tokenizer.encode(thinking.end, add_special_tokens=False).ids)

    def _reasoning_for(
        self, reply_format: ReplyFormat, closing: tuple[int, ...], prompt: str
    ) -> Reasoning | None:
        """What the reply to a rendered prompt may begin with."""
        if self._is_lark:  # which leaves no room for any
            return None
        return reply_format.reasoning(
            opened=self._opens(reply_format, prompt),
            answering=reply_format.answers(prompt),
            budget=self.thinking_budget,
            closing=closing,
        )

    def _opens(self, reply_format: ReplyFormat, prompt: str) -> bool:
        """Whether the reply to a rendered prompt begins within reasoning."""
        if reply_format.opens(prompt):
            return True
        thinking = reply_format.thinking
        if thinking is None or not self.continue_final_message:
            return False
        return thinking.left_open_by(self.messages[-1].content)

    @property
    def _is_lark(self) -> bool:
        return self.generation.grammar is not None and self.generation.grammar.kind == "lark"

    def _grammar_for(self, reply_format: ReplyFormat, prompt: str) -> GrammarRequest | None:
        """The grammar of a reply to a rendered prompt."""
        own = self.generation.grammar
        content = None
        if own is not None and own.kind != "lark" and own.kind != "structural":
            content = own.kind, own.value
        field = "tools" if own is None else own.field
        with about(field), _about_item():
            source = reply_format.grammar(
                self.tools,
                self.tool_choice if self.tools else None,
                parallel=self.parallel_tool_calls,
                content=content,
                opened=self._opens(reply_format, prompt),
                answering=reply_format.answers(prompt),
            )
        if source is None:
            return own
        return GrammarRequest("structural", source.text, field, source.warnings)


@contextlib.contextmanager
def _about_item() -> Iterator[None]:
    """Has a ValidationError about one tool name it as ``tools[3]``."""
    try:
        yield
    except ValidationError as error:
        if error.index is None:
            raise
        raise ValidationError(error.message, field=f"{error.field}[{error.index}]") from error


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, complete unless its ``finish_reason`` says otherwise.

    ``num_reasoning`` counts the tokens of the reasoning, with the marks around it.
    """

    content: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    finish_reason: ReplyFinish
    num_reasoning: int


class ReplyReader:
    """Splits one reply into reasoning, content and tool calls, token by token.

    Args:
        request: the request that the model replies to.
        prompt: its prompt.
        model: the model.

    Attributes:
        num_reasoning: tokens of the reasoning so far, with the marks around it.
    """

    def __init__(self, request: ChatRequest, prompt: Prompt, model: WritingModel) -> None:
        self._parser = request.parser(model.reply_format, prompt.text or "")
        self._deltas: list[ReplyDelta] = []
        self._finish_reason: ReplyFinish | None = None
        self._num_calls = 0
        self.num_reasoning = 0

    def push(self, event: TokenEvent) -> list[ReplyDelta]:
        """Takes the next token and returns the deltas that it completes, possibly none."""
        if event.read is not None:
            return self._take(event, event.read)
        was_reasoning = self._parser.reasoning
        deltas = self._parser.push(event.text)
        self.num_reasoning += was_reasoning or self._parser.reasoning
        if event.finish is not None:
            deltas = merged([*deltas, *self._finish(event.finish.reason)])
        self._num_calls = self._parser.num_calls
        self._deltas += deltas
        return deltas

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._num_calls

    @property
    def finish_reason(self) -> ReplyFinish | None:
        """How the reply ended; None until then."""
        return self._finish_reason

    @property
    def reply(self) -> Reply:
        """The whole reply, once it has ended."""
        assert self._finish_reason is not None, "the reply has not ended"
        return Reply(
            "".join(each.text for each in self._deltas if isinstance(each, ContentDelta)),
            "".join(each.text for each in self._deltas if isinstance(each, ReasoningDelta)),
            _joined_calls(each for each in self._deltas if isinstance(each, ToolCallDelta)),
            self._finish_reason,
            self.num_reasoning,
        )

    def _take(self, event: TokenEvent, read: ReadToken) -> list[ReplyDelta]:
        """Takes a token that a policy has read."""
        self.num_reasoning = read.num_reasoning
        self._num_calls += sum(
            isinstance(each, ToolCallDelta) and each.name is not None for each in read.deltas
        )
        if event.finish is not None:
            self._finish_reason = "tool_calls" if read.called else event.finish.reason
        self._deltas += read.deltas
        return [*read.deltas]

    def _finish(self, reason: FinishReason) -> list[ReplyDelta]:
        deltas = self._parser.finish(cut=reason == "length")
        calls = self._parser.num_calls and not self._parser.incomplete
        self._finish_reason = "tool_calls" if calls and reason != "length" else reason
        return deltas


def read_reply(
    request: ChatRequest, prompt: Prompt, events: Iterable[TokenEvent], model: WritingModel
) -> Reply:
    """A finished text as a reply; see `ReplyReader`."""
    reader = ReplyReader(request, prompt, model)
    for event in events:
        reader.push(event)
    return reader.reply


def _joined_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
    calls: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.call_id or "", delta.name))
            arguments.append([])
        arguments[-1 if delta.name is not None else delta.index].append(delta.arguments)
    return [ToolCall(*call, "".join(parts)) for call, parts in zip(calls, arguments, strict=True)]
