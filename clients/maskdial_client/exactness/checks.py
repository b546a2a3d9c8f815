"""The checks: the same questions under other circumstances, compared with their first answers."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maskdial_client.exactness.asking import (
    FailedError,
    NotAskedError,
    Numbers,
    Server,
    Written,
    flat,
)
from maskdial_client.exactness.comparing import Outcome
from maskdial_client.exactness.questions import SCHEMA, long_question, masked

_TEMPERATURE = 0.8
_SCHEMA_TOKENS = 120
_POLL_SECONDS = 0.5

Answer = Written | Numbers
Ask = Callable[[int], Awaitable[Answer]]
"""The answer to a question, by the question's number."""
Note = Callable[[Outcome], None]
"""Takes the outcome of a check when it is known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of whom.

    Attributes:
        server: who is asked.
        questions: the prompts, or the texts.
        concurrency: the most requests that are open at once.
        batch_seconds: how long a batch is waited for.
        note: what takes the outcomes.
    """

    server: Server
    questions: Sequence[str]
    concurrency: int
    batch_seconds: float
    note: Note

    @property
    def levels(self) -> list[int]:
        """How many requests are open at once, from check to check: 2, 4, 8 and so on."""
        found = [2]
        while found[-1] < self.concurrency:
            found.append(min(2 * found[-1], self.concurrency))
        return found if self.concurrency > 1 else []

    async def first(self, name: str, ask: Ask) -> list[Answer | None]:
        """The answers that others are compared with, asked for one by one; None where it failed.

        Raises:
            NotAskedError: the server does not take such requests.
        """
        outcome = Outcome(name)
        answers: list[Answer | None] = []
        for number in range(len(self.questions)):
            try:
                answers.append(await ask(number))
                outcome.num_asked += 1
            except FailedError as error:
                answers.append(None)
                outcome.fail(number, str(error))
        self.note(outcome)
        return answers

    async def compare(
        self, name: str, ask: Ask, expected: Sequence[Answer | None], at_once: int = 1
    ) -> None:
        """Asks all questions, so many at once, and compares their answers with expected ones.

        In company each is asked often enough for twice as many requests as are open at once: those
        that come later meet others than those that came first.
        """
        outcome = Outcome(name)
        room = asyncio.Semaphore(at_once)

        async def one(number: int, known: Answer) -> None:
            async with room:
                if outcome.not_checked:
                    return
                try:
                    outcome.add(number, known, await ask(number))
                except NotAskedError as error:
                    outcome.not_checked = str(error)
                except FailedError as error:
                    outcome.fail(number, str(error))

        rounds = -(-2 * at_once // len(expected)) if at_once > 1 else 1
        async with asyncio.TaskGroup() as group:
            for number, known in [*enumerate(expected)] * rounds:
                if known is not None:
                    group.create_task(one(number, known))
        self.note(outcome)


async def text_checks(plan: Plan) -> None:
    """Runs all checks of texts.

    Raises:
        NotAskedError: the server writes no texts.
        FailedError: not even one request was answered.
    """
    server, questions = plan.server, plan.questions

    async def write(number: int) -> Written:
        return await server.write(questions[number])

    async def stream(number: int) -> Written:
        return await server.stream(questions[number])

    async def write_long(number: int) -> Written:
        return await server.write(f"{long_question()} {questions[number][:20]}")

    async def leave(number: int) -> None:
        await server.leave(questions[number])

    answers = await plan.first("alone, for comparison", write)
    if not any(answers):
        raise FailedError("no request was answered")
    await plan.compare("alone, once more", write, answers)
    await plan.compare("streamed", stream, answers)
    for level in plan.levels:
        await plan.compare(f"{level} at once", write, answers, level)
    await plan.compare("beside cancelled streams", _beside(plan, write, leave), answers)
    await plan.compare("beside a long prompt", _beside(plan, write, write_long), answers)
    await _with_salts(plan, answers)
    await _in_two(plan, answers)
    await _sampled(plan)
    await _under_schema(plan)
    await _in_a_batch(plan, answers)


def _beside(plan: Plan, ask: Ask, other: Callable[[int], Awaitable[object]]) -> Ask:
    """Asks while other requests run, which ask something else."""
    number_of = len(plan.questions)
    most = max(min(plan.concurrency, number_of) - 1, 1)

    async def asking(number: int) -> Answer:
        others = [other((number + i) % number_of) for i in range(1, most + 1)]
        running = [asyncio.ensure_future(each) for each in others]
        try:
            return await ask(number)
        finally:
            await asyncio.gather(*running, return_exceptions=True)

    return asking


async def _with_salts(plan: Plan, answers: Sequence[Answer | None]) -> None:
    """With a salt that is new, nothing of a prompt is cached; with the same one again, all is."""
    salts = [secrets.token_hex(8) for _ in plan.questions]

    async def ask(number: int) -> Written:
        return await plan.server.write(plan.questions[number], cache_salt=salts[number])

    await plan.compare("with a cold prefix (cache_salt)", ask, answers)
    await plan.compare("with the prefix cached", ask, answers)


async def _in_two(plan: Plan, answers: Sequence[Answer | None]) -> None:
    """A prompt with the first half of its text gets the second half."""
    name = "in two requests"
    if plan.server.chat:
        plan.note(Outcome(name, not_checked="a chat has no prompt that a text may be a part of"))
        return
    begun: list[str] = []
    rests: list[Answer | None] = []
    for question, answer in zip(plan.questions, answers, strict=True):
        at = _place_to_part(answer) if isinstance(answer, Written) else None
        if at is None or not isinstance(answer, Written):
            begun.append(question)
            rests.append(None)
            continue
        said = "".join(token.text for token in answer.tokens[:at])
        begun.append(question + said)
        rests.append(Written(answer.text[len(said) :], answer.tokens[at:], answer.finish))
    if not any(rests):
        sentence = "no text has tokens that are told one by one and are parts of it"
        plan.note(Outcome(name, not_checked=sentence))
        return

    async def ask(number: int) -> Written:
        rest = rests[number]
        assert isinstance(rest, Written), "others are not asked"
        return await plan.server.write(begun[number], max_tokens=len(rest.tokens))

    await plan.compare(name, ask, rests)


def _place_to_part(answer: Written) -> int | None:
    """A token in the middle that begins a word: texts are tokenized alike up to there."""
    tokens = answer.tokens
    if "".join(token.text for token in tokens) != answer.text:
        return None  # such as special tokens, which no prompt can have as text
    middle = len(tokens) // 2
    places: list[int] = [*range(middle, len(tokens) - 1), *range(middle - 1, 1, -1)]
    for at in places:
        begins = tokens[at].text[:1] == " " and tokens[at].text.strip().isalpha()
        if begins and tokens[at - 1].text[-1:].isalpha():
            return at
    return None


async def _sampled(plan: Plan) -> None:
    async def ask(number: int) -> Written:
        question = plan.questions[number]
        return await plan.server.write(question, temperature=_TEMPERATURE, seed=1000 + number)

    await _in_company(plan, f"seeded, temperature {_TEMPERATURE:g}", ask)


async def _under_schema(plan: Plan) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}

    async def ask(number: int) -> Written:
        found = await plan.server.write(
            plan.questions[number], response_format=form, max_tokens=_SCHEMA_TOKENS
        )
        if fault := _schema_fault(found):
            raise FailedError(f"the reply under a schema {fault}: {found.text[:60]!r}")
        return found

    await _in_company(plan, "under a JSON schema", ask)


async def _in_company(plan: Plan, name: str, ask: Ask) -> None:
    """Asks in a way of its own: alone, once more, and in company."""
    try:
        answers = await plan.first(f"{name}, for comparison", ask)
    except NotAskedError as error:
        plan.note(Outcome(name, not_checked=str(error)))
        return
    await plan.compare(f"{name}, once more", ask, answers)
    if plan.concurrency > 1:
        await plan.compare(f"{name}, {plan.concurrency} at once", ask, answers, plan.concurrency)


def _schema_fault(found: Written) -> str:
    """Why a text does not fit the schema; empty if it does, or was cut off."""
    if found.finish == "length":
        return ""
    try:
        item = json.loads(found.text)
    except ValueError:
        return "is no JSON"
    properties = SCHEMA["properties"]
    if not isinstance(item, dict) or item.keys() != properties.keys():
        return "has other keys"
    fits = (
        isinstance(item["title"], str)
        and len(item["title"]) <= properties["title"]["maxLength"]
        and isinstance(item["year"], int)
        and 0 <= item["year"] <= properties["year"]["maximum"]
        and item["kind"] in properties["kind"]["enum"]
    )
    return "" if fits else "has other values"


async def _in_a_batch(plan: Plan, answers: Sequence[Answer | None]) -> None:
    name, server = "in a batch", plan.server
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": server.path, "body": server.body(question)}
        for i, question in enumerate(plan.questions)
    ]
    try:
        replies = await server.batch(lines, plan.batch_seconds, _POLL_SECONDS)
    except NotAskedError as error:
        plan.note(Outcome(name, not_checked=str(error)))
        return
    except FailedError as error:
        plan.note(Outcome(name, broken=[str(error)]))
        return

    async def read(number: int) -> Written:
        if (reply := replies.get(f"{number}")) is None:
            raise FailedError("the batch has no answer to it")
        return server.written(reply)

    await plan.compare(name, read, answers)


# How each route is asked about texts, of which each has an answer of its own
_LISTS: Mapping[str, Callable[[list[str]], dict[str, Any]]] = {
    "/v1/embeddings": lambda texts: {"input": texts},
    "/embed": lambda texts: {"inputs": texts},
    "/predict": lambda texts: {"inputs": [[text] for text in texts]},
    "/classify": lambda texts: {"inputs": texts},
    "/fill-mask": lambda texts: {"inputs": texts},
}
_MASKS = ("[MASK]", "<mask>")


async def number_checks(plan: Plan) -> int:
    """Runs the checks of vectors, labels and ranks; returns how many such routes there are."""
    num_found = 0
    for path, body in _LISTS.items():
        texts = list(plan.questions)
        if path == "/fill-mask":
            texts = masked(texts, await _mask_of(plan))
        num_found += await _of_lists(plan, path, texts, body)
    return num_found + await _of_ranks(plan)


async def _mask_of(plan: Plan) -> str:
    """The mask token that the model reads, as far as a request tells."""
    for mask in _MASKS:
        try:
            await plan.server.numbers("/fill-mask", {"inputs": masked(["Once"], mask)})
        except (NotAskedError, FailedError):
            continue
        return mask
    return _MASKS[0]


async def _of_lists(
    plan: Plan, path: str, texts: list[str], body: Callable[[list[str]], dict[str, Any]]
) -> bool:
    """Checks of one route: each text alone, once more, in company, and in one list with others."""

    async def ask(number: int) -> Numbers:
        found = await plan.server.numbers(path, body([texts[number]]))
        if len(found) != 1:
            raise FailedError(f"{path} gives {len(found)} answers to a single text")
        return found[0]

    answers = await _of_one(plan, path, ask)
    if not answers:
        return False
    name = f"{path}, in one list"
    try:
        together = await plan.server.numbers(path, body(texts))
    except NotAskedError as error:
        plan.note(Outcome(name, not_checked=str(error)))
        return True
    except FailedError as error:
        plan.note(Outcome(name, broken=[str(error)]))
        return True

    async def read(number: int) -> Numbers:
        if number >= len(together):
            raise FailedError(f"{path} gives {len(together)} answers to {len(texts)} texts")
        return together[number]

    await plan.compare(name, read, answers)
    return True


async def _of_ranks(plan: Plan) -> bool:
    """Checks of `/rerank`, whose answer belongs to all of its texts together."""
    texts = list(plan.questions)

    async def ask(number: int) -> Numbers:
        body = {"query": texts[number][:100], "texts": texts[: 2 + number]}
        return flat(await plan.server.post("/rerank", plan.server.named | body))

    return bool(await _of_one(plan, "/rerank", ask))


async def _of_one(plan: Plan, path: str, ask: Ask) -> list[Answer | None]:
    """Checks of one route; returns the answers to compare with, none if it is not there."""
    try:
        answers = await plan.first(f"{path}, for comparison", ask)
    except NotAskedError:
        return []
    await plan.compare(f"{path}, once more", ask, answers)
    for level in plan.levels:
        await plan.compare(f"{path}, {level} at once", ask, answers, level)
    return answers
