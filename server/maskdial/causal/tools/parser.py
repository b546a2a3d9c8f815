"""ReplyParser: tells a reply's reasoning, text and tool calls apart while it is written."""

import json
import re
from collections.abc import Callable, Generator, Sequence

from maskdial.causal.tools.arguments import raw_kind
from maskdial.causal.tools.events import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ToolCallDelta,
    merged,
)
from maskdial.causal.tools.format import (
    ARGUMENTS,
    ID,
    NAME,
    PLAIN_FORMAT,
    ArgumentList,
    ToolFormat,
    split_pattern,
)
from maskdial.causal.tools.grammar import first_texts
from maskdial.causal.tools.notation import json_from
from maskdial.causal.tools.thinking import ThinkingMarks
from maskdial.causal.tools.tool import Tool

# A part of the parser: it yields where it needs more text, and returns what it read.
_Reader = Generator[None, None, None]
_Asker = Generator[None, None, bool]
_Taker = Generator[None, None, str]
_WORD = re.compile(r"[\w.$-]*")


class _CutError(Exception):
    """The text ended within a call."""


class _MismatchError(Exception):
    """The text is no call after all."""


class ReplyParser:
    """Reads one reply, in pieces of any size; how it is cut changes nothing.

    No delta holds a part of a tag. White space around reasoning, and between text and a call,
    belongs to neither. It reads what `write_grammar` allows; text that was written without a
    grammar and only begins like a call is content.

    Args:
        form: how the model writes calls; None for one whose template knows no tools.
        tools: the tools of the request; empty where none may be called.
        thinking: the model's marks, None where its thinking is content.
        thinking_opened: as for `write_grammar`.

    Attributes:
        num_calls: how many calls have begun.
        reasoning: whether the text is within the model's thinking.
        incomplete: whether the text ended, or went wrong, within a call. Set by `finish`.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[Tool] = (),
        *,
        thinking: ThinkingMarks | None = None,
        thinking_opened: bool = False,
    ) -> None:
        self.num_calls = 0
        self.reasoning = False
        self.incomplete = False
        self._form = form or PLAIN_FORMAT
        self._tools = {tool.name: tool for tool in tools}
        self._thinking = thinking
        self._opened = thinking_opened
        self._text = ""
        self._ended = self._cut = False
        self._deltas: list[ReplyDelta] = []
        # What was read of a call that may turn out to be none.
        self._taken = ""
        self._reader = self._reply()
        next(self._reader)

    @property
    def special_tags(self) -> frozenset[str]:
        """The tags that are special tokens, which a decoder leaves out of the text: each has to be
        pushed by its spelling, where its token comes.
        """
        thinking = {} if self._thinking is None else self._thinking.special_ids
        return frozenset({**(self._form.special_ids if self._tools else {}), **thinking})

    def push(self, text: str) -> list[ReplyDelta]:
        """Takes more of the reply and returns what is certain by now."""
        self._text += text
        return self._run()

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        """Ends the reply and returns what was held back. May be called once.

        ``cut``: it was ended from outside, as by ``max_tokens``; what may be half a tag is dropped.
        """
        self._ended = True
        self._cut = cut
        return self._run()

    def _run(self) -> list[ReplyDelta]:
        next(self._reader, None)
        deltas, self._deltas = self._deltas, []
        return merged(deltas)

    def _reply(self) -> _Reader:
        yield
        yield from self._reasoning()
        # A reply whose calls have no tag has them at its very beginning or nowhere.
        if self._tools and not self._form.trigger:
            openings = first_texts(self._form, list(self._tools.values()))
            if (yield from self._begins_with(openings)):
                self._text = self._text.lstrip()
                yield from self._section()
        tag = self._form.trigger or self._form.optional_tag
        while True:
            found = yield from self._copy_until(tag if self._tools else "", self._content)
            if not found:
                return
            self._text = self._form.trigger + self._text
            yield from self._section()

    def _reasoning(self) -> _Reader:
        marks = self._thinking
        if marks is None:
            return
        if not self._opened:
            if not (yield from self._begins_with([marks.begin])):
                return
            self._text = self._text.lstrip().removeprefix(marks.begin)
        self.reasoning = True
        yield from self._skip_space()
        yield from self._copy_until(marks.end, lambda text: self._emit(ReasoningDelta(text)))
        self.reasoning = False
        yield from self._skip_space()

    def _section(self) -> _Reader:
        """Calls, from their very beginning; what is none is content."""
        num_before = self.num_calls
        self._taken = ""
        try:
            yield from self._literal(self._form.section_begin)
            yield from self._literal(self._form.call_begin)
            yield from self._calls()
        except _CutError:
            self.incomplete = True
            self._text = ""
        except _MismatchError:
            if self.num_calls == num_before:
                self._content(self._taken)
            else:
                self.incomplete = True

    def _calls(self) -> _Reader:
        again = (
            None if self._form.separator is None else self._form.separator + self._form.call_begin
        )
        while True:
            yield from self._call()
            if again is None or not (yield from self._at(again)):
                break
            yield from self._literal(again)
        end = self._form.section_end
        if (yield from self._at(end)):
            yield from self._literal(end)
        elif self._ended and self._text and (again or "").startswith(self._text):
            raise _CutError
        elif self._ended and end.startswith(self._text):
            self._text = ""  # the calls are complete, if not their section
        yield from self._skip_space()

    def _call(self) -> _Reader:
        """One call, after what all calls begin with."""
        parts = split_pattern(self._form.call)[1:]
        name, call_id = "", ""
        tells_id = ID in parts[: parts.index(ARGUMENTS)]
        for part, literal in zip(parts[::2], parts[1::2], strict=True):
            if part == NAME:
                name = yield from self._word()
            elif part == ID:
                call_id = yield from self._word()
            else:
                call_id = call_id if tells_id else self._form.new_call_id()
                self._emit(ToolCallDelta(self.num_calls, call_id=call_id, name=name))
                self.num_calls += 1
                yield from self._arguments(name, literal)
            yield from self._literal(literal)

    def _arguments(self, name: str, end: str) -> _Reader:
        if self._form.arguments is None:
            yield from self._json_object()
        else:
            yield from self._argument_list(self._form.arguments, name, end)

    def _json_object(self) -> _Reader:
        """A JSON object, passed on as it is."""
        depth, quoted, escaped = 0, False, False
        while True:
            for position, character in enumerate(self._text):
                if escaped:
                    escaped = False
                elif quoted:
                    escaped = character == "\\"
                    quoted = character != '"'
                elif character == '"':
                    quoted = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                if depth == 0 and not character.isspace():
                    if character != "}":
                        raise _MismatchError
                    self._add(self._take(position + 1))
                    return
            self._add(self._take(len(self._text)))
            yield from self._wait()

    def _argument_list(self, notation: ArgumentList, name: str, end: str) -> _Reader:
        """Arguments one by one, passed on as a JSON object.

        Args:
            notation: how they are written.
            name: the tool's.
            end: what is after the last one.
        """
        before, _, between, _, after = split_pattern(notation.parameter)
        tool = self._tools.get(name)
        root = {} if tool is None else tool.parameters
        properties = root.get("properties", {})
        self._add("{")
        num_arguments = 0
        while not (yield from self._at(end)):
            if num_arguments:
                yield from self._literal(notation.separator)
            yield from self._literal(before)
            key = yield from self._word()
            yield from self._literal(between)
            self._add(f"{', ' if num_arguments else ''}{json.dumps(key)}: ")
            if notation.quote:
                stops = (after or notation.separator)[:1] + end[:1]
                value = yield from self._quoted_value(notation.quote, stops)
                self._add(json_from(value, notation.quote))
                yield from self._literal(after)
            elif raw_kind(properties.get(key, True), root) == "text":
                self._add('"')
                if not (yield from self._copy_until(after, self._add_escaped, strips=False)):
                    raise _CutError
                self._add('"')
            else:
                value = yield from self._raw_value(after)
                kind = raw_kind(properties.get(key, True), root)
                self._add(_json_or_text(value, only_null=kind == "text_or_null"))
            num_arguments += 1
        self._add("}")

    def _quoted_value(self, quote: str, stops: str) -> _Taker:
        """A value with quotes, up to a character that cannot belong to it."""
        depth, position, quoted = 0, 0, ""
        while True:
            while position < len(self._text):
                character = self._text[position]
                if quoted:
                    if quote == '"' and character == "\\":
                        position += 2
                    elif self._text.startswith(quoted, position):
                        position, quoted = position + len(quoted), ""
                    elif quoted.startswith(self._text[position:]):
                        break
                    else:
                        position += 1
                elif self._text.startswith(quote, position) or (quote == '"' and character == "'"):
                    quoted = character if quote == '"' else quote
                    position += len(quoted)
                elif quote.startswith(self._text[position:]):
                    break
                elif depth == 0 and character in stops:
                    return self._take(position)
                else:
                    depth += (character in "{[(") - (character in "}])")
                    position += 1
            yield from self._wait()

    def _raw_value(self, end: str) -> _Taker:
        parts: list[str] = []
        if not (yield from self._copy_until(end, parts.append, strips=False)):
            raise _CutError
        return "".join(parts)

    def _copy_until(
        self, tag: str, pass_on: Callable[[str], None], *, strips: bool = True
    ) -> _Asker:
        """Passes text on up to a tag, which it drops; False where the text ends before it.

        ``strips``: the white space before the tag is dropped with it.
        """
        while True:
            found = self._text.find(tag) if tag else -1
            if found >= 0:
                text = self._text[:found]
                pass_on(text.rstrip() if strips else text)
                self._text = self._text[found + len(tag) :]
                return True
            keep = _overlap(self._text, tag)
            text = self._text[: len(self._text) - keep]
            if self._ended:
                pass_on(text if self._cut else self._text)
                self._text = ""
                return False
            if tag and strips:
                text = text.rstrip()
            pass_on(text)
            self._text = self._text[len(text) :]
            yield

    def _begins_with(self, texts: Sequence[str]) -> _Asker:
        """Whether the text begins with one of some texts, white space aside."""
        while True:
            text = self._text.lstrip()
            if any(text.startswith(each) for each in texts):
                return True
            if not any(each.startswith(text) for each in texts):
                return False
            if self._ended:
                self._text = "" if self._cut else self._text
                return False
            yield

    def _at(self, text: str) -> _Asker:
        """Whether a text is next; not where the reply ends within it."""
        while len(self._text) < len(text) and text.startswith(self._text) and not self._ended:
            yield
        if self._ended and not self._text:
            return not text
        return self._text.startswith(text)

    def _literal(self, text: str) -> _Reader:
        while len(self._text) < len(text) and text.startswith(self._text):
            yield from self._wait()
        if not self._text.startswith(text):
            raise _MismatchError
        self._take(len(text))

    def _word(self) -> _Taker:
        """A name or an id, which the next literal ends."""
        while True:
            match = _WORD.match(self._text)
            assert match is not None
            if match.end() < len(self._text):
                if not match[0]:
                    raise _MismatchError
                return self._take(match.end())
            yield from self._wait()

    def _skip_space(self) -> _Reader:
        while not self._text.lstrip() and not self._ended:
            yield
        self._text = self._text.lstrip()

    def _wait(self) -> _Reader:
        if self._ended:
            raise _CutError
        yield

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._taken += taken
        return taken

    def _content(self, text: str) -> None:
        self._emit(ContentDelta(text))

    def _add(self, arguments: str) -> None:
        self._emit(ToolCallDelta(self.num_calls - 1, arguments))

    def _add_escaped(self, text: str) -> None:
        self._add(json.dumps(text, ensure_ascii=False)[1:-1])

    def _emit(self, delta: ReplyDelta) -> None:
        match delta:
            case ContentDelta("") | ReasoningDelta("") | ToolCallDelta(arguments="", name=None):
                return
        self._deltas.append(delta)


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of a text with which a tag begins."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


def _json_or_text(value: str, *, only_null: bool) -> str:
    """A value without quotes as JSON: as it is where it is JSON, and else a string."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    if only_null and parsed is not None:
        return json.dumps(value, ensure_ascii=False)
    return value
