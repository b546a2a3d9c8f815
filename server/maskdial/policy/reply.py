"""One text of a reply on its way through the rules of a policy, token by token.

The text is read in segments: the reasoning, the content, a call. Tokens are passed on once every
rule that holds text back has read what they add. What a rule redacts is written anew: the tokens of
a placeholder take the place of those that it covers, with a log-probability of 0, as they were not
drawn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.request import ReplyReader
from maskdial.causal.events import Finish, ReadToken, TokenEvent, Verdict
from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from maskdial.policy.fit import Fit
from maskdial.policy.guard import GuardedRequest, verdict_of
from maskdial.policy.judge import Found, together
from maskdial.policy.placeholders import Placeholders
from maskdial.policy.redaction import Change, Span, Strings, changed, changes, merged
from maskdial.policy.rules import Part, Policy, Rule
from maskdial.policy.windows import Before, Both, Window, Words

Delta = Callable[[str], ReplyDelta]


@dataclass(frozen=True, slots=True)
class _Unit:
    """What a token adds to a segment: a part of its text, and the token, unless the token also adds
    to the next one.
    """

    start: int
    end: int
    event: TokenEvent | None


class _Reading:
    """How far one rule has read a segment."""

    def __init__(self, policy: Policy, rule: Rule, *, tags: bool) -> None:
        self.policy, self.rule = policy, rule
        self._tags = tags
        self._windows = (Both if tags else Before)(rule.every, rule.context)
        self._spans: list[Span] = []
        self.cleared = 0

    def next(self, words: Words) -> list[Window]:
        """The windows that are to be read now."""
        windows = self._windows.next(words)
        if words.ended and not windows:
            self.cleared = len(words.text)
        return windows

    async def read(
        self, words: Words, windows: Sequence[Window], request: GuardedRequest
    ) -> list[Found]:
        """What is found in some windows; its place counts from the segment's beginning."""
        texts = [words.text[each.start : each.end] for each in windows]
        found: list[Found] = []
        for window, labels in zip(
            windows, await request.watch.verdicts(self.policy, self.rule, texts), strict=True
        ):
            for each in labels:
                start, end = each.start + window.start, each.end + window.start
                if not self._tags:
                    start, end = window.core, window.end
                elif start >= window.cleared:
                    continue  # the next window sees more of it
                elif start < window.core and not self._goes_on(start, end, window.core):
                    continue  # the window before has said so, or has said otherwise
                self._spans.append(Span(start, end, each.label, each.score))
                found.append(Found(each.label, each.score, start, end))
            self.cleared = window.cleared
        if words.ended:
            self.cleared = len(words.text)
        return found

    def _goes_on(self, start: int, end: int, core: int) -> bool:
        """Whether a place goes on with one that is known and reaches into the window's core, so
        that it has not been passed on.
        """
        return any(max(start, core) < each.end < end for each in self._spans)


@dataclass(slots=True)
class _Halt:
    """Where a rule ends a text, and whether nothing of it is to be seen."""

    at: int
    refuses: bool


class _Segment:
    """A part of a reply that is one text.

    Args:
        part: what it is.
        index: of the call.
        delta: what a piece of it adds to the reply.
        readings: the rules that read it.
        number: of the segment in the reply.
        whole: whether it is read once it has ended: a call, or a text that has to match a grammar.
    """

    def __init__(
        self,
        part: Part,
        index: int,
        delta: Delta | None,
        readings: Sequence[_Reading],
        *,
        number: int,
        whole: bool = False,
    ) -> None:
        self.part, self.index, self.delta, self.number = part, index, delta, number
        self.readings, self.whole = readings, whole
        self.words = Words()
        self.units: deque[_Unit] = deque()
        self.released = 0
        self.spans: list[Span] = []
        self.halts: list[_Halt] = []
        self.call: list[ToolCallDelta] = []

    @property
    def text(self) -> str:
        return self.words.text


@dataclass(slots=True)
class _Written:
    """What is passed on of a text."""

    events: list[TokenEvent] = field(default_factory=list)
    carried: list[ReplyDelta] = field(default_factory=list)
    """Deltas that wait for a token to come with."""


class GuardedText:
    """One text.

    Args:
        request: under its policies; its prompt has been read.
        tokenizer: of the model that writes.
        reader: tells the parts of a reply apart; None for a text that has none.
        prompt_ids: the tokens before the text.
        fit: what a redacted text has to match.
        describes_prompt: whether the last token has the log-probabilities of the prompt's, so that
            a text which a rule ends goes on unseen until there are any.
    """

    def __init__(
        self,
        request: GuardedRequest,
        tokenizer: Tokenizer,
        reader: ReplyReader | None,
        prompt_ids: Sequence[int],
        fit: Fit,
        *,
        describes_prompt: bool = False,
    ) -> None:
        self._request = request
        self._rules = list(request.rules("output"))
        self._tags = {id(rule): request.watch.judge.tags(rule) for _, rule in self._rules}
        self._tokenizer = tokenizer
        self._no_token = min(tokenizer.special_ids, default=0)
        self._reader = reader
        self._fit = fit
        self._describes_prompt = describes_prompt
        self._is_halted = False
        self._prompt_length = len(prompt_ids)
        self._placeholders: Placeholders = request.placeholders.copy()
        self._given = tuple(self._placeholders.known)
        self._verdicts: list[tuple[int, int, Verdict]] = []  # with their segment and place
        self._telling: dict[int, list[asyncio.Task[None]]] = {}  # by reading, in turn
        self._segment: _Segment | None = None
        self._num_segments = 0
        self._written = _Written()
        self._num_read = self._num_written = 0
        self._sent: list[str] = []
        self.ended = False
        self.refused = False

    async def push(self, event: TokenEvent) -> list[TokenEvent]:
        """Takes the next token, and returns those that can be passed on.

        Raises:
            UnavailableError, OverloadedError: a rule could not be judged.
        """
        if self.ended:
            return []
        self._num_read += 1
        if self._is_halted:
            return [] if event.finish is None else self._end(self._halted(event.finish))
        deltas = self._deltas(event)
        bare = replace(event, finish=None)
        for i, delta in enumerate(deltas):
            halt = await self._enter(delta)
            if halt is None:
                self._add(delta, bare if i == len(deltas) - 1 else None)
            else:
                await self._told()
                return self._halt(event.finish)
        if not deltas:
            self._wait(bare)
        segment = self._segment
        if segment is not None:
            if event.finish is not None:
                segment.words.finish()
            halt = await self._read(segment)
            if halt is not None:
                await self._told()
                return self._halt(event.finish)
        if event.finish is not None:
            await self._told()
            if segment is not None:
                self._close(segment)
            return self._end(event.finish)
        return self._taken()

    def abandon(self) -> None:
        """Asks for no more verdicts."""
        for task in chain.from_iterable(self._telling.values()):
            if not task.cancel() and not task.cancelled():
                task.exception()  # or it would be reported as one that nobody saw

    def _deltas(self, event: TokenEvent) -> list[ReplyDelta]:
        if self._reader is not None:
            return self._reader.push(event)
        return [ContentDelta(event.text)] if event.text else []

    async def _enter(self, delta: ReplyDelta) -> _Halt | None:
        """Ends the segment before a delta, unless the delta goes on with it."""
        part, index = _place(delta)
        segment = self._segment
        if segment is not None and (segment.part, segment.index) == (part, index):
            return None
        if segment is not None:
            segment.words.finish()
            if (halt := await self._read(segment)) is not None:
                return halt
        readings = [
            _Reading(policy, rule, tags=self._tags[id(rule)])
            for policy, rule in self._rules
            if part in rule.parts
        ]
        redacts = any(each.rule.action == "redact" for each in readings)
        bound = part == "content" and redacts and self._fit.binds_content
        whole = part == "arguments" or bound
        self._num_segments += 1
        self._segment = _Segment(
            part, index, _delta_of(part), readings, number=self._num_segments, whole=whole
        )
        if segment is not None:
            # Tokens that added nothing may have begun what follows.
            self._segment.units.extend(_Unit(0, 0, each.event) for each in segment.units)
        return None

    def _add(self, delta: ReplyDelta, event: TokenEvent | None) -> None:
        segment = self._segment
        assert segment is not None
        if isinstance(delta, ToolCallDelta):
            segment.call.append(delta)
            segment.units.append(_Unit(0, 1, event))
            return
        start = len(segment.text)
        segment.words.add(delta.text)
        segment.units.append(_Unit(start, len(segment.text), event))

    def _wait(self, event: TokenEvent) -> None:
        """Takes a token that adds nothing: it waits for the next that does."""
        if self._segment is None:
            readings: list[_Reading] = []
            self._segment = _Segment("content", -1, _delta_of("content"), readings, number=0)
        place = len(self._segment.text)
        self._segment.units.append(_Unit(place, place, event))

    async def _read(self, segment: _Segment) -> _Halt | None:
        """Has the rules read on, and passes on what all of them have cleared."""
        if segment.whole:
            return await self._read_whole(segment) if segment.words.ended else None
        ready = [(each, each.next(segment.words)) for each in segment.readings]
        for reading, windows in ready:
            if windows and not reading.rule.holds:
                self._tell(reading, segment, windows)
        due = [(each, windows) for each, windows in ready if windows and each.rule.holds]
        found = await together(
            [partial(each.read, segment.words, some, self._request) for each, some in due]
        )
        for (reading, _), labels in zip(due, found, strict=True):
            halts = [self._note(reading, segment, each) for each in labels]
            segment.halts += [each for each in halts if each is not None]
        cut = min(
            (each.cleared for each in segment.readings if each.rule.holds),
            default=len(segment.text),
        )
        halt = min(segment.halts, key=lambda each: each.at, default=None)
        if halt is None or halt.at > cut:  # other rules may still end it earlier
            self._release(segment, self._whole(segment, cut))
            return None
        self.refused = any(each.refuses for each in segment.halts)
        end = self._whole(segment, halt.at)
        self._release(segment, end)
        if segment.released < end:  # a token goes on behind it
            parts = [each for each in self._changes(segment, end) if each.end <= end]
            text = changed(segment.text, parts, segment.released, end)
            self._rewrite(segment, [each for each in segment.units if each.start < end], text)
        return halt

    def _tell(self, reading: _Reading, segment: _Segment, windows: Sequence[Window]) -> None:
        """Has a rule that only tells read on, while the text goes on without it."""
        others = self._telling.setdefault(id(reading), [])
        before = others[-1:]

        async def tell() -> None:
            for other in before:
                await other
            for each in await reading.read(segment.words, windows, self._request):
                self._note(reading, segment, each)

        others[:] = [each for each in others if not each.done()]
        others.append(asyncio.create_task(tell()))

    async def _told(self) -> None:
        """Waits for what rules that only tell have to say.

        Raises:
            UnavailableError, OverloadedError: one could not be judged.
        """
        for task in chain.from_iterable(self._telling.values()):
            await task

    def _note(self, reading: _Reading, segment: _Segment, found: Found) -> _Halt | None:
        """Notes a verdict; returns where it ends the text, if it does."""
        rule = reading.rule
        verdict = verdict_of(reading.policy, rule, found, segment.part, max(segment.index, 0))
        place = segment.text[found.start : found.end]
        if verdict.action == "redact" and any(each in place for each in self._given):
            return None  # it hides nothing any more
        self._verdicts.append((segment.number, found.start, verdict))
        self._request.watch.note(verdict)
        if verdict.action == "redact":
            segment.spans.append(Span(found.start, found.end, found.label, found.score))
        if verdict.action in ("refuse", "stop"):
            return _Halt(found.start, verdict.action == "refuse")
        return None

    def _whole(self, segment: _Segment, cut: int) -> int:
        """The last place up to ``cut`` that cuts neither what is redacted nor a placeholder."""
        for span in reversed(merged(segment.spans)):
            if span.start < cut < span.end:
                cut = span.start
        if self._placeholders.restored and not segment.words.ended:
            opened = segment.text.rfind("[", segment.released, cut)
            begun = segment.text[opened:] if opened >= 0 else ""
            for each in self._placeholders.restored:
                inside = begun.startswith(each) and cut < opened + len(each)
                if begun and (inside or (each.startswith(begun) and each != begun)):
                    return opened
        return cut

    def _changes(self, segment: _Segment, cut: int) -> list[Change]:
        final = [each for each in merged(segment.spans) if each.end <= cut]
        found = changes(segment.text, final, self._placeholders)
        for placeholder, value in self._placeholders.restored.items():
            at = segment.text.find(placeholder)
            while at >= 0:
                found.append(Change(at, at + len(placeholder), value))
                at = segment.text.find(placeholder, at + len(placeholder))
        return sorted(found, key=lambda each: each.start)

    def _release(self, segment: _Segment, cut: int) -> None:
        """Passes on the tokens up to a place."""
        units = segment.units
        if cut <= segment.released:
            return
        parts = [each for each in self._changes(segment, cut) if each.end <= cut]
        while units:
            num = self._num_together(units, parts, cut)
            if num is None:
                return
            group = [units.popleft() for _ in range(num)]
            start, end = group[0].start, group[-1].end
            segment.released = end
            if any(each.start < end and start < each.end for each in parts):
                self._rewrite(segment, group, changed(segment.text, parts, start, end))
                continue
            for unit in group:
                self._pass(segment, unit.event, segment.text[unit.start : unit.end])

    def _num_together(self, units: "deque[_Unit]", parts: Sequence[Change], cut: int) -> int | None:
        """How many units go on next: one with text, those before it that add nothing, and those
        that a change covers together with it. None while they have to wait.
        """
        for num, unit in enumerate(units, 1):
            end = unit.end
            if end > units[0].start and not any(each.start < end < each.end for each in parts):
                return num if end <= cut else None
        return None

    def _close(self, segment: _Segment) -> None:
        """Passes on the last tokens of a segment, which add nothing."""
        while segment.units:
            self._pass(segment, segment.units.popleft().event, "")

    def _pass(self, segment: _Segment, event: TokenEvent | None, text: str) -> None:
        delta = None if not text or segment.delta is None else segment.delta(text)
        if delta is not None:
            self._written.carried.append(delta)
        if event is not None:
            self._emit(replace(event, text=text))
        elif text:
            self._sent.append(text)

    def _emit(self, event: TokenEvent) -> None:
        self._num_written += 1
        self._sent.append(event.text)
        read = None
        if self._reader is not None:
            read = ReadToken(tuple(self._written.carried), self._reader.num_reasoning)
        self._written.carried = []
        self._written.events.append(replace(event, index=self._num_written, read=read))

    def _rewrite(self, segment: _Segment, group: Sequence[_Unit], text: str) -> None:
        """Passes on a text in place of the one that some tokens add."""
        events = [unit.event for unit in group if unit.event is not None]
        if not events:
            self._pass(segment, None, text)
            return
        for token_id, piece in self._tokens(text):
            event = replace(events[0], token_id=token_id, logprob=0.0, top=(), special=False)
            self._pass(segment, event, piece)

    def _tokens(self, text: str) -> list[tuple[int, str]]:
        """The tokens of a text, each with what it adds."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        decoder = self._tokenizer.decoder(())
        pieces = [decoder.push(each) for each in ids]
        if pieces:
            pieces[-1] += decoder.flush()
        if "".join(pieces) != text:  # as a tokenizer that normalizes texts has it
            pieces = [text, *("" for _ in ids[1:])]
        return list(zip(ids, pieces, strict=True))

    async def _read_whole(self, segment: _Segment) -> _Halt | None:
        """Judges a call, or a text that has to match a grammar: the strings of its JSON."""
        is_call = bool(segment.call)
        text = "".join(each.arguments for each in segment.call) if is_call else segment.text
        tool = (segment.call[0].name or "") if is_call else None
        strings = Strings(text, self._fit.names(tool))
        found = await together(
            [
                partial(self._request.watch.verdicts, each.policy, each.rule, strings.texts)
                for each in segment.readings
            ]
        )
        spans: list[list[Span]] = [[] for _ in strings.texts]
        halts = []
        for reading, labels_of in zip(segment.readings, found, strict=True):
            for i, labels in enumerate(labels_of):
                for each in labels:
                    verdict = verdict_of(
                        reading.policy, reading.rule, each, segment.part, segment.index
                    )
                    self._verdicts.append((segment.number, each.start, verdict))
                    self._request.watch.note(verdict)
                    if verdict.action == "redact":
                        spans[i].append(Span(each.start, each.end, each.label, each.score))
                    elif verdict.action in ("refuse", "stop"):
                        halts.append(_Halt(0, verdict.action == "refuse"))
        if halts:
            self.refused = any(each.refuses for each in halts)
            segment.units.clear()
            return halts[0]
        redacted = [
            changed(each, changes(each, found_here, self._placeholders))
            for each, found_here in zip(strings.texts, spans, strict=True)
        ]
        written = strings.replaced(list(map(self._restored, redacted)))
        if redacted != strings.texts and not await self._fits(segment, written):
            self.refused = True
            segment.units.clear()
            return _Halt(0, refuses=True)
        if is_call:
            self._written.carried.append(replace(segment.call[0], arguments=written))
        elif segment.delta is not None:
            self._written.carried.append(segment.delta(written))
        own = deque[_Unit]()
        while any(each.end for each in segment.units):
            own.append(segment.units.popleft())
        events = [unit.event for unit in own if unit.event is not None]
        pieces = [""] * len(events)
        if written != text and events:  # its tokens would tell what it said
            tokens = self._tokens(written)
            pieces = [piece for _, piece in tokens]
            events = [replace(events[0], token_id=each, logprob=0.0, top=()) for each, _ in tokens]
        elif not is_call:
            pieces = [segment.text[each.start : each.end] for each in own if each.event is not None]
        for event, piece in zip(events, pieces, strict=True):
            self._emit(replace(event, text="" if is_call else piece))
        return None

    async def _fits(self, segment: _Segment, text: str) -> bool:
        """Whether a redacted segment still is what was asked for."""
        if segment.call:
            return await self._fit.arguments(segment.call[0].name or "", text)
        return await self._fit.content(text)

    def _restored(self, text: str) -> str:
        for placeholder, value in self._placeholders.restored.items():
            text = text.replace(placeholder, value)
        return text

    def _halt(self, finish: Finish | None) -> list[TokenEvent]:
        """Ends the text by a rule."""
        if finish is None and self._describes_prompt:
            self._is_halted = True
            return self._taken()
        return self._end(self._halted(finish))

    def _halted(self, finish: Finish | None = None) -> Finish:
        """How a text ends that a rule ends.

        Args:
            finish: how it would have ended, where that is known.
        """
        if finish is not None:
            return replace(finish, reason="content_filter", stop=None)
        return Finish(
            reason="content_filter",
            generated_text="",
            generated_tokens=self._num_read,
            seed=None,
            input_length=self._prompt_length,
            queue_seconds=0.0,
            inference_seconds=0.0,
        )

    def _end(self, finish: Finish) -> list[TokenEvent]:
        """The last tokens, with how the text ended."""
        self.ended = True
        events = self._taken()
        if not events or self._written.carried:
            self._emit(TokenEvent(0, self._no_token, "", 0.0, special=True))
            events += self._taken()
        found = sorted(self._verdicts, key=lambda each: each[:2])  # not as they came
        verdicts = (*self._request.verdicts, *(verdict for _, _, verdict in found))
        last, read = events[-1], events[-1].read
        if read is not None and self._reader is not None:
            called = self._reader.finish_reason == "tool_calls"
            read = replace(read, called=called and finish.reason != "content_filter")
        text = "".join(self._sent)
        finish = replace(finish, generated_text=text, verdicts=verdicts)
        return [*events[:-1], replace(last, finish=finish, read=read)]

    def nothing(self, finish: Finish) -> TokenEvent:
        """The only token of a text that is refused: how it ended."""
        finish = replace(finish, generated_text="")
        read = None if self._reader is None else ReadToken((), 0)
        return TokenEvent(1, self._no_token, "", 0.0, special=True, finish=finish, read=read)

    def _taken(self) -> list[TokenEvent]:
        events, self._written.events = self._written.events, []
        return events


def _place(delta: ReplyDelta) -> tuple[Part, int]:
    match delta:
        case ContentDelta():
            return "content", 0
        case ReasoningDelta():
            return "reasoning", 0
        case ToolCallDelta(index=index):
            return "arguments", index


def _delta_of(part: Part) -> Delta | None:
    deltas: dict[Part, Delta] = {"content": ContentDelta, "reasoning": ReasoningDelta}
    return deltas.get(part)
