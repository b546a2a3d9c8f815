"""Constrained output with the starter's tokenizer; random numbers stand for the model."""

import asyncio
import contextlib
import gc
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import tokenizers
from llguidance import LLParserLimits
from numpy.typing import NDArray
from tokenizers import decoders

import maskdial
from maskdial.engine.child import ChildDiedError
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import OverloadedError, UnavailableError, ValidationError
from maskdial.grammar import build as grammar_build
from maskdial.grammar import check as grammar_check
from maskdial.grammar import compiler as grammar_module
from maskdial.grammar.compiler import Checker, GrammarCompiler
from maskdial.grammar.matcher import Grammar, GrammarMatcher
from maskdial.grammar.source import (
    MAX_SCHEMA_BYTES,
    MAX_TEXT_BYTES,
    GrammarKind,
    GrammarValue,
    parse_grammar,
)

EOS, MASK = 0, 1
NUM_PADDING = 16  # logits that no token stands for
SOURCE = Path(maskdial.__file__).parent / "starter" / "hybrid" / "tokenizer.json"
TOKENIZER_JSON = SOURCE.read_text(encoding="utf-8")
TOKENIZER = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = TOKENIZER.get_vocab_size() + NUM_PADDING
SPELLINGS = {" ": "Ġ", "\n": "Ċ"}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": ["number", "null"], "minimum": -1, "maximum": 1, "multipleOf": 0.25},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 7, None]}, "maxItems": 3},
        "home": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                        "rooms": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/room"},
                            "minItems": 1,
                            "maxItems": 2,
                        },
                    },
                    "required": ["zip", "rooms"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        },
    },
    "required": ["name", "age", "score", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "room": {
            "type": "object",
            "properties": {"windows": {"type": "boolean"}, "kind": {"const": "room"}},
            "required": ["windows"],
            "additionalProperties": False,
        }
    },
}
# Linked: each value may hold the next.
LINKED = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}


def compiled(compiler: GrammarCompiler, kind: Any, value: Any) -> Grammar:
    return compiler.submit(kind, value).result()


def new_compiler(eos: list[int], checker: Checker | None = None) -> GrammarCompiler:
    return GrammarCompiler(
        TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=eos, checker=checker
    )


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = new_compiler([EOS])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def endless() -> Iterator[GrammarCompiler]:
    """For a model without an end-of-sequence token."""
    compiler = new_compiler([])
    yield compiler
    compiler.close()


def sample(
    grammar: Grammar, rng: np.random.Generator, *, prepare: bool = True, limit: int = 500
) -> tuple[str, bool]:
    """A text as a model of random logits writes it, and whether the grammar let it end."""
    matcher = grammar.matcher()
    ids: list[int] = []
    while len(ids) < limit:
        logits = rng.standard_normal(VOCAB_SIZE)
        allowed = matcher.allowed()
        if matcher.finished:
            break
        token_id = int(np.where(allowed, logits, -np.inf).argmax())
        matcher.accept(token_id)
        if token_id != EOS:
            ids.append(token_id)
        if matcher.finished:
            break
        if prepare:
            matcher.prepare()
    return TOKENIZER.decode(ids), matcher.finished


def token(spelling: str) -> int:
    token_id = TOKENIZER.token_to_id(spelling)
    assert token_id is not None
    return token_id


def feed(matcher: GrammarMatcher, text: str) -> None:
    """Has a matcher take an ASCII text one character at a time."""
    for character in text:
        matcher.accept(token(SPELLINGS.get(character, character)))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    try:
        feed(matcher, text)
    except ValidationError:
        return False
    return bool(matcher.allowed()[EOS])


@pytest.mark.slow
def test_replies_under_a_nested_schema_validate(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "json", PERSON)
    rng = np.random.default_rng(0)
    validator = jsonschema.Draft202012Validator(PERSON)
    homes = 0
    for _ in range(200):
        text, finished = sample(grammar, rng)
        assert finished
        reply = json.loads(text)
        validator.validate(reply)
        homes += reply["home"] is not None
    assert 0 < homes < 200


@pytest.mark.parametrize(
    "expression",
    [
        r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)",
        r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d",
        r"(yes|no|maybe)(, (yes|no|maybe)){0,3}",
        r"^ab/c\\d$",
        "a/\nstart: [0-9]{2}",
        r"[^\x00-\x7f]{1,3}",
        r"é+[αβγ]{2}?x",
    ],
)
def test_regular_expressions_match_the_whole_text(
    compiler: GrammarCompiler, expression: str
) -> None:
    grammar = compiled(compiler, "regex", expression)
    rng = np.random.default_rng(1)
    for _ in range(20):
        text, finished = sample(grammar, rng)
        assert finished
        assert re.fullmatch(expression, text)


def test_lark_grammars_nest(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "lark", 'start: "(" start ")" | /[0-9]/ ("+" start)?\n')
    rng = np.random.default_rng(2)
    for _ in range(20):
        text, finished = sample(grammar, rng)
        depth = text.count("(") - text.count(")")
        assert depth >= 0
        assert not finished or depth == 0
    assert accepts(grammar, "((1+(2)))")
    assert not accepts(grammar, "((1+(2))")


@pytest.mark.parametrize(
    ("kind", "value", "text", "expected"),
    [
        ("json", None, '{"a": [1]}', True),
        ("json", {}, "{}", True),
        ("json", "{}", "[1]", False),
        ("json", True, "[1]", True),
        ("json_schema", {}, "[1]", True),
        ("json", '{"type": "integer"}', "-12", True),
        ("json", {"type": "integer"}, "1.5", False),
        ("json_schema", {"name": "n", "schema": {"type": "boolean"}}, "true", True),
        ("json_schema", '{"schema": {"type": "boolean"}}', "1", False),
        ("json", {"oneOf": [{"const": 1}, {"const": 2}]}, "2", True),
        ("json", {"const": {"a": 1, "b": 2}}, '{"a":1,"b":2}', True),
        ("json", {"const": {"a": 1, "b": 2}}, '{ "a" : 1 , "b" : 2 }', True),
        ("json", {"const": {"a": 1, "b": 2}}, '{"a":  1,"b":2}', False),
        ("json", {"const": {"a": 1, "b": 2}}, '{\n"a":1,"b":2}', False),
        ("json", {"const": {"a": 1}, "x-guidance": {"whitespace_pattern": "_"}}, '{_"a":1}', False),
        ("json", LINKED, '{"next":{"next":{"next":null}}}', True),
        ("json", {"enum": [f"value {i}" for i in range(10_000)]}, '"value 9876"', True),
        ("json", {"enum": [f"value {i}" for i in range(10_000)]}, '"value 10000"', False),
        ("json", {"items": {"maximum": 2}, "type": "array"}, "[]", True),
        ("regex", "a|b", "a", True),
        ("regex", "a|b", "ab", False),
    ],
)
def test_what_a_grammar_takes(
    compiler: GrammarCompiler, kind: GrammarKind, value: Any, text: str, expected: bool
) -> None:
    assert accepts(compiled(compiler, kind, value), text) is expected


def test_end_of_sequence_is_allowed_exactly_where_the_text_may_end(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiled(compiler, "regex", "ab?c?|abcd").matcher()
    ends = []
    for character in "abcd":
        ends.append(bool(matcher.allowed()[EOS]))
        feed(matcher, character)
    assert ends == [False, True, True, True]
    assert matcher.finished
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]


def test_the_end_is_taken_and_nothing_follows_it(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, "regex", "a+").matcher()
    with pytest.raises(ValidationError, match="text to end here"):
        matcher.accept(EOS)
    feed(matcher, "a")
    assert not matcher.finished
    matcher.accept(EOS)
    assert matcher.finished
    with pytest.raises(ValidationError, match="does not allow token"):
        feed(matcher, "a")


def test_only_tokens_of_text_are_allowed(compiler: GrammarCompiler) -> None:
    """Everything may follow but the special tokens and the logits that stand for nothing."""
    matcher = compiled(compiler, "regex", "(?s:.*)<.*").matcher()
    allowed = matcher.allowed()
    assert allowed.shape == (VOCAB_SIZE,)
    assert allowed.dtype == np.bool_
    assert not allowed[[EOS, MASK]].any()
    assert not allowed[-NUM_PADDING:].any()
    assert allowed[2:-NUM_PADDING].mean() > 0.9
    for token_id in (-1, VOCAB_SIZE - 1, VOCAB_SIZE):
        with pytest.raises(ValidationError, match="does not allow token"):
            matcher.accept(token_id)


def test_several_end_of_sequence_tokens_even_beyond_the_vocabulary() -> None:
    beyond, text = VOCAB_SIZE - 1, token("z")
    compiler = new_compiler([EOS, text, beyond, VOCAB_SIZE + 5])
    try:
        matcher = compiled(compiler, "regex", "az?").matcher()
        feed(matcher, "a")
        assert np.flatnonzero(matcher.allowed()).tolist() == [EOS, text, beyond]
        matcher.accept(beyond)
        assert matcher.finished
    finally:
        compiler.close()


def test_a_model_without_an_end_of_sequence_token(endless: GrammarCompiler) -> None:
    matcher = compiled(endless, "regex", "ab?").matcher()
    feed(matcher, "a")
    assert not matcher.finished
    assert np.flatnonzero(matcher.allowed()).tolist() == [token("b")]
    feed(matcher, "b")
    assert matcher.finished
    assert not matcher.allowed().any()
    rng = np.random.default_rng(3)
    grammar = compiled(endless, "json", PERSON)
    for _ in range(10):
        text, finished = sample(grammar, rng)
        assert finished
        jsonschema.validate(json.loads(text), PERSON)


def test_masks_are_the_same_with_and_without_prepare(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "json", PERSON)
    texts = {
        prepare: [sample(grammar, np.random.default_rng(seed), prepare=prepare) for seed in (4, 5)]
        for prepare in (True, False)
    }
    assert texts[True] == texts[False]
    ahead, behind = grammar.matcher(), grammar.matcher()
    assert ahead.ready
    for character in '{"name": "x':
        feed(ahead, character)
        feed(behind, character)
        assert not ahead.ready
        ahead.prepare()
        ahead.prepare()
        assert np.array_equal(ahead.allowed(), behind.allowed())
        assert ahead.ready


def test_a_token_may_come_before_the_prepared_mask_is_read(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "regex", "[a-f]{6}")
    hasty, patient = grammar.matcher(), grammar.matcher()
    for character in "abcde":
        feed(hasty, character)
        hasty.prepare()
        feed(patient, character)
    assert np.array_equal(hasty.allowed(), patient.allowed())


@pytest.mark.parametrize(
    ("decoder", "words"),
    [(None, "no decoder"), (decoders.CTC(), "a decoder of the kind CTC")],
)
@pytest.mark.parametrize("eos", [[EOS], []])
def test_a_tokenizer_that_does_not_say_what_its_tokens_spell(
    decoder: Any, words: str, eos: list[int]
) -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)
    backend.decoder = decoder
    compiler = GrammarCompiler(backend.to_str(), vocab_size=VOCAB_SIZE, eos_token_ids=eos)
    with pytest.raises(ValidationError, match=f"its tokenizer has {words}"):
        compiled(compiler, "regex", "a")
    compiler.close()


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "regex", "ax|by")
    first, second = grammar.matcher(), grammar.matcher()
    feed(first, "a")
    with pytest.raises(ValidationError):
        feed(first, "y")
    feed(second, "by")
    assert second.finished
    assert grammar.matcher().allowed()[[token("a"), token("b")]].all()


def test_matchers_work_at_the_same_time(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "json", PERSON)
    alone = [sample(grammar, np.random.default_rng(seed)) for seed in range(8)]
    together: dict[int, tuple[str, bool]] = {}

    def run(seed: int) -> None:
        together[seed] = sample(grammar, np.random.default_rng(seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(8)] == alone


def test_a_mask_stays_as_it_was_read(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, "regex", "[ab]{4}").matcher()
    masks: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] = []
    for character in "abab":
        mask = matcher.allowed()
        masks.append((mask, mask.copy()))
        with pytest.raises(ValueError, match="read-only"):
            mask[0] = True
        feed(matcher, character)
    assert all(np.array_equal(mask, copy) for mask, copy in masks)


def chain(num_links: int, wrap: bool) -> dict[str, Any]:
    """References that lead from one definition to the next."""
    links = [{"$ref": f"#/$defs/{i + 1}"} for i in range(num_links)]
    parts = [{"items": link} if wrap else link for link in links]
    return {"$ref": "#/$defs/0", "$defs": dict(enumerate([*parts, {}]))}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("xml", "<a/>", "is one of json, json_schema, regex, lark"),
        ("regex", None, "must be a string"),
        ("regex", {"a": 1}, "must be a string"),
        ("regex", "(", "unclosed group"),
        ("regex", "", "only the empty one"),
        ("regex", "(?=a)a", "look-around"),
        ("regex", "a(?!b)", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"\bword", "lookarounds not supported"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "nest"),
        ("regex", "[^a]" * MAX_TEXT_BYTES, rf"{4 * MAX_TEXT_BYTES} .* {MAX_TEXT_BYTES}"),
        ("regex", "\ud800", "surrogate"),
        ("lark", " ", "empty"),
        ("lark", "start: other", "unknown name"),
        ("lark", 'start: start "a"', "no text matches it"),
        ("lark", "start: <|endoftext|>", "no text of this model"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("json", "{", "not valid JSON"),
        ("json", "[" * 100_000, "levels deep"),
        ("json", nested(10_000), "levels deep"),
        ("json", 5, "must be an object"),
        ("json", [], "must be an object"),
        ("json_schema", None, "must be an object"),
        ("json_schema", {"name": "n", "schema": None}, "must be an object"),
        ("json", False, "no value satisfies"),
        ("json", {"const": float("nan")}, "not valid JSON"),
        ("json", {"const": object()}, "not valid JSON"),
        ("json", {"type": "unknown"}, "Invalid type"),
        ("json", {"enum": []}, "Unsatisfiable"),
        ("json", {"minimum": 2, "maximum": 1, "type": "integer"}, "Unsatisfiable"),
        ("json", {"enum": ["x" * 180] * 10_000}, rf"1830.* {MAX_SCHEMA_BYTES}"),
        ("json", {"const": "x" * 50_000}, "50000"),
        ("json", {"$ref": "#"}, "infinitely recursive"),
        ("json", {"$ref": "http://127.0.0.1/schema.json"}, "does not fetch"),
        ("json", {"$ref": "file:///etc/hostname"}, "does not fetch"),
        ("json", {"$ref": "#/$defs/none"}, "does not exist"),
        ("json", {"type": "string", "pattern": "(a"}, "unclosed group"),
        ("json", {"required": [f"{i:x}" for i in range(30_000)], "type": "object"}, "too big|2 s"),
        # Nothing else would end this one: 401 * 409 * 419 states.
        ("json", {"allOf": [{"multipleOf": n} for n in (401, 409, 419)], "type": "integer"}, "2 s"),
    ],
)
def test_wrong_and_hostile_grammars_are_refused(
    compiler: GrammarCompiler, kind: Any, value: Any, reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason) as raised:
        compiled(compiler, kind, value)
    assert raised.value.message[0].islower()
    assert not raised.value.message.endswith(".")
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 400
    assert accepts(compiled(compiler, "regex", "a"), "a")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("lark", "start: x{1,1000}\nx: y{1,1000}\ny: /a{1,1000}/\n"),
        ("json", {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}),
        ("json", chain(5000, wrap=False)),
        ("json", chain(2500, wrap=True)),
        ("json", {"type": "object", "properties": {f"p{i}": True for i in range(2000)}}),
        ("regex", "(.|a)*a(.){2000}b"),
    ],
)
def test_hostile_grammars_are_refused_or_bounded(
    compiler: GrammarCompiler, kind: GrammarKind, value: Any
) -> None:
    """Whether it compiles, fails, or fails at a later token: the process lives and goes on."""
    with contextlib.suppress(ValidationError):
        sample(compiled(compiler, kind, value), np.random.default_rng(6))
    assert accepts(compiled(compiler, "regex", "a"), "a")


def test_a_grammar_may_become_too_complex_on_the_way(compiler: GrammarCompiler) -> None:
    optional = {f"p{i}": True for i in range(1500)}
    matcher = compiled(compiler, "json", {"type": "object", "properties": optional}).matcher()
    with pytest.raises(ValidationError, match=r"(?i)cannot be used: .*too many items") as raised:
        feed(matcher, "{")
    assert "<" not in raised.value.message


def test_a_grammar_without_an_end_goes_on_step_by_step(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, "lark", 'start: "{" start "}"\n | "[" start "]" | "a"').matcher()
    feed(matcher, "{" * 100)
    assert matcher.allowed()[token("{")]
    assert not matcher.allowed()[[EOS, token("}")]].any()


def test_properties_in_another_order_are_another_grammar() -> None:
    """The reply keeps the schema's order."""
    texts = [
        parse_grammar("json", {"properties": {key: {} for key in keys}}).text
        for keys in ("ab", "ba")
    ]
    assert texts[0] != texts[1]


class HeldChecker:
    """Stands in for the child process: every check waits until it may go on."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.checked: list[str] = []
        self.refusal: ValidationError | None = None

    def check(self, grammar: str) -> None:
        self.checked.append(grammar)
        assert self.release.wait(30)
        if self.refusal is not None:
            raise self.refusal

    def close(self) -> None:
        self.release.set()


@pytest.fixture
def checker() -> HeldChecker:
    return HeldChecker()


@pytest.fixture
def held(checker: HeldChecker) -> Iterator[GrammarCompiler]:
    compiler = new_compiler([EOS], checker)
    yield compiler
    checker.release.set()
    compiler.close()


@pytest.fixture
def of_a_client() -> Iterator[None]:
    """What the test asks for is a client's, not this process's own."""
    token = usage_of_request.set(ClientUsage("a client"))
    yield
    usage_of_request.reset(token)


@pytest.mark.usefixtures("of_a_client")
def test_too_many_waiting_grammars_are_refused(
    held: GrammarCompiler, checker: HeldChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_COMPILING_PER_CLIENT", 3)
    texts = "abcabc"  # the same grammar again only has to be checked once
    waiting = [held.submit("regex", text) for text in texts]
    assert held.num_compiling == 3
    with pytest.raises(OverloadedError, match="3 other grammars"):
        held.submit("regex", "d")
    checker.release.set()
    assert all(
        accepts(future.result(30), text) for future, text in zip(waiting, texts, strict=True)
    )
    assert len(checker.checked) == 3
    assert accepts(compiled(held, "regex", "d"), "d")


def test_a_client_that_leaves_takes_its_grammar_along(
    held: GrammarCompiler, checker: HeldChecker
) -> None:
    async def run() -> None:
        futures = [held.submit("regex", text) for text in "ab"]
        stays, leaves = (asyncio.wrap_future(future) for future in futures)
        leaves.cancel()
        await asyncio.wait([leaves])
        checker.release.set()
        assert accepts(await stays, "a")
        assert futures[1].cancelled()

    asyncio.run(run())
    assert len(checker.checked) == 1


def test_a_grammar_is_checked_once(
    held: GrammarCompiler, checker: HeldChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.release.set()
    monkeypatch.setattr(grammar_module, "_MAX_VERDICTS", 2)
    values: list[GrammarValue] = ['{"type": "integer"}', {"type": "integer"}]
    first, second = (compiled(held, "json", value) for value in values)
    assert first is not second
    assert len(checker.checked) == 1
    for text, num_checked in [("a", 2), ("a", 2), ("b", 3), ("a", 3), ("c", 4), ("b", 5)]:
        compiled(held, "regex", text)
        assert len(checker.checked) == num_checked


def test_a_grammar_is_checked_once_for_each_key(
    held: GrammarCompiler, checker: HeldChecker
) -> None:
    """So how fast it is compiled tells no key what another one has sent; addresses are no keys."""
    checker.release.set()
    for usage, num_checked in (
        (ClientUsage("alice", "alice"), 1),
        (ClientUsage("alice", "alice"), 1),
        (ClientUsage("bob", "bob"), 2),
        (ClientUsage("192.0.2.1"), 3),
        (ClientUsage("192.0.2.2"), 3),
        (ClientUsage("bob", "bob"), 3),
    ):
        token = usage_of_request.set(usage)
        compiled(held, "regex", "the number of an account")
        usage_of_request.reset(token)
        assert len(checker.checked) == num_checked


def test_clients_take_turns(held: GrammarCompiler, checker: HeldChecker) -> None:
    def submit(client: str, pattern: str) -> None:
        token = usage_of_request.set(ClientUsage(client))
        held.submit("regex", pattern)
        usage_of_request.reset(token)

    submit("greedy", "first")
    while not checker.checked:
        time.sleep(0.001)
    for pattern in ("a", "b", "c"):
        submit("greedy", pattern)
    submit("polite", "d")
    time.sleep(0.01)  # the first is charged with the time for which it is held
    checker.release.set()
    while held.num_compiling:
        time.sleep(0.001)
    order = [text.split("/")[1] for text in checker.checked]
    assert order == ["first", "d", "a", "b", "c"]


def test_the_limit_of_waiting_grammars_is_each_clients_own(
    held: GrammarCompiler, checker: HeldChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_COMPILING_PER_CLIENT", 2)
    monkeypatch.setattr(grammar_module, "_MAX_COMPILING", 5)
    for client in ("a", "b"):
        token = usage_of_request.set(ClientUsage(client))
        for number in range(2):
            held.submit("regex", f"{client}{number}")
        with pytest.raises(OverloadedError, match="2 other grammars of this client"):
            held.submit("regex", "another")
        usage_of_request.reset(token)
    token = usage_of_request.set(ClientUsage("c"))
    held.submit("regex", "the fifth")
    with pytest.raises(OverloadedError, match="5 in all"):
        held.submit("regex", "the sixth")
    usage_of_request.reset(token)
    held.submit("regex", "of this process")  # nobody refuses it
    checker.release.set()


def test_a_refusal_is_kept(held: GrammarCompiler, checker: HeldChecker) -> None:
    checker.release.set()
    checker.refusal = ValidationError("too hard")
    for _ in range(2):
        with pytest.raises(ValidationError, match="too hard"):
            compiled(held, "regex", "a")
    assert len(checker.checked) == 1


def test_a_grammar_worn_out_by_one_request_serves_the_next(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one matcher share llguidance's lexer, and with it the room that it has left."""
    limits = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr(grammar_build, "_limits", lambda: limits)

    def first_failure() -> int:
        matcher = compiled(compiler, "regex", "(.|a)*a(.){2000}b").matcher()
        rng = np.random.default_rng(7)
        for count in range(200):
            try:
                matcher.accept(int(rng.choice(np.flatnonzero(matcher.allowed()))))
            except ValidationError:
                return count
        return 200

    counts = [first_failure() for _ in range(2)]
    assert counts[0] == counts[1]
    assert 0 < counts[0] < 200


def test_the_child_process_ends_with_the_compiler() -> None:
    before = set(psutil.Process().children())
    compiler = new_compiler([EOS])
    assert set(psutil.Process().children()) == before
    compiled(compiler, "regex", "a")
    assert len(set(psutil.Process().children()) - before) == 1
    compiler.close()
    assert set(psutil.Process().children()) <= before


def test_the_child_process_ends_with_a_forgotten_compiler() -> None:
    before = set(psutil.Process().children())
    compiler = new_compiler([EOS])
    compiled(compiler, "regex", "a")
    del compiler
    gc.collect()
    assert set(psutil.Process().children()) <= before


def test_a_child_process_that_was_killed_is_replaced() -> None:
    before = set(psutil.Process().children())
    compiler = new_compiler([EOS])
    try:
        compiled(compiler, "regex", "a")
        (child,) = set(psutil.Process().children()) - before
        child.kill()
        child.wait(30)
        assert accepts(compiled(compiler, "regex", "b"), "b")
    finally:
        compiler.close()


@pytest.mark.parametrize(("num_deaths", "refused"), [(1, False), (2, True)])
def test_a_grammar_is_not_refused_because_its_child_process_died_once(
    monkeypatch: pytest.MonkeyPatch, num_deaths: int, refused: bool
) -> None:
    checker = grammar_check.GrammarChecker("", [])
    answers = iter([ChildDiedError(too_complex=False)] * num_deaths + [None])

    def ask(_: object) -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    monkeypatch.setattr(checker._child, "ask", ask)
    with pytest.raises(grammar_check.TooComplexError) if refused else contextlib.nullcontext():
        checker.check("")


def test_a_grammar_that_was_too_complex_is_tried_again_later(
    held: GrammarCompiler, checker: HeldChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.release.set()
    checker.refusal = grammar_check.TooComplexError("took too long")
    for _ in range(2):
        with pytest.raises(ValidationError, match="took too long"):
            compiled(held, "regex", "a")
    assert len(checker.checked) == 1
    checker.refusal = None
    later = time.monotonic() + 61
    # The module's own clock: event loops in other threads would stand still for that minute.
    monkeypatch.setattr(grammar_module, "time", SimpleNamespace(monotonic=lambda: later))
    assert accepts(compiled(held, "regex", "a"), "a")


def test_a_child_process_that_cannot_start_is_unavailable() -> None:
    checker = grammar_check.GrammarChecker("no tokenizer", [])
    with pytest.raises(UnavailableError, match="could not be started"):
        checker.check(parse_grammar("regex", "a").text)
