"""Verifier: goes through a log as a batch goes through its requests, and writes verdicts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from maskdial.batches.answers import Answer, Answers, line_of
from maskdial.batches.lines import Line
from maskdial.errors import ValidationError
from maskdial.offline.application import Application
from maskdial.offline.verify.entries import AnswerFile, Entry
from maskdial.offline.verify.verdict import Finding, Judge, differs
from maskdial.receipts.content import lasting


class Verifier(Answers):
    """Answers each line with what is wrong with its reply.

    Args:
        application: has the models.
        task: the route of lines that name none.
        parameters: of lines that have none.
        answers: the replies; None if each line has its own.
        judge: judges the lines that name their route.
    """

    def __init__(
        self,
        application: Application,
        task: str | None,
        parameters: Mapping[str, Any] | None,
        answers: AnswerFile | None,
        judge: Judge,
    ) -> None:
        super().__init__(application, task, parameters)
        self._answers = answers
        self._judge = judge

    def fault_of(self, line: Line) -> str:
        return line.fault if "url" in line.content else super().fault_of(line)

    async def answer(self, group: Sequence[Line]) -> list[Answer]:
        if "url" in group[0].content:
            return [verdict(line, await judged(line, self._answers, self._judge)) for line in group]
        again = await super().answer(group)
        return [
            verdict(line, await self._compared(line, answer))
            for line, answer in zip(group, again, strict=True)
        ]

    def failure(self, line: Line, fault: str) -> Answer:
        return verdict(line, [Finding("line", fault)])

    def _key(self, line: Line) -> str | None:
        return None if "url" in line.content else super()._key(line)

    async def _compared(self, line: Line, answer: Answer) -> list[Finding]:
        """What is wrong with a line of texts, whose replies have no receipts."""
        told = None if self._answers is None else self._answers.find(line)
        if told is None:
            return [_MISSING]
        if answer.failed:
            why = json.loads(answer.content)["error"]
            return [Finding("failed", f"the request gets no answer here: {why}")]
        if _output(answer.content) == _output(json.dumps(told).encode()):
            return []
        (once_more,) = await super().answer([line])
        return [differs(is_drawn=_output(once_more.content) != _output(answer.content))]


_MISSING = Finding("line", "the answers have none to this request")


async def judged(line: Line, answers: AnswerFile | None, judge: Judge) -> list[Finding]:
    """What is wrong with the reply to a line that names its route."""
    answer = line.content if answers is None else answers.find(line)
    if answer is None:
        return [_MISSING]
    try:
        entry = Entry.of(line.content, answer)
    except ValidationError as error:
        return [Finding("line", error.message)]
    return await judge.judge(entry)


def verdict(line: Line, found: Sequence[Finding]) -> Answer:
    """A line of the result."""
    content: dict[str, Any] = {"line": line.number}
    content |= {name: line.content[name] for name in ("custom_id", "id") if name in line.content}
    content["faults"] = [asdict(each) for each in found]
    return Answer(line_of(content), bool(found))


def _output(answer: bytes) -> Any:
    return lasting(json.dumps(json.loads(answer).get("output")).encode())
