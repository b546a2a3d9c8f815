"""The grammar of a reply that may call tools, or must."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from maskdial.causal.tools.arguments import ArgumentRules
from maskdial.causal.tools.format import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    PLAIN_FORMAT,
    ToolFormat,
    split_pattern,
)
from maskdial.causal.tools.lark import (
    ANY_TEXT,
    ContentKind,
    LarkWriter,
    alternatives,
    containing,
    quoted,
)
from maskdial.causal.tools.marks import AnswerMarks, ThinkingMarks
from maskdial.causal.tools.tool import INPUT, Tool, ToolChoice, check_tools
from maskdial.errors import ValidationError
from maskdial.grammar.finite import check_finite
from maskdial.grammar.schema import without_not_enforced
from maskdial.grammar.source import GrammarSource, GrammarValue
from maskdial.grammar.subschemas import check_shapes

_ID = "/[a-zA-Z0-9]{9}/"
_MAX_BYTES = 2**20  # of a grammar: some 1,024 tools of three parameters
_INDEX = "/0|[1-9][0-9]{0,3}/"
_SPACE = r"[ \t\r\n]"
_MAX_SPACES = 8  # around thinking; without a limit, a reply may be nothing else


def write_grammar(
    form: ToolFormat | None,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    content: tuple[ContentKind, GrammarValue] | None = None,
    thinking: ThinkingMarks | None = None,
    thinking_opened: bool = False,
    answer: AnswerMarks | None = None,
    free_ids: Collection[int] = (),
) -> GrammarSource:
    """The grammar of a reply, of the kind ``structural`` of `GrammarCompiler`.

    Args:
        form: how the model writes calls; None if its template does not support tools.
        tools: the tools of the request.
        choice: under ``auto`` the reply is free text until the model itself begins a call, and only
            calls from there on; under ``required`` it has no free text.
        parallel: allow several calls, if the format does.
        content: what the free text must match; the reply is then such a text, or calls.
        thinking: the model's thinking marks; it may then think before it replies.
        thinking_opened: the prompt ends inside the thinking (`ThinkingMarks.opened_by`).
        answer: the marks around the model's answer, which it may leave out.
        free_ids: special tokens without a meaning here. Free text may contain them, as in a reply
            without tools: a model that is used to one would lose its way without it.

    Raises:
        ValidationError: a tool or its schema is unusable, the choice names an unknown tool, or the
            choice is ``auto`` for a model whose template does not support tools.
    """
    check_tools(tools)
    if form is None:
        if choice.mode == "auto":
            raise ValidationError(
                "this model's chat template does not support tools, so the model cannot choose "
                "to call one; set tool_choice to required, or name a tool",
                field="tool_choice",
            )
        form = PLAIN_FORMAT
    special = {**form.special_ids, **_special(thinking), **_special(answer)}
    writer = LarkWriter(special, frozenset(free_ids) - {*special.values()})
    text = None if content is None else _answered(writer, answer, writer.embed(*content))
    rules = _CallRules(
        writer, form, tools, choice, text, answer, parallel=parallel and form.parallel
    )
    if thinking is None:
        start = rules.reply("")
    else:
        start = _after_thinking(writer, thinking, rules.reply, opened=thinking_opened)
    writer.define("start", start)
    source = writer.source()
    return bounded(source)


def bounded(source: GrammarSource) -> GrammarSource:
    """A grammar of tools, unless it is too large.

    Raises:
        ValidationError: it is.
    """
    if len(source.text) > _MAX_BYTES:
        raise ValidationError(
            f"the grammar of the tools has {len(source.text)} bytes; the limit is "
            f"{_MAX_BYTES}; send fewer tools or smaller schemas",
            field="tools",
        )
    return source


def write_content_grammar(
    kind: ContentKind,
    value: GrammarValue,
    thinking: ThinkingMarks | None,
    *,
    thinking_opened: bool = False,
    answer: AnswerMarks | None = None,
) -> GrammarSource:
    """The grammar of a reply without calls: thinking, then a text.

    Args:
        kind: what ``value`` is.
        value: what the text must match; see `parse_grammar`.
        thinking: the model's marks.
        thinking_opened: as for `write_grammar`.
        answer: as for `write_grammar`.

    Raises:
        ValidationError: the value is no grammar of that kind, or is too large.
    """
    writer = LarkWriter({**_special(thinking), **_special(answer)})
    text = _answered(writer, answer, writer.embed(kind, value))
    if thinking is None:
        start = text
    else:
        start = _after_thinking(writer, thinking, lambda _: text, opened=thinking_opened)
    writer.define("start", start)
    return writer.source()


def _special(marks: ThinkingMarks | AnswerMarks | None) -> Mapping[str, int]:
    return {} if marks is None else marks.special_ids


def _answered(writer: LarkWriter, answer: AnswerMarks | None, text: str) -> str:
    """A text, with or without the marks of an answer around it."""
    if answer is None:
        return text
    space = writer.terminal(rf"/{_SPACE}{{1,{_MAX_SPACES}}}/")
    begin = f"({writer.literal(answer.begin)} {space}?)? " if answer.begin else ""
    return writer.rule(f"{begin}{text} ({space}? {writer.literal(answer.end)})?")


def _after_thinking(
    writer: LarkWriter, thinking: ThinkingMarks, reply: Callable[[str], str], *, opened: bool
) -> str:
    """A reply after the model has thought, or, unless that is ``opened``, without it.

    ``reply`` writes the reply whose free text does not begin with the given tag.
    """
    space = writer.terminal(rf"/{_SPACE}{{1,{_MAX_SPACES}}}/")
    header = f"({writer.literal(thinking.header)})?" if thinking.header else ""
    thoughts = f"{until(writer, thinking.end)} {space}? {header} {reply('')}"
    if opened:
        return thoughts
    begin, end = writer.literal(thinking.begin), writer.literal(thinking.end)
    # Its end alone says that there is none.
    return f"{space}? {begin} {thoughts} | ({end} {space}?)? {reply(thinking.begin)}"


def until(
    writer: LarkWriter, end: str, text: str = ANY_TEXT, answer: AnswerMarks | None = None
) -> str:
    """Free text up to a tag, whether the tag is a special token or spelled out as text."""
    head = _with_special(writer, f"{text} & ~{containing(end)}", answer)
    lazy = writer.rule(f"{writer.terminal(text)} {quoted(end)}", attributes="[lazy]")
    before, special = writer.split(end)
    if not special:
        return writer.rule(f"{head} {lazy}") if head else lazy
    # llguidance's lexer is greedy: the text takes what the tag begins with, as DeepSeek's does.
    free = writer.terminal(f"({text}) {quoted(before)}")
    return writer.rule(f"{head} ({lazy} | {free} {special})")


def _with_special(writer: LarkWriter, text: str, answer: AnswerMarks | None) -> str:
    """Pieces of free text, each before a special token or a mark that may stand in it."""
    marks = () if answer is None else (answer.begin, answer.end)
    pieces = [writer.free, *(writer.literal(mark) for mark in marks if mark)]
    if not (pieces := [*filter(None, pieces)]):
        return ""
    return writer.rule(f"({writer.terminal(text)} ({alternatives(pieces)}))*")


class _CallRules:
    """Writes the rules of calls, and of replies around them."""

    def __init__(
        self,
        writer: LarkWriter,
        form: ToolFormat,
        tools: Sequence[Tool],
        choice: ToolChoice,
        content: str | None,
        answer: AnswerMarks | None,
        *,
        parallel: bool,
    ) -> None:
        self._writer = writer
        self._form = form
        self._mode = choice.mode
        self._content = content
        self._answer = answer
        self._tools = choice.select(tools)
        self._arguments = ToolArguments(writer, form, tools)
        self._body = writer.rule(alternatives(map(self._call, self._tools)))
        end = writer.literal(form.section_end)
        more = ""
        if parallel:
            again = writer.literal((form.separator or "") + form.call_begin)
            more = f"({again} {self._body})*"
        self._rest = writer.rule(" ".join(filter(None, (self._body, more, end))))

    def reply(self, excluding: str) -> str:
        """A whole reply. Its free text may not begin with ``excluding``, which means something."""
        form, writer = self._form, self._writer
        calls = f"{writer.literal(form.opening)} {self._rest}"
        if form.optional_tag:
            calls = f"{writer.literal(form.optional_tag)}? {calls}"
        if self._mode == "required":
            if self._answer is not None and self._answer.begin:
                # Kimi K3 answers with nothing before it calls.
                nothing = writer.literal(self._answer.begin + self._answer.end)
                calls = f"({nothing})? {calls}"
            return writer.rule(calls)
        if self._content is not None:
            return writer.rule(alternatives([self._content, calls]))
        openings = [re.escape(excluding)] if excluding else []
        if not form.trigger:
            openings.extend(_loose(each) for each in first_texts(form, self._tools))
        text = ANY_TEXT
        if openings:
            joined = "|".join(openings).replace("/", r"\/")
            text += rf" & ~/{_SPACE}*({joined})(.|\n)*/"
        tag = form.trigger or form.optional_tag
        head = _with_special(writer, text, self._answer)
        options = [f"{head} {writer.terminal(text)}".strip()]
        if tag:
            begun = writer.literal(form.opening[len(form.trigger) :])
            options.append(f"{until(writer, tag, text, self._answer)} {begun} {self._rest}")
        if not form.trigger:
            options.append(calls)
        return writer.rule(alternatives(options))

    def _call(self, tool: Tool) -> str:
        """A call of one tool, after ``call_begin``."""
        begin = self._form.call_begin
        rest = self._form.call.removeprefix(begin).replace(NAME, tool.name)
        fills = {ID: _ID, INDEX: _INDEX, ARGUMENTS: self._arguments.of(tool)}
        parts = (
            fills[part] if part in fills else self._writer.literal(part)
            for part in split_pattern(rest)
        )
        return " ".join(filter(None, parts))


class ToolArguments:
    """Writes the grammars of tools' arguments.

    Args:
        writer: collects the rules.
        form: how the model writes arguments.
        tools: the tools of the request.
    """

    def __init__(self, writer: LarkWriter, form: ToolFormat, tools: Sequence[Tool]) -> None:
        self._writer = writer
        self._form = form
        self._indices = {tool.name: index for index, tool in enumerate(tools)}

    def of(self, tool: Tool) -> str:
        """The grammar of one tool's ``$ARGUMENTS``.

        Raises:
            ValidationError: its schema is unusable; names the tool by its place.
        """
        self._writer.about = tool.name
        schema: dict[str, Any] = {"type": "object", **tool.parameters}
        try:
            check_shapes(schema)
            if self._form.arguments is None:
                return self._json_text(tool.lark) or self._writer.schema(schema)
            schema, warnings = without_not_enforced(schema)
            self._writer.warn(warnings)
            check_finite(schema)
            rules = ArgumentRules(self._writer, self._form.arguments, schema, lark=tool.lark)
            return rules.arguments()
        except ValidationError as error:
            reason = error.message.removeprefix("the JSON schema cannot be used: ")
            if tool.lark:
                raise ValidationError(
                    f"the grammar of tool {tool.name!r} cannot be used: {reason}",
                    field="tools",
                    index=self._indices[tool.name],
                ) from error
        except RecursionError:
            reason = "it is nested too deeply"
        except (
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
        ):  # a keyword's value may be of any type
            reason = "it is not a valid JSON schema"
        raise ValidationError(
            f"the schema of tool {tool.name!r} cannot be used: {reason}",
            field="tools",
            index=self._indices[tool.name],
        )

    def _json_text(self, lark: str) -> str | None:
        """A JSON object with a text under a Lark grammar; None if any text will do."""
        if not lark:
            return None
        if (text := self._writer.text(lark, "json")) is None:
            return None
        # With a space at most where JSON allows some, as under a schema.
        begin = self._writer.terminal(rf'/\{{ ?"{INPUT}" ?: ?"/')
        end = self._writer.terminal('/" ?}/')
        return self._writer.rule(f"{begin} {text} {end}")


def first_texts(form: ToolFormat, tools: Sequence[Tool]) -> list[str]:
    """How a reply that is a call begins, in a format whose calls have no tag.

    An opening with a word in it, such as ``{"name": "``, suffices. Otherwise the names of the tools
    are part of it: ``[get_weather(``.
    """
    if re.search(r"\w", form.opening):
        return [form.opening]
    after = split_pattern(form.call)[2][:1]
    return [form.opening + tool.name + after for tool in tools]


def _loose(text: str) -> str:
    """A regular expression for a text with any white space between its words and signs."""
    return f"{_SPACE}*".join(re.escape(part) for part in re.findall(r"[\w.-]+|[^\w\s]", text))
