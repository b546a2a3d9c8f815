"""ReplyParser: splits a reply into reasoning, content and tool calls while it is generated."""

from collections.abc import Callable, Sequence

from maskdial.causal.tools.argument_reader import ArgumentReader
from maskdial.causal.tools.events import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ToolCallDelta,
)
from maskdial.causal.tools.format import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    PLAIN_FORMAT,
    ToolFormat,
    split_pattern,
)
from maskdial.causal.tools.grammar import first_texts
from maskdial.causal.tools.incremental import IncrementalParser
from maskdial.causal.tools.marks import AnswerMarks, ThinkingMarks
from maskdial.causal.tools.scanner import CutError, MismatchError, Reader
from maskdial.causal.tools.tool import Tool


class ReplyParser(IncrementalParser):
    """Parses one reply, in pieces of any size; where the pieces are split does not matter.

    A delta never contains part of a tag. White space around reasoning, and between text and a call,
    is dropped. The parser reads everything that `write_grammar` allows. In text generated without a
    grammar, what begins like a call and is none becomes content.

    Args:
        form: how the model writes calls; None if its template does not support tools.
        tools: the tools of the request; empty if no tool may be called.
        thinking: the model's thinking marks; None to treat reasoning as content.
        thinking_opened: as for `write_grammar`.
        answer: the marks around the model's answer, which are dropped with all that follows them
            but calls.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[Tool] = (),
        *,
        thinking: ThinkingMarks | None = None,
        thinking_opened: bool = False,
        answer: AnswerMarks | None = None,
    ) -> None:
        super().__init__()
        self._form = form or PLAIN_FORMAT
        self._tools = {tool.name: tool for tool in tools}
        self._thinking = thinking
        self._opened = thinking_opened
        self._answer = answer

    @property
    def special_tags(self) -> frozenset[str]:
        """The special tokens of the marks and, where tools may be called, of calls."""
        marks = [each for each in (self._thinking, self._answer) if each is not None]
        tags = {tag for each in marks for tag in each.special_ids}
        return frozenset(tags | (self._form.special_ids.keys() if self._tools else set()))

    def _reply(self) -> Reader:
        yield from self._reasoning()
        # Calls without a tag can only be at the beginning.
        if self._tools and not self._form.trigger:
            openings = first_texts(self._form, list(self._tools.values()))
            if (yield from self._input.begins_with(openings)):
                self._input.text = self._input.text.lstrip()
                yield from self._section()
        begin = "" if self._answer is None else self._answer.begin
        begun = bool(begin) and (yield from self._input.begins_with([begin]))
        if begun:
            self._input.text = self._input.text.lstrip().removeprefix(begin)
            yield from self._input.skip_space()
        yield from self._content_and_calls(begun=begun)

    def _content_and_calls(self, *, begun: bool) -> Reader:
        """The rest of the reply.

        A mark that is written as text, as Granite's </response>, may be what the answer is about:
        it ends an answer that one began, and only the last one does.
        """
        call = (self._form.trigger or self._form.optional_tag) if self._tools else ""
        end, last_counts = "", False
        if self._answer is not None:
            is_text = not any(tag in self._answer.end for tag in self._answer.special_ids)
            last_counts = is_text and begun
            end = "" if is_text and self._answer.begin and not begun else self._answer.end
        behind: list[str] = []  # the text behind a mark that may be the last one, and the mark
        pass_on: Callable[[str], None] = self._content
        while found := (yield from self._input.copy_until((call, end), pass_on)):
            if found == end and last_counts:
                self._content("".join(behind))
                behind = [self._input.space + end]
                pass_on = behind.append
                continue
            if found == end or behind:
                pass_on, behind, end = _drop, [], ""
            if found == call:
                self._input.text = self._form.trigger + self._input.text
                yield from self._section()

    def _reasoning(self) -> Reader:
        marks = self._thinking
        if marks is None:
            return
        if not self._opened:
            if not (yield from self._input.begins_with([marks.begin, marks.end])):
                return
            self._input.text = self._input.text.lstrip()
            if not self._input.text.startswith(marks.begin):  # the end of none at all
                self._input.text = self._input.text.removeprefix(marks.end)
                yield from self._input.skip_space()
                return
            self._input.text = self._input.text.removeprefix(marks.begin)
        self.reasoning = True
        yield from self._input.skip_space()
        yield from self._input.copy_until(
            (marks.end,), lambda text: self._emit(ReasoningDelta(text))
        )
        self.reasoning = False
        yield from self._input.skip_space()
        if marks.header and (yield from self._input.begins_with([marks.header])):
            self._input.text = self._input.text.lstrip().removeprefix(marks.header)

    def _section(self) -> Reader:
        """Calls, from ``section_begin`` on; anything else is content."""
        num_before = self.num_calls
        self._input.taken = ""
        try:
            yield from self._input.literal(self._form.section_begin)
            yield from self._input.literal(self._form.call_begin)
            yield from self._calls()
        except CutError:
            self.incomplete = True
            self._input.text = ""
        except MismatchError:
            if self.num_calls > num_before:
                self.incomplete = True
                return
            # Skip the trigger, so that it is not found again.
            rest = self._form.trigger[len(self._input.taken) :]
            self._content(self._input.taken + rest)
            self._input.text = self._input.text.removeprefix(rest)

    def _calls(self) -> Reader:
        again = (
            None if self._form.separator is None else self._form.separator + self._form.call_begin
        )
        while True:
            yield from self._call()
            if again is None or not (yield from self._input.at(again)):
                break
            yield from self._input.literal(again)
        try:
            yield from self._input.literal(self._form.section_end)
        except CutError:
            self._input.text = ""  # the calls are complete, if not their section
        yield from self._input.skip_space()

    def _call(self) -> Reader:
        """One call, after ``call_begin``."""
        parts = split_pattern(self._form.call)[1:]
        name, call_id, index = "", "", ""
        tells_id = ID in parts[: parts.index(ARGUMENTS)]
        for part, literal in zip(parts[::2], parts[1::2], strict=True):
            if part == NAME:
                name = yield from self._input.name(self._tools, literal)
            elif part == ID:
                call_id = yield from self._input.word()
            elif part == INDEX:
                index = yield from self._input.word()
            else:
                number = int(index) if index.isdecimal() and len(index) < 9 else self.num_calls
                call_id = call_id if tells_id else self._form.new_call_id(name, number)
                self._emit(ToolCallDelta(self.num_calls, call_id=call_id, name=name))
                self.num_calls += 1
                tool = self._tools.get(name)
                parameters = {} if tool is None else tool.parameters
                reader = ArgumentReader(self._input, self._add)
                yield from reader.read(self._form.arguments, parameters, end=literal)
            yield from self._input.literal(literal)

    def _content(self, text: str) -> None:
        self._emit(ContentDelta(text))

    def _add(self, arguments: str) -> None:
        self._emit(ToolCallDelta(self.num_calls - 1, arguments))

    def _emit(self, delta: ReplyDelta) -> None:
        match delta:
            case ContentDelta("") | ReasoningDelta("") | ToolCallDelta(arguments="", name=None):
                return
        self._deltas.append(delta)


def _drop(_: str) -> None:
    """For what follows an answer."""
