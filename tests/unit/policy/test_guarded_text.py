"""A text on its way through rules: nothing passes before its verdict, however the text comes."""

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from maskdial.bundle.manifest import TOKENIZER, SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.events import Finish, TokenEvent, Verdict
from maskdial.policy.fit import Fit
from maskdial.policy.guard import GuardedRequest
from maskdial.policy.judge import Found
from maskdial.policy.placeholders import Placeholders
from maskdial.policy.redaction import Span, changed, changes
from maskdial.policy.reply import GuardedText
from maskdial.policy.rules import Policy, Rule
from maskdial.registry.catalog import STARTER_FOLDER

PATTERNS = {
    "EMAIL": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "CARD": r"\b\d{4}(?: \d{4}){3}\b",
    "KEY": r"\bsk-[A-Za-z0-9]{8,}\b",
    "NAME": r"\b(?:Ada Lovelace|Grace Brewster Murray Hopper|Bob)\b",
}
TEMPLATES = [
    "Write to {EMAIL} or to {EMAIL}, please.",
    "{NAME} paid with {CARD}; the key is {KEY}.",
    "Dear {NAME},\n\nyour card {CARD} has expired.\n\nYours, {NAME} <{EMAIL}>",
    '{EMAIL}{EMAIL} ("{KEY}") 日本語{KEY}日本語 {NAME}',
    "No secret here at all, only words, many of them, one after the other, as ever.",
    "{KEY}",
]
VALUES = {
    "EMAIL": ["ada@example.org", "x.y+z@mail.example.co.uk", "bob@b.io"],
    "CARD": ["4111 1111 1111 1111", "5500 0000 0000 0004"],
    "KEY": ["sk-abcdEFGH1234", "sk-0000000000000000000000000000000000"],
    "NAME": ["Ada Lovelace", "Grace Brewster Murray Hopper", "Bob"],
}


def rule_of(action: str, **fields: Any) -> Rule:
    content: dict[str, Any] = {
        "name": action,
        "side": "output",
        "parts": ("content", "reasoning", "arguments"),
        "model": "tagger",
        "thresholds": dict.fromkeys(PATTERNS, 0.5),
        "threshold": 0.5,
        "action": action,
        "restore": False,
        "to": None,
        "every": 4,
        "context": 6,
        "timeout": 10.0,
        "lets_pass": False,
        "line": 1,
    }
    return Rule(**content | fields)


@dataclass
class Patterns:
    """A watch whose models are regular expressions."""

    tagger: bool = True
    noted: list[Verdict] = field(default_factory=list)
    num_texts: int = 0

    @property
    def judge(self) -> "Patterns":
        return self

    def tags(self, rule: Rule) -> bool:
        return rule.model == "tagger"

    async def verdicts(self, policy: Policy, rule: Rule, texts: Sequence[str]) -> list[list[Found]]:
        await asyncio.sleep(0)
        self.num_texts += len(texts)
        return [
            [
                Found(label, 0.9, *match.span())
                for label in rule.thresholds
                for match in re.finditer(PATTERNS[label], text)
            ]
            for text in texts
        ]

    def note(self, verdict: Verdict) -> None:
        self.noted.append(verdict)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(STARTER_FOLDER / "hybrid" / TOKENIZER, SpecialTokens(eos=(0,)))


def guarded(
    tokenizer: Any, rules: Sequence[Rule], placeholders: Placeholders | None = None
) -> tuple[GuardedText, Patterns]:
    watch = Patterns()
    request = GuardedRequest((Policy("p", ("*",), (), tuple(rules), 1),), "m", watch)  # type: ignore[arg-type]
    if placeholders is not None:
        request.placeholders = placeholders
    fit = Fit(tokenizer, None, None, {})
    return GuardedText(request, tokenizer, None, [1, 2], fit), watch


def finish(text: str) -> Finish:
    return Finish("eos_token", text, 1, None, 2, 0.0, 0.0)


def events_of(pieces: Sequence[str]) -> list[TokenEvent]:
    text = "".join(pieces)
    return [
        TokenEvent(
            i + 1,
            5,
            piece,
            -0.5,
            False,
            ((5, -0.5),),
            finish(text) if i == len(pieces) - 1 else None,
        )
        for i, piece in enumerate(pieces)
    ]


def run(text: GuardedText, events: Sequence[TokenEvent]) -> list[list[TokenEvent]]:
    async def push() -> list[list[TokenEvent]]:
        return [await text.push(event) for event in events]

    return asyncio.run(push())


def whole(text: str) -> str:
    """The text redacted at once."""
    spans = [
        Span(*match.span(), label, 0.9)
        for label, pattern in PATTERNS.items()
        for match in re.finditer(pattern, text)
    ]
    return changed(text, changes(text, spans, Placeholders()))


def written(rng: random.Random) -> str:
    template = " ".join(rng.sample(TEMPLATES, rng.randint(1, 3)))
    return re.sub(r"\{(\w+)\}", lambda match: rng.choice(VALUES[match[1]]), template)


def split(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def secrets_in(text: str) -> list[str]:
    return [match.group() for pattern in PATTERNS.values() for match in re.finditer(pattern, text)]


def test_redacted_as_the_whole_text_wherever_tokens_end(tokenizer: Any) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = written(rng)
        guard, watch = guarded(tokenizer, [rule_of("redact")])
        passed = [each for part in run(guard, events_of(split(text, rng))) for each in part]
        sent = "".join(each.text for each in passed)
        assert sent == whole(text)
        assert [each.index for each in passed] == list(range(1, len(passed) + 1))
        end = passed[-1].finish
        assert end is not None
        assert end.generated_text == sent
        assert list(end.verdicts) == sorted(watch.noted, key=lambda each: each.start)
        assert len(watch.noted) == len(secrets_in(text))


def test_no_beginning_of_a_secret_passes(tokenizer: Any) -> None:
    """At any moment, what has passed is a beginning of the redacted text."""
    rng = random.Random(2)
    for _ in range(100):
        text = written(rng)
        guard, _ = guarded(tokenizer, [rule_of("redact")])
        passed = ""
        for part in run(guard, events_of(list(text))):
            passed += "".join(each.text for each in part)
            assert whole(text).startswith(passed)


def test_tokens_of_a_secret_are_not_told(tokenizer: Any) -> None:
    """Neither as tokens nor as alternatives: those of the placeholder take their place."""
    text = "Write to ada@example.org now, will you? Thanks a lot in advance to all of you there."
    pieces = re.findall(r"\s?\w+|\W", text)
    guard, _ = guarded(tokenizer, [rule_of("redact")])
    events = [
        TokenEvent(i + 1, 1000 + i, piece, -0.5, False, ((1000 + i, -0.5),))
        for i, piece in enumerate(pieces)
    ]
    events[-1] = TokenEvent(len(pieces), 7, pieces[-1], -0.5, False, (), finish(text))
    passed = [each for part in run(guard, events) for each in part]
    drawn = {each.token_id - 1000 for each in passed if each.token_id >= 1000}
    assert (
        not {i for i, piece in enumerate(pieces) if piece.strip() in ("ada", "@", "example", "org")}
        & drawn
    )
    put = [each for each in passed if each.logprob == 0.0]
    assert all(each.top == () for each in put)
    assert "[EMAIL_1]" in "".join(each.text for each in put)
    assert (
        tokenizer.decode([each.token_id for each in put]).strip()
        == "".join(each.text for each in put).strip()
    )


def test_text_that_nothing_holds_passes_at_once(tokenizer: Any) -> None:
    guard, watch = guarded(tokenizer, [rule_of("flag")])
    pieces = [f"w{i} " for i in range(30)]
    parts = run(guard, events_of(pieces))
    assert [["".join(each.text for each in part)] for part in parts] == [[each] for each in pieces]
    assert watch.num_texts


@pytest.mark.parametrize("action", ["refuse", "stop"])
def test_a_text_ends_before_what_is_found(tokenizer: Any, action: str) -> None:
    text = "All is well so far, and then the key sk-abcdEFGH1234 comes, and much more behind it."
    for seed in range(20):
        guard, _ = guarded(tokenizer, [rule_of(action), rule_of("redact", every=3, name="r")])
        parts = run(guard, events_of(split(text, random.Random(seed))))
        passed = [each for part in parts for each in part]
        assert "".join(each.text for each in passed) == text[: text.index("sk-")]
        end = passed[-1].finish
        assert end is not None
        assert end.reason == "content_filter"
        assert guard.ended
        assert guard.refused == (action == "refuse")
        assert [each.finish is None for each in passed[:-1]] == [True] * (len(passed) - 1)


def test_placeholders_get_their_values_back_and_never_show_half(tokenizer: Any) -> None:
    placeholders = Placeholders()
    for value in ("ada@example.org", "bob@b.io"):
        placeholders.of("EMAIL", value, restore=True)
    text = "Ask [EMAIL_2] or [EMAIL_1], not [EMAIL_3] nor [EMAIL or ["
    expected = "Ask bob@b.io or ada@example.org, not [EMAIL_3] nor [EMAIL or ["
    rng = random.Random(3)
    for _ in range(100):
        for rules in ([], [rule_of("redact")]):
            guard, _ = guarded(tokenizer, rules, placeholders)
            passed = ""
            for part in run(guard, events_of(split(text, rng))):
                passed += "".join(each.text for each in part)
                assert expected.startswith(passed)
            assert passed == expected


def test_new_placeholders_go_on_from_those_of_the_request(tokenizer: Any) -> None:
    placeholders = Placeholders(["see [EMAIL_2]"])
    placeholders.of("EMAIL", "ada@example.org")
    text = "ada@example.org and bob@b.io and ada@example.org"
    guard, _ = guarded(tokenizer, [rule_of("redact")], placeholders)
    passed = [each for part in run(guard, events_of([text])) for each in part]
    assert "".join(e.text for e in passed) == "[EMAIL_1] and [EMAIL_3] and [EMAIL_1]"


def test_an_entity_longer_than_the_context_is_redacted_whole(tokenizer: Any) -> None:
    text = "so Grace Brewster Murray Hopper said that this is how it is, and all agreed with her."
    guard, _ = guarded(tokenizer, [rule_of("redact", every=2, context=4)])
    passed = [each for part in run(guard, events_of(list(text))) for each in part]
    assert "".join(e.text for e in passed) == whole(text)


def test_tokens_without_text_wait_for_the_next(tokenizer: Any) -> None:
    """They may be the first bytes of a character that must not be seen."""
    pieces = ["to ", "", "ada@example.org", "", " now ", "and then some more words come here "]
    guard, _ = guarded(tokenizer, [rule_of("redact")])
    parts = run(guard, events_of(pieces))
    passed = [each for part in parts for each in part]
    assert "".join(e.text for e in passed) == whole("".join(pieces))
    assert not any(each.text == "" and each.logprob == -0.5 for each in passed[1:3])


def test_a_rule_that_only_tells_holds_nothing_back(tokenizer: Any) -> None:
    """Its verdicts are there with the last token, in the order of the text."""
    text = "Bob met Ada Lovelace, and Bob wrote to ada@example.org, more than once, as ever."
    events = events_of(list(text))

    async def write() -> tuple[str, list[Verdict]]:
        guard, watch = guarded(tokenizer, [rule_of("flag", every=2, context=2)])
        asked, answered = watch.verdicts, asyncio.Event()

        async def slow(*given: Any) -> list[list[Found]]:
            await answered.wait()
            return await asked(*given)

        watch.verdicts = slow  # type: ignore[method-assign, assignment]
        passed = ""
        for event in events[:-1]:
            passed += "".join(each.text for each in await guard.push(event))
        assert passed == text[: len(passed)]
        assert len(passed) > len(text) - 5
        answered.set()
        last = await guard.push(events[-1])
        assert last[-1].finish is not None
        return passed + "".join(each.text for each in last), list(last[-1].finish.verdicts)

    written, verdicts = asyncio.run(write())
    assert written == text
    assert [text[each.start : each.end] for each in verdicts] == [
        "Bob",
        "Ada Lovelace",
        "Bob",
        "ada@example.org",
    ]


def test_a_text_that_is_abandoned_asks_no_more(tokenizer: Any) -> None:
    async def write() -> None:
        guard, watch = guarded(tokenizer, [rule_of("flag", every=2, context=2)])

        async def never(*_: Any) -> list[list[Found]]:
            await asyncio.Event().wait()
            raise AssertionError

        watch.verdicts = never  # type: ignore[method-assign, assignment]
        for event in events_of(list("Bob met Bob and Bob and Bob and Bob."))[:-1]:
            await guard.push(event)
        guard.abandon()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(write())
