"""Harmony: replies in messages on channels, as gpt-oss writes them.

A reply is a row of messages: on the channel ``analysis`` there is reasoning, on ``final`` the
answer, and on ``commentary`` text before calls, or a call where the header names a recipient::

    <|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

The recipient may also stand before the channel, as chat templates write it. OpenAI publishes the
format: https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Callable, Sequence

from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools.argument_reader import ArgumentReader
from maskdial.causal.tools.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from maskdial.causal.tools.format import ToolFormat
from maskdial.causal.tools.grammar import ToolArguments, bounded, until
from maskdial.causal.tools.incremental import IncrementalParser
from maskdial.causal.tools.lark import ANY_TEXT, ContentKind, LarkWriter, alternatives
from maskdial.causal.tools.marks import ThinkingMarks
from maskdial.causal.tools.scanner import CutError, MismatchError, Reader, Taker
from maskdial.causal.tools.tool import Tool, ToolChoice, check_tools
from maskdial.grammar.source import GrammarSource, GrammarValue

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN, _CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TAGS = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN)
_NEXT = f"{_START}assistant"
_COMMENTARY = f"{_CHANNEL}commentary"
_FINAL = f"{_CHANNEL}final"
HEADER = _FINAL, _MESSAGE
"""What begins and ends the header of the answer."""
CALLS = ToolFormat(
    call=f"{_COMMENTARY} to=functions.$NAME {_CONSTRAIN}json{_MESSAGE}$ARGUMENTS{_CALL}"
)
THINKING = ThinkingMarks(f"{_CHANNEL}analysis{_MESSAGE}", _END)
_RECIPIENT_BEGIN = "to="
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w./:-]+)")
_CHANNEL_NAME = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")


def is_harmony(template: ChatTemplate) -> bool:
    """Whether a chat template writes messages on channels."""
    source = template.source or ""
    return all(tag in source for tag in (_START, _CHANNEL, _MESSAGE))


def open_channel(prompt: str) -> str | None:
    """The channel of the message that a prompt ends in, "" if that has none; None for no message.

    A continued message is such a one.
    """
    before, found, text = prompt.rpartition(_MESSAGE)
    if not found or any(tag in text for tag in (_START, _END, _CALL, _RETURN)):
        return None
    channels: list[str] = _CHANNEL_NAME.findall(before.rpartition(_START)[2])
    return channels[-1] if channels else ""


def write_harmony_grammar(
    writer: LarkWriter,
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    *,
    content: tuple[ContentKind, GrammarValue] | None = None,
    opened: bool = False,
    answering: bool = False,
) -> GrammarSource:
    """The grammar of a reply; see `maskdial.causal.tools.grammar.write_grammar`.

    Args:
        writer: knows the special tokens among `TAGS`.
        tools: the tools of the request.
        choice: which of them may or must be called; None for none.
        content: what the answer must match.
        opened: the prompt ends inside the reasoning.
        answering: the prompt ends inside the answer. That is the reply then, unless a tool must be
            called.

    Raises:
        ValidationError: a tool or its schema is unusable, the choice names an unknown tool, or
            ``content`` is no grammar of its kind.
    """
    if tools:
        check_tools(tools)
    if answering and (choice is None or choice.mode == "auto"):
        writer.define("start", _text(writer, content))
        return bounded(writer.source())
    rest = writer.rule(until(writer, _END))
    begun = [writer.literal(THINKING.begin)]
    if content is None:
        begun.append(writer.literal(_COMMENTARY + _MESSAGE))
    following = writer.literal(_NEXT)
    before = writer.rule(f"(({alternatives(begun)}) {rest} {following})*")
    options = []
    if choice is None or choice.mode == "auto":
        text = _text(writer, content)
        constrain = writer.literal(f" {_CONSTRAIN}json")
        message = writer.literal(_MESSAGE)
        options.append(f"{writer.literal(_FINAL)} ({constrain})? {message} {text}")
    if choice is not None:
        arguments = ToolArguments(writer, CALLS, tools)
        options += [_call(writer, tool, arguments) for tool in choice.select(tools)]
    reply = f"{before} ({alternatives(options)})"
    inside = opened or answering
    writer.define("start", f"{rest} {following} {reply}" if inside else reply)
    return bounded(writer.source())


def _text(writer: LarkWriter, content: tuple[ContentKind, GrammarValue] | None) -> str:
    """The text of the answer."""
    return writer.terminal(ANY_TEXT) if content is None else writer.embed(*content)


def _call(writer: LarkWriter, tool: Tool, arguments: ToolArguments) -> str:
    recipient = f" to=functions.{tool.name}"
    header = alternatives(
        writer.literal(each) for each in (_COMMENTARY + recipient, recipient + _COMMENTARY)
    )
    kind = alternatives(writer.literal(each) for each in (f"{_CONSTRAIN}json", "json"))
    message = writer.literal(_MESSAGE)
    return f'({header}) (" "? ({kind}))? {message} {arguments.of(tool)}'


class HarmonyParser(IncrementalParser):
    """Parses one reply of messages on channels.

    Args:
        tools: the tools of the request; empty if no tool may be called.
        opened: the prompt ends inside the reasoning.
        answering: the prompt ends inside the answer.
    """

    def __init__(
        self, tools: Sequence[Tool] = (), *, opened: bool = False, answering: bool = False
    ) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}
        self._opened = opened
        self._answering = answering
        self._num_texts = {ContentDelta: 0, ReasoningDelta: 0}

    @property
    def special_tags(self) -> frozenset[str]:
        """All tags of the format."""
        return frozenset(TAGS)

    def _reply(self) -> Reader:
        if self._opened:
            yield from self._text(ReasoningDelta)
        elif self._answering:
            yield from self._text(ContentDelta)
        elif not (yield from self._input.begins_with((*TAGS, _RECIPIENT_BEGIN))):
            # A model that was not trained on channels.
            tag = yield from self._copy_text(ContentDelta, TAGS)
            self._input.text = tag + self._input.text
        while not self._input.ended or self._input.text.strip():
            header: list[str] = []
            if not (yield from self._input.copy_until((_MESSAGE,), header.append)):
                text = "".join(header)
                if not self._input.cut and text.lstrip().startswith(_RECIPIENT_BEGIN):
                    self._deltas.append(ContentDelta(text))
                return
            yield from self._message("".join(header))

    def _message(self, header: str) -> Reader:
        tool = self._called(header)
        channel = _CHANNEL_NAME.search(header)
        if tool is not None:
            yield from self._call(tool)
        elif channel is not None and channel[1] == "analysis":
            yield from self._text(ReasoningDelta)
        else:
            yield from self._text(ContentDelta)

    def _called(self, header: str) -> Tool | None:
        """The tool that a message calls; one of an unknown name is the client's to refuse."""
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._tools:
            return None
        unknown = Tool(recipient[2], {}) if recipient[1] else None
        return self._tools.get(recipient[2], unknown)

    def _text(self, kind: type[ContentDelta | ReasoningDelta]) -> Reader:
        """The text of a message."""
        self.reasoning = kind is ReasoningDelta
        yield from self._copy_text(kind, (_END, _RETURN, _CALL))
        self.reasoning = False

    def _copy_text(self, kind: type[ContentDelta | ReasoningDelta], tags: Sequence[str]) -> Taker:
        """Text up to one of some tags, which it returns."""
        # Text of several messages is read as paragraphs.
        gap = "\n\n" if self._num_texts[kind] else ""

        def emit(text: str) -> None:
            nonlocal gap
            if text:
                self._deltas.append(kind(gap + text))
                self._num_texts[kind] += 1
                gap = ""

        return (yield from self._input.copy_until(tags, emit))

    def _call(self, tool: Tool) -> Reader:
        call_id = CALLS.new_call_id(tool.name, self.num_calls)
        self._deltas.append(ToolCallDelta(self.num_calls, call_id=call_id, name=tool.name))
        self.num_calls += 1
        add: Callable[[str], None] = self._add
        try:
            yield from ArgumentReader(self._input, add).read(None, tool.parameters, end="")
        except (CutError, MismatchError):
            self.incomplete = True
        yield from self._input.copy_until((_CALL, _END, _RETURN), lambda _: None)

    def _add(self, arguments: str) -> None:
        if arguments:
            self._deltas.append(ToolCallDelta(self.num_calls - 1, arguments))
