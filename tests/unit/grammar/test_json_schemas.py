"""JSON schemas: whatever a grammar allows is valid by another implementation, or reported."""

import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from maskdial.errors import ValidationError
from maskdial.grammar.build import Tokens, build_matcher
from maskdial.grammar.key_pattern import all_but, looks_around, matches_every_key, words_of
from maskdial.grammar.keywords import FORMATS, NOT_ENFORCED
from maskdial.grammar.schema import ONE_OF_WARNING
from maskdial.grammar.source import parse_grammar

ROOT = Path(__file__).parents[3]
SUITE = json.loads(
    (ROOT / "tests" / "data" / "json_schema_suite" / "draft2020-12.json").read_text("utf-8")
)
CASES = [(name, case) for name, cases in SUITE.items() for case in cases]
# Why a schema of the suite may be refused.
REFUSALS = re.compile(
    "does not fetch|no finite value|is false, which|not disjoint|too many digits"
    "|Anchor 'items' does not exist|Unimplemented keys: ...dynamicAnchor"
)
EOS = 256


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def an_object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENS = Tokens(LLTokenizer(TokenizerWrapper(Bytes())), names={})


def compiled(schema: object) -> tuple[LLMatcher, list[str]]:
    """A schema's grammar, and what it does not enforce."""
    source = parse_grammar("json_schema", {"schema": schema})
    matcher, _ = build_matcher(TOKENS, source.text)
    one_of = [ONE_OF_WARNING] if matcher.get_grammar_warnings() else []
    return matcher, [*source.warnings, *one_of]


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()


def written(matcher: LLMatcher, rng: random.Random, limit: int = 150) -> str | None:
    """A random text; None if it is not complete by then. Something can always follow."""
    matcher = matcher.deep_copy()
    content = b""
    while len(content) < limit:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (content, matcher.get_error())
        allowed = [i for i in range(EOS + 1) if mask[i >> 3] >> (i & 7) & 1]
        assert allowed, f"a dead end after {content!r}"
        (token,) = rng.choices(allowed, [_weight(i) for i in allowed])
        if token == EOS:
            return content.decode()
        assert matcher.consume_token(token)
        content += bytes([token])
        if matcher.is_stopped():
            return content.decode()
    return None


def _weight(token: int) -> float:
    if token == EOS or chr(token) in '"}],:':
        return 20
    return 3 if 32 <= token < 127 else 0.1


def readings(text: str) -> Iterator[Any]:
    """A text as JSON; where keys are repeated, the last one counts, or the first."""

    def first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(reversed(pairs))

    yield json.loads(text)
    yield json.loads(text, object_pairs_hook=first)


def check_valid(matcher: LLMatcher, schema: Any, num_texts: int, seed: int = 0) -> list[str]:
    """Writes random texts, all of which must satisfy the schema, and returns them."""
    validator = jsonschema_rs.Draft202012Validator(schema)
    rng = random.Random(seed)
    texts = [written(matcher, rng) for _ in range(num_texts)]
    # Python reads 1E999 as infinity, which is no JSON.
    complete = [text for text in texts if text is not None and not re.search("[0-9][eE]", text)]
    for text in complete:
        assert all(map(validator.is_valid, readings(text))), text
    return complete


@pytest.mark.parametrize("name", SUITE)
def test_the_suite_agrees_or_is_told_otherwise(name: str) -> None:
    """Each schema of the JSON Schema Test Suite is enforced, or reported, or refused."""
    refusals = []
    for case in SUITE[name]:
        schema = case["schema"]
        try:
            matcher, warnings = compiled(schema)
        except ValidationError as error:
            refusals.append(error.message)
            continue
        for instance, valid in case["tests"]:
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            if not valid and accepts(matcher, text):
                assert warnings, (case["description"], text)
        if warnings:
            rng = random.Random(1)
            for _ in range(3):
                written(matcher, rng)
        else:
            check_valid(matcher, schema, 3)
    assert [message for message in refusals if not REFUSALS.search(message)] == []


def test_few_schemas_are_refused_and_few_values_missed() -> None:
    """What is valid can be written, but for other spellings and orders of keys."""
    counts: Counter[str] = Counter()
    for _, case in CASES:
        try:
            matcher, _ = compiled(case["schema"])
        except ValidationError:
            counts["refused"] += 1
            continue
        for instance, valid in case["tests"]:
            if valid:
                text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
                counts["written" if accepts(matcher, text) else "missed"] += 1
    assert counts["refused"] < 45
    assert counts["missed"] < 0.04 * counts["written"]


@pytest.mark.parametrize(
    ("schema", "accepted", "not_accepted"),
    [
        ({"const": 9007199254740992}, ["9007199254740992"], ["9007199254740993"]),
        ({"const": -9007199254740994}, ["-9007199254740994"], ["-9007199254740993"]),
        ({"enum": [2**63 - 1, 10**20]}, [str(2**63 - 1), str(10**20)], [str(2**63), "1"]),
        (
            {"type": "integer", "minimum": 2**53, "maximum": 2**53 + 4},
            [str(2**53 + i) for i in range(5)],
            [str(2**53 - 1), str(2**53 + 5)],
        ),
        (
            {"type": ["integer", "null"], "exclusiveMinimum": 2**53 + 1},
            [str(2**53 + 2), "null"],
            [str(2**53), str(2**53 + 1)],
        ),
        (
            {"type": "integer", "exclusiveMaximum": 5, "maximum": 7, "minimum": 3.5},
            ["4"],
            ["3", "5"],
        ),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.9}, ["0.5"], ["0", "0.0", "1"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5"], ["-0", "0", "0.0"]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.2"], ["1", "1.5"]),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"ab"'], ['""', '"abc"']),
        ({"type": "string", "maxLength": 10**30}, ['"ab"'], []),
        ({"properties": {"a": True}, "maxProperties": 2**31}, ['{"a":1}', "1"], []),
    ],
)
def test_numbers_are_exact(schema: Any, accepted: list[str], not_accepted: list[str]) -> None:
    matcher, warnings = compiled(schema)
    assert warnings == []
    assert [accepts(matcher, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(matcher, text) for text in not_accepted] == [False] * len(not_accepted)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 9007199254740993},
        {"const": -9007199254740993},
        {"const": 1180000000000000001},
        {"enum": [18446744073709551617]},
        {"const": 2**64},
        {"const": -(2**63)},
        {"const": 10**400},
        {"enum": ["a", {"b": [9007199254740993]}]},
        {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740995},
        {"type": "integer", "exclusiveMinimum": 2**53},
        {"exclusiveMinimum": 2**53},
        {"type": "number", "maximum": 2**53 + 1},
        {"type": "integer", "minimum": 2**64},
        {"type": "number", "minimum": 1e19},
        {"type": "integer", "maximum": -(2**64)},
        {"type": "integer", "multipleOf": 2**53 + 1},
        {"properties": {"a": {"items": {"const": 9007199254740993}}}},
        {"$ref": "#/x/y", "x": {"y": {"const": 9007199254740993}}},
    ],
)
def test_numbers_that_would_become_others_are_refused(schema: Any) -> None:
    with pytest.raises(ValidationError, match=r"cannot be enforced exactly|too many digits"):
        compiled(schema)


@pytest.mark.parametrize(
    ("schema", "warnings", "accepted"),
    [
        (
            {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
            ["#: maximum is taken as 9223372036854775807"],
            str(2**63 - 1),
        ),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["#: minimum is taken as -9223372036854774784"],
            "-9223372036854774784",
        ),
        (
            {"type": "integer", "minimum": 10**18},
            ["#: maximum is taken as 9223372036854774784"],
            str(10**18),
        ),
    ],
)
def test_bounds_that_are_far_out_are_moved(schema: Any, warnings: list[str], accepted: str) -> None:
    matcher, told = compiled(schema)
    assert told == warnings
    assert accepts(matcher, accepted)
    check_valid(matcher, schema, 5)


@pytest.mark.parametrize(
    ("schema", "accepted", "not_accepted"),
    [
        (
            an_object(
                properties={"score": DIGIT},
                required=["score"],
                additionalProperties=False,
                patternProperties={"^score$": DIGIT},
            ),
            ['{"score":1}'],
            ['{"score":1,}'],
        ),
        (
            an_object(
                properties={"a1": True, "a2": True},
                additionalProperties=False,
                patternProperties={"^a[12]$": DIGIT, "^a(1|2)?$": {"maximum": 5}},
            ),
            ['{"a1":1,"a2":5}', '{"a":"x"}'],
            ['{"a1":6}', '{"a1":"x"}'],
        ),
        (
            an_object(
                patternProperties={"^[ab]$": DIGIT},
                additionalProperties=False,
                minProperties=2,
                maxProperties=2,
            ),
            ['{"a":1,"b":2}'],
            ['{"a":1,"a":2}', '{"a":1}'],
        ),
        (
            an_object(properties={"a": DIGIT}),
            ['{"a":1,"b":"x"}', '{"":1,"ab":2}'],
            ['{"a":1,"\\u0061":"x"}', '{"a":1,"a":2}'],
        ),
        (
            an_object(properties={"a\n": DIGIT, "b": True}, additionalProperties=DIGIT),
            ['{"a\\n":1}', '{"a":1}', '{"a\\n\\n":1}', '{"b":"x","c":1}'],
            ['{"a\\n":1,"a\\u000a":2}', '{"c":"x"}', '{"\\u0062":1}'],
        ),
        (
            an_object(properties={"a": DIGIT}, required=["b"], additionalProperties=DIGIT),
            ['{"b":1}', '{"a":1,"b":2,"c":3}'],
            ['{"a":1}', '{"b":1,"b":2}'],
        ),
        (
            an_object(properties={"a": DIGIT, "b": DIGIT}, minProperties=1),
            ['{"a":1}', '{"b":1}', '{"a":1,"b":2,"c":3}', '{"c":1}'],
            ["{}"],
        ),
        (
            an_object(properties={"a": DIGIT, "b": DIGIT, "c": DIGIT}, maxProperties=1),
            ['{"a":1}', "{}", '{"d":1}'],
            ['{"a":1,"b":2}', '{"a":1,"d":2}', '{"d":1,"e":1}'],
        ),
        (
            {"properties": {"a": DIGIT}, "minProperties": 1, "additionalProperties": False},
            ["3", '{"a":1}'],
            ["{}"],
        ),
        (
            an_object(properties={"a": DIGIT}, patternProperties={".*": False}),
            ["{}"],
            ['{"b":1}', '{"a":1}'],
        ),
        (
            an_object(properties={"a": DIGIT}, unevaluatedProperties=False),
            ['{"a":1}'],
            ['{"b":1}'],
        ),
        (
            an_object(propertyNames=True, dependentRequired={}, **{"not": False}),
            ['{"a":1}'],
            [],
        ),
    ],
)
def test_keys_are_written_once(schema: Any, accepted: list[str], not_accepted: list[str]) -> None:
    matcher, warnings = compiled(schema)
    assert warnings == []
    assert [accepts(matcher, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(matcher, text) for text in not_accepted] == [False] * len(not_accepted)
    assert check_valid(matcher, schema, 20)


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        (an_object(minProperties=2), "#: minProperties is taken as 1: further keys"),
        (
            an_object(
                properties={f"p{i}": True for i in range(9)}, minProperties=3, maxProperties=4
            ),
            "#: minProperties is not enforced beside so many",
        ),
        (
            an_object(properties={"a": DIGIT}, patternProperties={"^x-": DIGIT}),
            "#: keys may be repeated in another spelling",
        ),
        (
            {"allOf": [an_object(properties={"a": DIGIT}), an_object(properties={"b": DIGIT})]},
            "#/allOf/0: keys may be repeated in another spelling",
        ),
        (
            {
                "allOf": [
                    an_object(patternProperties={"^a": DIGIT}),
                    {"additionalProperties": False},
                ]
            },
            "#/allOf/0: patternProperties may miss keys",
        ),
        ({"type": "string", "format": "password"}, "#: format 'password' is not enforced"),
        (
            an_object(properties={"a/b": {"uniqueItems": True}}),
            "#/properties/a~1b: uniqueItems is not enforced",
        ),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf is taken as anyOf"),
        ({"items": {"not": {"type": "null"}}}, "#/items: not is not enforced"),
        (an_object(propertyNames={"maxLength": 3}), "#: propertyNames is not enforced"),
        ({"type": "string", "pattern": "^(?!a)b"}, "#: pattern '^(?!a)b' is not enforced"),
        (
            an_object(
                patternProperties={r"^(a)\1": DIGIT, "^x": DIGIT}, additionalProperties=False
            ),
            r"#: patternProperties '^(a)\\1' is not enforced",
        ),
        ({"if": True, "then": {"minimum": 3}}, "#: if is not enforced"),
        ({"$ref": "#/x", "x": {"contains": {"const": 1}}}, "#/x: contains is not enforced"),
    ],
)
def test_what_is_not_enforced_is_reported(schema: Any, warning: str) -> None:
    _, warnings = compiled(schema)
    assert any(each.startswith(warning) for each in warnings), warnings


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("^score$", ["score"]),
        ("^$", [""]),
        ("^(a|b[0-2])$", ["a", "b0", "b1", "b2"]),
        (r"^a\.(?:x|y)?$", ["a.", "a.x", "a.y"]),
        ("^[ab]{1,2}$", ["a", "b", "aa", "ab", "ba", "bb"]),
        (r"^[\]\-b-d]$", ["]", "-", "b", "c", "d"]),
        (r"^\d$", list("0123456789")),
        (r"^\w\w$", None),
        ("^a|b$", None),
        (r"^a\$", None),
        ("a", None),
        ("^a", None),
        ("^a*$", None),
        ("^a+$", None),
        ("^.$", None),
        ("^[^a]$", None),
        ("^[a&&b]$", None),
        ("^(?i)a$", None),
        ("^(?:a$", None),
        (r"^\s$", None),
        ("^a{2,}$", None),
        ("^a{0,999}$", None),
        ("^a{2}?$", None),
        ("^(((a)))$", ["a"]),
        ("^" + "(" * 40 + "a" + ")" * 40 + "$", None),
    ],
)
def test_the_words_of_a_pattern(pattern: str, words: list[str] | None) -> None:
    found = words_of(pattern, 20)
    assert found == words
    for word in found or ():
        assert re.search(pattern, word)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([""], True),
        (["^.*$"], False),  # not the newline
        (["(?s:.*)"], True),
        (["^[^a]", "^a", "^$"], True),
        (["^[a-z]"], False),
        (["^x-", ".+"], False),
        (["("], False),
    ],
)
def test_patterns_that_match_every_key(patterns: list[str], expected: bool) -> None:
    assert matches_every_key(patterns) is expected


@pytest.mark.parametrize("names", [["a"], ["ab", "abc", "b"], ["", "x"], ["é-", "a]", "^"], []])
def test_a_pattern_of_all_keys_but_some(names: list[str]) -> None:
    pattern = all_but(names)
    assert pattern is not None
    plain = re.sub(r"\\x\{(\w+)\}", lambda found: re.escape(chr(int(found[1], 16))), pattern)
    for word in (
        "",
        "a",
        "ab",
        "abc",
        "abcd",
        "b",
        "bc",
        "x",
        "xx",
        "é",
        "é-",
        "a]",
        "^",
        "^^",
        "\n",
    ):
        assert (re.fullmatch(plain, word) is None) is (word in names)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^(?=a)", True),
        ("a(?!b)c", True),
        ("(?<=a)b", True),
        ("(?<!a)b", True),
        (r"\bword", True),
        (r"[\]]\b", True),
        (r"(a)\1", True),
        (r"(?<n>a)\k<n>", True),
        ("(?<n>a)(?:b)(?i)", False),
        (r"\(?=a", False),
        ("[(?=a]", False),
        (r"\\b", False),
        (r"[\b]", False),
        (r"\d\w\s\.", False),
    ],
)
def test_what_no_automaton_reads(pattern: str, expected: bool) -> None:
    assert looks_around(pattern) is expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"type": "integer", "format": "int64"},
        {"if": {"type": "null"}},
        {"then": {"type": "null"}},
        {"minContains": 3},
        {"title": "x", "deprecated": True, "default": 9007199254740993, "examples": [2**70]},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        an_object(properties={"a": True, "b": True}, additionalProperties=False)
        | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_what_constrains_nothing_is_not_reported(schema: Any) -> None:
    assert compiled(schema)[1] == []


LOOPS = [
    {"$ref": "#"},
    {"$ref": "#/a", "a": {"allOf": [{"$ref": "#/b"}]}, "b": {"$ref": "#/a"}},
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
        },
    },
    an_object(required=["x"], additionalProperties={"$ref": "#"}),
    an_object(minProperties=1, additionalProperties={"$ref": "#"}),
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    {"type": "array", "minItems": 2, "prefixItems": [True, {"$ref": "#"}]},
    {"type": ["array", "object"], "minItems": 1, "items": {"$ref": "#"}, "required": ["a"]}
    | {"properties": {"a": {"$ref": "#"}}},
    {"allOf": [an_object(required=["x"]), {"properties": {"x": {"$ref": "#"}}}]},
    an_object(properties={"x": {"$ref": "#"}}, anyOf=[{"required": ["x"]}]),
    an_object(properties={"x": {"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/x"}]}})
    | {"required": ["x"]},
]


@pytest.mark.parametrize("schema", LOOPS)
def test_a_schema_without_a_finite_value_is_refused(schema: Any) -> None:
    with pytest.raises(ValidationError, match="infinitely recursive, so no finite value"):
        compiled(schema)


@pytest.mark.parametrize(
    "schema",
    [
        an_object(properties={"x": {"$ref": "#"}}, additionalProperties=False),
        an_object(properties={"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=["x"]),
        {"type": "array", "items": {"$ref": "#"}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": DIGIT}},
        an_object(properties={"x": {"$ref": "#"}}, anyOf=[{"required": ["x"]}, {"required": []}]),
        {"type": ["object", "null"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(90)} | {"90": DIGIT}}
        | {"$ref": "#/$defs/0"},
    ],
)
def test_recursion_that_may_end_is_allowed(schema: Any) -> None:
    matcher, _ = compiled(schema)
    check_valid(matcher, schema, 5)


def test_the_page_lists_every_keyword() -> None:
    """docs/generation.md says of each keyword whether it is enforced."""
    page = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    table = page.partition("### What of a JSON schema is enforced")[2].partition("\n\nIntegers")[0]
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in table.splitlines() if line.startswith("| `")
    )
    (not_enforced,) = (key for key, text in rows.items() if text == "not enforced")
    assert set(re.findall("`(.*?)`", not_enforced)) == NOT_ENFORCED
    assert set(re.findall("`(.*?)`", rows["`format`"])) == FORMATS
    known = set(re.findall("`(.*?)`", " ".join(rows)))
    for name in SUITE:
        used = {key for case in SUITE[name] for key in _keywords(case["schema"])}
        assert name not in used or name in known | {"default", "$comment"}, name


def _keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            yield from _keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _keywords(value)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_enforced(name: str) -> None:
    matcher, warnings = compiled({"type": "string", "format": name})
    assert warnings == []
    assert not accepts(matcher, '"no such thing"')


@pytest.mark.parametrize(
    "schema",
    [
        an_object(patternProperties={"^(((a{999}){999}){999})$": DIGIT}),
        an_object(patternProperties={"^" + "(a|b)?" * 150 + "$": DIGIT}),
        an_object(patternProperties={"((a{1,1000}){1,1000}){1,1000}": DIGIT}),
        an_object(patternProperties={f"^a{i}$": DIGIT for i in range(3000)}),
        an_object(properties={f"p{i}": True for i in range(3000)}, minProperties=2),
        an_object(properties={f"p{i}": True for i in range(3000)}, maxProperties=2),
        {
            "$defs": {
                str(i): {"items": {"$ref": f"#/$defs/{i // 2}"}, "$ref": f"#/$defs/{i + 1}"}
                for i in range(3000)
            }
            | {"3000": {"minItems": 1}},
            "$ref": "#/$defs/0",
        },
        {"allOf": [{"minItems": i} for i in range(3000)], "anyOf": [{"maxItems": 9}] * 3000},
    ],
)
def test_reading_hostile_schemas_is_bounded(schema: Any) -> None:
    """This happens in the server's own process. In CPU time, which other work does not change."""
    started = time.thread_time()
    with contextlib.suppress(ValidationError):
        parse_grammar("json", schema)
    assert time.thread_time() - started < 10
