"""Tools that take a text under a Lark grammar, in the formats in which models write calls."""

import json
from collections.abc import Sequence

import pytest

from maskdial.causal.tools import INPUT, ReplyParser, Tool, ToolChoice, ToolFormat, write_grammar
from maskdial.errors import ValidationError
from maskdial.grammar.source import GrammarSource, lark_source
from tests.unit.causal.test_tools_grammar import FORMATS, Sampler, accepts, derive, read
from tests.unit.grammar.test_json_text import APPLY_PATCH, PATCH, matches

# Lines of a few characters, so that texts of random weights end.
LINES = """\
start: begin line{1,3} "end"
begin: "{" NAME "}" LF
line: ("+" | "-") /[^\\n]{0,5}/ LF
NAME: /[a-z"\\\\]{1,4}/
%import common.LF
"""
ENFORCED = [name for name in FORMATS if name not in ("glm", "minimax", "minicpm5")]
"""GLM's own tokenizers have a token for the end of a text; here it is spelled, as the others do."""


def write(form: ToolFormat | None, lark: str) -> GrammarSource:
    tool = Tool.of_text("apply_patch", "Edits files.", "lark", lark)
    return write_grammar(form, [tool], ToolChoice("required"), parallel=False)


def inputs(form: ToolFormat, text: str) -> Sequence[str]:
    """What the tool is called with."""
    tool = Tool.of_text("apply_patch", "", "lark", LINES)
    _, _, calls = read(ReplyParser(form, [tool]), [text])
    return [json.loads(arguments)[INPUT] for _, _, arguments in calls]


@pytest.mark.parametrize("name", ENFORCED)
def test_random_weights_write_texts_that_match(name: str) -> None:
    form = derive(name)
    grammar = write(form, LINES)
    assert not grammar.warnings
    sampler = Sampler(seed=5)
    for _ in range(12):
        (text,) = inputs(form, sampler.text(grammar.text))
        assert matches(LINES, text), text


def test_codex_grammar_of_patches() -> None:
    grammar = write(derive("hermes"), APPLY_PATCH).text
    arguments = json.dumps({INPUT: PATCH}, ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    assert accepts(grammar, call)
    assert accepts(grammar, call.replace("*** Update", "*** Change")) is False
    assert accepts(grammar, call.replace("-    return", "    return")) is not False
    assert accepts(grammar, call.replace("@@", "@")) is False
    written = (
        "<tool_call>\n<function=apply_patch>\n<parameter=input>\n{}\n</parameter>\n</function>"
    )
    grammar = write(derive("qwen3_coder"), APPLY_PATCH).text
    call = written.format(PATCH.rstrip("\n")) + "\n</tool_call>"
    assert accepts(grammar, call)
    assert accepts(grammar, call.replace("@@", "@")) is False


@pytest.mark.parametrize(
    ("name", "lark"),
    [
        ("hermes", 'start: %json {"type": "integer"}'),
        ("hermes", 'start: A\nA: /[a-z"]+/ /[a-z\\n]+/'),
        # Nothing tells where such a text ends.
        ("glm", APPLY_PATCH),
        ("qwen3_coder", r"start: /(.|\n)+/"),
    ],
)
def test_what_cannot_be_enforced_is_told(name: str, lark: str) -> None:
    grammar = write(derive(name), lark)
    assert grammar.warnings == ("apply_patch: its Lark grammar is not enforced",)
    # It is compiled all the same, so that one that is wrong is refused.
    parts = json.loads(grammar.text)["grammars"]
    assert [part for part in parts if part.get("lark_grammar") == lark_source(lark)]


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ("start: <think>", "special tokens and other grammars"),
        ("start: @calls", "special tokens and other grammars"),
        ("  ", "is empty"),
        ('start: "' + "a" * 20_000 + '"', "the limit is 16384"),
    ],
)
def test_grammars_that_are_no_text(lark: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        write(derive("hermes"), lark)
    assert "tool 'apply_patch'" in caught.value.message
    assert (caught.value.field, caught.value.index) == ("tools", 0)
