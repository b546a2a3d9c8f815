"""Decisions: typed questions about a text or about JSON, answered with probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import Call, Request, TaskOptions, flat_body


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """The answer to one question.

    Attributes:
        type: the question's.
        value: of a noul, the probability that it is true; of a choice, the likeliest option; of a
            score, the mean of the levels, counted from 0.
        confidence: from 0 to 1; None for a noul.
        probabilities: of the options or levels, by their names; empty for a noul.
    """

    type: Literal["noul", "choice", "score"]
    value: float | str
    confidence: float | None
    probabilities: Mapping[str, float]


class AsyncDecide(AsyncCaller):
    """The method for /v1/systemone."""

    async def decide(
        self,
        state: str | dict[str, Any] | list[Any],
        questions: Mapping[str, Mapping[str, Any]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[TaskOptions],
    ) -> dict[str, DecisionAnswer]:
        """Answers to typed questions, by their names.

        A question is a mapping of ``type`` (``noul``: true or false, ``choice``, ``score``),
        ``instructions`` and ``criteria``: of a choice its options with their meanings or None, of a
        score the list of its levels.
        """
        asked = {name: dict(question) for name, question in questions.items()}
        body = flat_body({"state": state, "questions": asked}, model, options)
        call = Call(Request("POST", "/v1/systemone", body), parse_answers)
        return await self._send(call, timeout)


def parse_answers(document: Mapping[str, Any]) -> dict[str, DecisionAnswer]:
    """The answers of a reply."""
    return {
        name: DecisionAnswer(
            answer["type"],
            answer[answer["type"]],
            answer.get("confidence"),
            answer.get("probabilities", {}),
        )
        for name, answer in document["answers"].items()
    }
