"""Generators of hostile inputs: HTTP messages, JSON bodies, grammars, chat templates."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"inputs": "good"}'
POST = b"POST /classify HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
VALID = [
    LENGTH + b"\r\n" + BODY,
    CHUNKED + b"\r\n12\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b'\r\n9;x="y"\r\n' + BODY[:9] + b"\r\n9\r\n" + BODY[9:] + b"\r\n00\r\nx: y\r\n\r\n",
    b"CoNtEnT-lEnGtH:18 \t\r\n\r\n" + BODY,
    b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY,
]
"""What can be read in one way only, behind `POST`."""

_METHODS = [*b"GET POST HEAD PUT CONNECT OPTIONS get PRI G\x00T".split(), b""]
_TARGETS = [
    *(b"/classify", b"/health", b"/", b"*", b"http://h/classify", b"http://h", b"h:80", b"//x/y"),
    *(b"/%00", b"/%ff", b"/%zz", b"/\xff", b"/a b", b"/../x", b"/models/a%0d%0ab", b"?", b"#", b""),
]
_VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 x", b"http/1.1", b""]
_HEADERS = [
    *(LENGTH, CHUNKED, b"host: y\r\n", b"content-length: 5\r\n", b"connection: close\r\n"),
    *(b"expect: 100-continue\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"x: y\r\n" * 50),
    *(b"x-request-id: a\x7fb\r\n", b"x: " + b"y" * 70_000 + b"\r\n", b"\x00\r\n", b" x\r\n", b"\n"),
    *(b"authorization: Bearer \xff\r\n", b"content-type: \r\n", b"trailer: x\r\n", b"te: x\r\n"),
]
_BODIES = [
    *(b"", BODY, b"12\r\n" + BODY + b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"ffffffff\r\n", b"zz\r\n"),
    *(BODY * 3, SMUGGLED, b"5;" + b"x" * 5000 + b"\r\n", b"\x16\x03\x01\x02\x00", b"\r\n" * 10),
]
_VALUES: Sequence[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0),
    *(1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "\0", "\ud800", "\udfff\ud800", "\u202e"),
    *("a\r\nb: c", "\x1b[2J", "\ufeff", "e\u0301" * 50, "\U0001f468\u200d\U0001f469" * 30),
    "x" * 5000,
    *("[MASK]", "[MASK]" * 40, "</s>", "<|endoftext|>", "../../etc/passwd", "file:///etc/passwd"),
    *("%s%n", "${jndi:x}", "{{ 7 * 7 }}", "'; --", "hybrid", "hybrid:full", "sentiment", "chat"),
    *([], {}, [[]], [{}], [None], [""] * 300, [[0] * 50] * 50, {"": {}}, {"$ref": "#"}, {"a": [1]}),
]
_DEEP: Sequence[Callable[[Any, int], Any]] = [
    lambda value, depth: value if depth == 0 else _DEEP[0]([value], depth - 1),
    lambda value, depth: value if depth == 0 else _DEEP[1]({"a": value}, depth - 1),
]
_ENCODINGS = ["utf-8", "utf-16", "utf-32-be", "utf-8-sig", "latin-1"]


def http_message(source: random.Random) -> bytes:
    """A request as no client library would send it, and sometimes a good one."""
    if source.random() < 0.2:
        return POST + source.choice(VALID)
    line = b" ".join(source.choice(each) for each in (_METHODS, _TARGETS, _VERSIONS))
    usual = source.random() < 0.5
    headers = [b"host: x\r\n", *source.choices(_HEADERS, k=source.randrange(4))]
    content = (POST if usual else line + b"\r\n") + b"".join(headers) + b"\r\n"
    content += source.choice(_BODIES)
    for _ in range(source.choice((0, 0, 1, 3))):
        content = with_a_change(content, source)
    return content


def body(example: Any, others: Sequence[str], source: random.Random) -> bytes:
    """A body like an example, with one or several faults.

    Args:
        example: a good one, as JSON values.
        others: names of fields to add or to rename some to.
        source: draws the faults.
    """
    value = copy.deepcopy(example)
    for _ in range(source.choice((1, 1, 1, 1, 2, 4))):
        value = _with_a_fault(value, others, source)
    text = json.dumps(value, ensure_ascii=source.random() < 0.5)
    if source.random() < 0.05:
        # The last of two equal names counts, if anything.
        text = text.replace("{", '{"inputs": 1, "model": 2, ', 1)
    encoding = "utf-8" if source.random() < 0.95 else source.choice(_ENCODINGS)
    content = text.encode(encoding, "surrogatepass" if "utf" in encoding else "replace")
    return with_a_change(content, source) if source.random() < 0.1 else content


def _with_a_fault(value: Any, others: Sequence[str], source: random.Random) -> Any:
    """With a fault at a place that is drawn on the way down."""
    if isinstance(value, dict) and value and source.random() < 0.85:
        name = source.choice(list(value))
        kind = source.random()
        if kind < 0.03:
            del value[name]
        elif kind < 0.06:
            value[source.choice(others)] = value.pop(name)
        elif kind < 0.2:
            value[source.choice(others)] = hostile_value(source)
        else:
            value[name] = _with_a_fault(value[name], others, source)
        return value
    if isinstance(value, list) and value and source.random() < 0.7:
        place = source.randrange(len(value))
        if source.random() < 0.2:
            return value * source.choice((0, 2, 100))
        value[place] = _with_a_fault(value[place], others, source)
        return value
    if source.random() < 0.6:  # of the same type, so that more is asked than the body's parser
        alike = [each for each in _VALUES if type(each) is type(value)]
        return copy.deepcopy(source.choice(alike)) if alike else value
    return hostile_value(source)


def hostile_value(source: random.Random) -> Any:
    """A JSON value; some are nested deeper than any parser should follow."""
    value = copy.deepcopy(source.choice(_VALUES))
    if source.random() < 0.05:
        return source.choice(_DEEP)(value, source.choice((10, 100, 400)))
    if isinstance(value, str) and source.random() < 0.1:
        return value * source.randrange(2, 50)
    return value


def grammar(source: random.Random) -> dict[str, Any]:
    """What ``/generate`` takes as a grammar: regexes, JSON schemas and Lark, mostly valid."""
    kind = source.choice(("regex", "json", "lark"))
    write: dict[str, Callable[[], Any]] = {
        "regex": lambda: _regex(source, source.randrange(1, 5)),
        "json": lambda: _schema(source, source.randrange(1, 4)),
        "lark": lambda: _lark(source),
    }
    return {"type": kind, "value": write[kind]()}


_ATOMS = ("a", "[a-z]", ".", r"\d", r"\w", r"\s", "é", "[^a]", r"\p{L}", "(", "^")


def _regex(source: random.Random, depth: int) -> str:
    if depth == 0:
        return source.choice(_ATOMS)
    parts = [_regex(source, depth - 1) for _ in range(source.randrange(1, 4))]
    suffix = source.choice(("", "*", "+", "?", "{2}", "{0,50}", "{9,}", "{1000}", "*?", "{99999}"))
    group = source.choice(("({})", "(?:{})", "(?={})", "(?i:{})"))
    return group.format(source.choice(("", "|")).join(parts)) + suffix


def _schema(source: random.Random, depth: int) -> Any:
    scalars: list[Any] = [
        {"type": "string"},
        {"type": "string", "pattern": _regex(source, 2)},
        {"type": "string", "minLength": source.choice((0, 5, 10**6)), "maxLength": 9},
        {"type": "integer", "minimum": source.choice((-5, 0, 10**30)), "maximum": 10**31},
        {"type": "number", "multipleOf": source.choice((0.1, 0, 7))},
        {"enum": ["a", 1, None, {}]},
        {"const": {"a": [1]}},
        {"$ref": source.choice(("#", "#/$defs/x", "http://x/y", "#/properties/a"))},
        *(True, False, {}, {"type": "x"}, {"format": "uuid", "type": "string"}, {"not": {}}),
    ]
    if depth == 0:
        return source.choice(scalars)
    below = [_schema(source, depth - 1) for _ in range(source.randrange(1, 4))]
    many = source.choice((0, 3, 10**6))
    named = dict(zip("abc", below, strict=False))
    return source.choice(
        [
            {"type": "object", "properties": named, "required": ["a"]},
            {"type": "object", "additionalProperties": below[0], "minProperties": many},
            {"type": "object", "patternProperties": {_regex(source, 1): below[0]}},
            {"type": "array", "items": below[0], "minItems": many, "uniqueItems": True},
            {"type": "array", "prefixItems": below},
            *({"anyOf": below}, {"oneOf": below}, {"allOf": below}),
        ]
    )


def _lark(source: random.Random) -> str:
    names = ("x", "y", "Z")
    parts = [
        "/a+/",
        "/[a-z]*/",
        '"b"',
        '"b"i',
        "x",
        "y",
        "Z",
        "/./",
        "/ /",
        '"\\n"',
        "%json {}",
        "",
    ]
    repeat = ("", "", "*", "+", "?", "~3", "{2,5}", "{0,1000}")

    def words() -> str:
        times = range(source.randrange(1, 4))
        return " ".join(source.choice(parts) + source.choice(repeat) for _ in times)

    def rule() -> str:
        return " | ".join(words() for _ in range(source.randrange(1, 3)))

    return "\n".join(f"{name}: {rule()}" for name in ("start", *names))


def template(source: random.Random) -> str:
    """A chat template, mostly one that renders something."""
    values = ("messages", "x", "'a'", "9", "m.content", "[x]", "{'a': x}", "range(9)", "loop.index")
    filters = (
        "",
        *["|length", "|tojson", "|join('b')", "|sort", "|list", "|string", "|trim", "|indent(9)"],
    )
    operators = ("~", "+", "*", "%", "**", "//", "<", "in", "and", ".")

    def expression(depth: int) -> str:
        if depth == 0:
            return source.choice(values) + source.choice(filters)
        left, right = expression(depth - 1), expression(depth - 1)
        return f"({left} {source.choice(operators)} {right}){source.choice(filters)}"

    def block(depth: int) -> str:
        inner = "" if depth == 0 else block(depth - 1) + block(depth - 1)
        one = expression(source.randrange(3))
        return source.choice(
            (
                "{{ " + one + " }}" + inner,
                "{% for m in messages %}" + inner + "{% endfor %}",
                "{% for x in range(99) %}" + inner + "{% endfor %}",
                "{% if " + one + " %}" + inner + "{% endif %}",
                "{% set x = " + one + " %}" + inner,
                "{% macro f(x) %}" + inner + "{% endmacro %}{{ f(" + one + ") }}",
            )
        )

    return block(source.randrange(1, 5))


def with_a_change(content: bytes, source: random.Random) -> bytes:
    """With a byte more, less, or other, or cut off."""
    place = source.randrange(len(content) + 1)
    other = bytes([source.choice((0, 10, 13, 32, 58, 127, 255, source.randrange(256)))])
    endings: Sequence[bytes] = (
        other + content[place:],
        content[place + 1 :],
        other + content[place + 1 :],
        b"",
    )
    return content[:place] + source.choice(endings)
