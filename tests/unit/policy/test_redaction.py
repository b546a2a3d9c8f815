"""What is replaced in a text, and the strings of the JSON that models write."""

import json
import random
from typing import Any

import pytest

from maskdial.policy.placeholders import Placeholders
from maskdial.policy.redaction import Span, Strings, changed, changes, merged


def test_equal_values_have_one_placeholder() -> None:
    text = "a@b.c, d@e.f, a@b.c"
    spans = [Span(0, 5, "e-mail", 0.9), Span(7, 12, "e-mail", 0.9), Span(14, 19, "e-mail", 0.9)]
    written = changed(text, changes(text, spans, Placeholders()))
    assert written == "[E_MAIL_1], [E_MAIL_2], [E_MAIL_1]"


def test_overlapping_spans_are_one_with_the_better_label() -> None:
    spans = [
        Span(2, 6, "A", 0.5),
        Span(4, 9, "B", 0.8),
        Span(9, 9, "C", 1.0),
        Span(9, 10, "D", 0.1),
    ]
    assert merged(spans) == [Span(2, 9, "B", 0.8), Span(9, 10, "D", 0.1)]


def test_a_placeholder_is_new_to_the_request() -> None:
    placeholders = Placeholders(["I was told of [NAME_1] and [NAME_2]."])
    assert placeholders.of("name", "Ada") == "[NAME_3]"
    other = placeholders.copy()
    assert other.of("name", "Bob") == "[NAME_4]"
    assert placeholders.of("name", "Cid") == "[NAME_4]"
    assert placeholders.of("***", "x") == "[REDACTED_1]"


def test_strings_of_json_are_changed_in_place() -> None:
    text = '{ "to" : "ada@example.org",\n"n":[4111111111111111, true, null, "a\\"b\\u0040c"]}'
    strings = Strings(text)
    assert strings.texts == ["to", "ada@example.org", "n", "4111111111111111", 'a"b@c']
    assert strings.replaced(strings.texts) == text
    new = ["to", "[EMAIL_1]", "n", "[CARD_1]", 'a"b@c']
    written = strings.replaced(new)
    assert json.loads(written) == {"to": "[EMAIL_1]", "n": ["[CARD_1]", True, None, 'a"b@c']}
    assert written.startswith('{ "to" : "[EMAIL_1]",\n"n":[')


@pytest.mark.parametrize("text", ["plain ada@example.org", "", "  ", "def f(): return '{}'"])
def test_what_is_no_json_is_one_text(text: str) -> None:
    assert Strings(text).texts == [text]
    assert Strings(text).replaced(["x"]) == "x"


def random_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return rng.choice([1, -2.5, 1e30, True, False, None])
    if kind < 4:
        return "".join(rng.choices('ab"\\/\n{}[]:,é日\u2028 ', k=rng.randrange(8)))
    if kind == 4:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {f"k{i}": random_json(rng, depth + 1) for i in range(rng.randrange(4))}


def test_every_string_is_found_however_it_is_spelled_or_cut() -> None:
    rng = random.Random(4)
    for _ in range(500):
        content = {"x": random_json(rng), "secret": "ada@example.org"}
        text = json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        strings = Strings(text)
        assert json.loads(strings.replaced(strings.texts)) == content
        assert "ada@example.org" in strings.texts
        new = [each.replace("ada@example.org", "[E_1]") for each in strings.texts]
        assert json.loads(strings.replaced(new)) == content | {"secret": "[E_1]"}
        cut = text[: rng.randrange(1, len(text))]
        part = Strings(cut)
        assert part.replaced(part.texts) == cut
        if "ada@example.or" in cut:
            assert any("ada@example.or" in each for each in part.texts)
