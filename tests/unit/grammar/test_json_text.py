"""Grammars of a text within a JSON string: they accept what the grammar of the text accepts."""

import itertools
import json
import random
import re
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from maskdial.errors import ValidationError
from maskdial.grammar.json_text import json_text, within_lines
from maskdial.grammar.source import lark_source

# Codex 0.171 sends this one.
APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """\
*** Begin Patch
*** Update File: a "b"/calc.py
@@ def add(a, b):
-    return a - b  # \\d "x"
+\treturn a + b  # \u00e9 \u2028
*** Add File: c
+
*** End Patch
"""


class _Bytes:
    tokens = (*(bytes([each]) for each in range(256)), b"<end>")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


@cache
def _compiled(lark: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, lark_source(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matches(lark: str, text: str) -> bool:
    """Whether llguidance accepts a whole text."""
    matcher = _compiled(lark).deep_copy()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (("", ""), True),
        (("*** End Patch\n", "*** End Patch"), True),
        (("*** Update", "*** Change"), False),
        (("@@ def", "@def"), False),
        (("\n+\n", "\n\n"), False),
        (("*** Begin Patch\n", "*** Begin Patch\r\n"), False),
    ],
)
def test_patches(change: tuple[str, str], right: bool) -> None:
    text = PATCH.replace(*change)
    translated = json_text(APPLY_PATCH)
    assert translated is not None
    assert matches(APPLY_PATCH, text) is matches(translated, in_json(text)) is right
    # Lines of errors are those of the grammar.
    assert translated.count("\n") == APPLY_PATCH.count("\n")


CASES = [
    (r'start: "a\n\"\\" "b"i', ['a\n"\\b', 'a\n"\\B'], ["a", 'A\n"\\b']),
    (r'start: "x\n"i', ["x\n", "X\n"], ["x"]),
    (r'start: "a".."c" /[^a\n]+/', ['b"x\\\t', "cé"], ["da", "b\n"]),
    ("start: A+\nA: B | C\nB: /x[^x]*x/\nC: LF\n%import common.LF", ['xa"x\n\n'], ["x\nxx"]),
    (
        "start: W A W\nA: INT\n%import common.INT\n%import common.WS -> W",
        [" 12\n", "\n\t7 "],
        ["7 "],
    ),
    (r"start: STRING" + '\nSTRING: "\\"" /([^"\\\\]|\\\\.)*/ "\\""', ['"a\\"b"', '""'], ['"a\\"']),
    ('start: "a" "b"\n%ignore /[ \\n]+/', ["ab", "a \n\n b"], ["a\tb"]),
    ('start: x~2..3 // "not a string\nx: /./s # or this: "', ["\n\n", "abc"], ["a"]),
    ('start: ("a" | "\\t"){2}', ["a\t", "\t\t"], ["a"]),
    (r"start: /\p{Lu}\s\S\d\w\W/", ['A\n"1a"', "Ä\t\\0_\x01"], ["A\n\n1a!"]),
    ("start: /\\x22|\\x{5c}|\\t|\\u0041/", ['"', "\\", "\t", "A"], ["x"]),
    ('start: [A]\nA: /[\\["\\]]{2}/', ["", '["', '"]'], ["x"]),
    ('start: /(?:a|"b)+/', ["a", 'a"b', '"ba'], ["b", "ab"]),
]


@pytest.mark.parametrize(("lark", "right", "wrong"), CASES)
def test_what_a_grammar_may_have(lark: str, right: list[str], wrong: list[str]) -> None:
    translated = json_text(lark)
    assert translated is not None
    for text in right:
        assert matches(lark, text)
        assert matches(translated, in_json(text)), text
        if in_json(text) != text:
            assert not matches(translated, text)
    for text in wrong:
        assert not matches(lark, text)
        assert not matches(translated, in_json(text)), text


@pytest.mark.parametrize(
    "lark",
    [
        'start: %json {"type": "string"}',
        'start: A\nA: /x/ & ~/x"/',
        'start: A & B\nA: /"/\nB: /"/',
        r"start: /(?i:x\n)/",
        "start: /a\n/",
        'start: x[stop="\\n"]\nx[lazy]: /.*/',
        # What comes first would take what comes then.
        'start: A\nA: /[^x]*/ /[a"]+/',
        'start: A\nA: "b" | "b\\n"',
        "start: S\n%import common.ESCAPED_STRING -> S",
        # These would take long.
        "start: /" + "".join(f"[{chr(0x4E00 + each)}b]" for each in range(300)) + "/",
        "start: /" + "".join(chr(0x4E00 + each) for each in range(300)) + "/i",
        "\n".join(["start: A0", *(f"A{n}: A{n + 1} A{n + 1}" for n in range(40)), r'A40: "\n"']),
        "start: A\nA: " + "(" * 3000 + r'"\n"' + ")" * 3000,
    ],
)
def test_what_is_not_translated(lark: str) -> None:
    assert json_text(lark) is None


def test_special_tokens_and_other_grammars_are_no_text() -> None:
    for lark in ("start: <think>", "start: @other", "start: <[12]>"):
        with pytest.raises(ValidationError, match="special tokens and other grammars"):
            json_text(lark)
    assert json_text('start: "<think>" /<b>@x/') is not None


def test_lines() -> None:
    assert within_lines(APPLY_PATCH)
    assert not within_lines(r"start: /a\s/")
    assert not within_lines("start: NEWLINE\n%import common.NEWLINE")
    assert not within_lines("start: %json {}")


ATOMS = ["a", "b", '"', r"\\", r"\n", ".", "[ab]", "[^a]", r'[a"\\]', r"\s", r"\w", "(?:a|bb)"]


def expression(chance: random.Random, depth: int) -> str:
    """A random regular expression."""
    kind = chance.random()
    if not depth or kind < 0.4:
        return chance.choice(ATOMS)
    if kind < 0.7:
        return expression(chance, depth - 1) + expression(chance, depth - 1)
    inner = expression(chance, depth - 1)
    if kind < 0.85:
        return f"(?:{inner}){chance.choice(['*', '+', '?', '{2}', '{1,2}'])}"
    return f"({inner}|{expression(chance, depth - 1)})"


def test_random_expressions_mean_what_they_mean_to_python() -> None:
    texts = ["".join(each) for n in range(4) for each in itertools.product('ab"\\\n', repeat=n)]
    chance, num_translated = random.Random(3), 0
    for _ in range(60):
        first, second = expression(chance, 3), expression(chance, 2)
        translated = json_text(f'start: T\nT: /{first}/ /{second}/ | "x\\n"')
        if translated is None:
            continue
        num_translated += 1
        for text in chance.sample(texts, 20):
            right = re.fullmatch(f"(?:{first})(?:{second})", text, re.ASCII) is not None
            assert matches(translated, in_json(text)) is right, (first, second, text)
    assert num_translated > 20
