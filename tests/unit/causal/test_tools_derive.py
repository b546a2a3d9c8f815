"""What is found of a model's calls and reasoning in its chat template."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import maskdial
from maskdial import cli
from maskdial.bundle.bundle import hash_files, load_bundle, write_manifest
from maskdial.bundle.manifest import CHAT_TEMPLATE, FULL_MANIFEST
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools import ThinkingMarks, ToolFormat, derive_format
from maskdial.errors import BundleError, ValidationError

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
STARTER = Path(maskdial.__file__).parent / "starter" / "hybrid"
USER = {"role": "user", "content": "Hi"}
HERMES_CALL = '<tool_call>\n{"name": "$NAME", "arguments": $ARGUMENTS}\n</tool_call>'


def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, name=name, tokens={"bos_token": "<s>", "eos_token": "</s>"})


@cache  # a child process renders the template
def derive(name: str) -> ToolFormat:
    found = derive_format(template(name), end_tokens=["</s>", "<start_function_response>"])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "trigger", "expected"),
    [
        ("hermes", "<tool_call>", {"call": HERMES_CALL, "separator": "\n"}),
        ("qwen3", "<tool_call>", {"call": HERMES_CALL, "separator": "\n"}),
        ("qwq", "<tool_call>", {"call": HERMES_CALL, "separator": "\n"}),
        (
            "llama",
            "",
            {
                "call": '{"name": "$NAME", "parameters": $ARGUMENTS}',
                "optional_tag": "<|python_tag|>",
            },
        ),
        (
            "mistral_old",
            "[TOOL_CALLS]",
            {
                "section_begin": "[TOOL_CALLS] [",
                "call": '{"name": "$NAME", "arguments": $ARGUMENTS, "id": "$ID"}',
                "separator": ", ",
                "section_end": "]",
                "short_ids": True,
            },
        ),
        (
            "mistral_new",
            "[TOOL_CALLS]",
            {"call": "[TOOL_CALLS]$NAME$ARGUMENTS", "separator": "", "short_ids": True},
        ),
        (
            "magistral",
            "[TOOL_CALLS]",
            {
                "call": "[TOOL_CALLS]$NAME[CALL_ID]$ID[ARGS]$ARGUMENTS",
                "separator": "",
                "short_ids": True,
            },
        ),
        (
            "phi4_mini",
            "<|tool_call|>",
            {
                "section_begin": "<|tool_call|>[",
                "call": '{"name": "$NAME", "arguments": $ARGUMENTS}',
                "separator": ", ",
                "section_end": "]<|/tool_call|>",
            },
        ),
        (
            "function_gemma",
            "<start_function_call>",
            {
                "call": "<start_function_call>call:$NAME{$ARGUMENTS}<end_function_call>",
                "arguments": {
                    "parameter": "$KEY:$VALUE",
                    "separator": ",",
                    "quote": "<escape>",
                    "python": False,
                },
                "separator": "",
            },
        ),
        (
            "qwen3_coder",
            "<tool_call>",
            {
                "call": "<tool_call>\n<function=$NAME>\n$ARGUMENTS</function>\n</tool_call>",
                "arguments": {
                    "parameter": "<parameter=$KEY>\n$VALUE\n</parameter>\n",
                    "separator": "",
                    "quote": "",
                    "python": True,
                },
                "separator": "\n",
            },
        ),
        (
            "minicpm5",
            "<function",
            {
                "call": '<function name="$NAME">$ARGUMENTS</function>',
                "arguments": {
                    "parameter": '<param name="$KEY">$VALUE</param>',
                    "separator": "",
                    "quote": "",
                    "python": True,
                    "cdata": True,
                },
                "separator": "",
            },
        ),
        (
            "lfm2",
            "<|tool_call_start|>",
            {
                "section_begin": "<|tool_call_start|>[",
                "call": "$NAME($ARGUMENTS)",
                "arguments": {
                    "parameter": "$KEY=$VALUE",
                    "separator": ", ",
                    "quote": '"',
                    "python": True,
                },
                "separator": ", ",
                "section_end": "]<|tool_call_end|>",
            },
        ),
        (
            "glm",
            "<tool_call>",
            {
                "call": "<tool_call>$NAME$ARGUMENTS</tool_call>",
                "arguments": {
                    "parameter": "<arg_key>$KEY</arg_key>\n<arg_value>$VALUE</arg_value>",
                    "separator": "",
                    "quote": "",
                    "python": False,
                },
                "separator": "\n",
            },
        ),
        (
            "minimax",
            "<minimax:tool_call>",
            {
                "section_begin": "<minimax:tool_call>",
                "call": '\n<invoke name="$NAME">\n$ARGUMENTS</invoke>',
                "arguments": {
                    "parameter": '<parameter name="$KEY">$VALUE</parameter>\n',
                    "separator": "",
                    "quote": "",
                    "python": False,
                },
                "separator": "",
                "section_end": "\n</minimax:tool_call>",
            },
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜>",
            {
                "section_begin": "<｜tool▁calls▁begin｜>",
                "call": "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGUMENTS<｜tool▁call▁end｜>",
                "separator": "",
                "section_end": "<｜tool▁calls▁end｜>",
                "text_arguments": True,
            },
        ),
    ],
)
def test_a_format_is_found_in_the_template(
    name: str, trigger: str, expected: dict[str, object]
) -> None:
    found = derive(name)
    assert found.to_json() == expected
    assert found.trigger == trigger
    assert ToolFormat.from_json(found.to_json()) == found


def test_ids_are_as_the_template_takes_them() -> None:
    call_ids = {name: derive(name).new_call_id("f", 0) for name in ("hermes", "mistral_old")}
    assert call_ids["hermes"].startswith("call_")
    assert len(call_ids["mistral_old"]) == 9
    assert call_ids["mistral_old"].isalnum()
    assert len({derive("hermes").new_call_id("f", 0) for _ in range(100)}) == 100


def test_arguments_that_a_template_wants_as_text() -> None:
    source = (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")
    # String concatenation, which fails on an object.
    source = source.replace("call.function.arguments | tojson +", "call.function.arguments +")
    found = derive_format(ChatTemplate(source, name="m"))
    assert found is not None
    assert found.text_arguments
    assert found.call == HERMES_CALL


def test_special_tokens_among_the_tags_are_known_by_their_ids() -> None:
    special = {"<s>": 1, "<start_function_call>": 7, "<escape>": 8, "<think>": 9}
    gemma = derive("function_gemma").with_special(special)
    assert gemma.special_ids == {"<start_function_call>": 7, "<escape>": 8}
    marks = ThinkingMarks.derive(template("qwen3"))
    assert marks is not None
    assert marks.with_special(special) == ThinkingMarks("<think>", "</think>", {"<think>": 9})


@pytest.mark.parametrize(
    "source",
    [
        None,
        (TEMPLATES / "no_tools.jinja").read_text(encoding="utf-8"),
        # Knows tools, but not how they are called.
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        # Writes calls for whatever the model was not told of.
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
        "{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_model_whose_template_knows_no_tools_has_no_format(source: str | None) -> None:
    assert derive_format(ChatTemplate(source, name="m")) is None


# Each costs what a template may at most, or writes what a careless reader takes long for.
HOSTILE = [
    "{% for i in range(100000000) %}x{% endfor %}",
    "{{ tools | tojson }}{% for i in range(90000) %}{{ messages | tojson }}{% endfor %}",
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{% for i in range(3000) %}{{ '{' }}{% endfor %}{{ c | tojson }}{% endfor %}{% endfor %}",
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{% for i in range(90) %}zkey_a735191zkey_b{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    "{% for i in range(20000) %}<a> {% endfor %}{{ m.reasoning }}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_costs_bounded_work(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_renderings = 0
    render = ChatTemplate.render

    def counted(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return render(self, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    # What it finds does not matter. Quadratic work on what these write would take minutes.
    derive_format(ChatTemplate(source, name="m"))
    assert num_renderings <= 30


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ("<think>", "</think>")),
        ("qwq", ("<think>", "</think>")),
        ("magistral", ("[THINK]", "[/THINK]")),
        ("glm", ("<think>", "</think>")),
        ("minimax", ("<think>", "</think>")),
        ("hermes", None),
        ("llama", None),
        ("function_gemma", None),
    ],
)
def test_thinking_marks_are_found(name: str, expected: tuple[str, str] | None) -> None:
    marks = ThinkingMarks.derive(template(name))
    assert (marks and (marks.begin, marks.end)) == expected


@pytest.mark.parametrize(
    ("name", "variables", "opened"),
    [
        ("qwq", {}, True),
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
    ],
)
def test_a_prompt_may_open_the_thinking(
    name: str, variables: dict[str, object], opened: bool
) -> None:
    marks = ThinkingMarks.derive(template(name))
    assert marks is not None
    assert marks.opened_by(template(name).render([USER], variables=variables)) is opened


def test_tools_and_variables_reach_the_template() -> None:
    chat = ChatTemplate("{{ tools | tojson }} {{ reasoning_effort }}", name="m")
    shown = chat.render([USER], tools=[{"x": 1}], variables={"reasoning_effort": "low"})
    assert shown == '[{"x": 1}] low'
    assert chat.render([USER], tools=[]) == "null "


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_variables_do_not_replace_the_servers_own(name: str) -> None:
    chat = ChatTemplate("{{ tools }}", name="m", tokens={"bos_token": "<s>"})
    with pytest.raises(ValidationError, match=f"variable '{name}' itself") as caught:
        chat.render([USER], variables={name: 1})
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "call"),
        ({"call": "$NAME"}, "must have .NAME and .ARGUMENTS once"),
        ({"call": "$ARGUMENTS $NAME "}, "before"),
        ({"call": "$NAMEx$ARGUMENTS"}, "NAME must be followed"),
        ({"call": "<$NAME>$ARGUMENTS", "surprise": 1}, "surprise"),
        ({"call": "<$NAME>$ARGUMENTS", "arguments": {"parameter": "$KEY=$VALUE;"}}, "ARGUMENTS"),
        ({"call": "<$NAME>$ARGUMENTS<", "arguments": {"parameter": "$KEY$VALUE;"}}, "KEY"),
        ({"call": "<$NAME>$ARGUMENTS<", "arguments": {"parameter": "$KEY=$VALUE"}}, "VALUE"),
    ],
)
def test_a_manifest_may_not_describe_what_cannot_be_read(
    value: dict[str, object], reason: str
) -> None:
    with pytest.raises(BundleError, match=reason):
        ToolFormat.from_json(value)


def bundle_with(folder: Path, template_name: str, **manifest: object) -> Path:
    """The starter bundle, of the causal graph only, with a chat template."""
    path = folder / "bundle"
    shutil.copytree(STARTER, path)
    (path / FULL_MANIFEST).unlink()
    shutil.copyfile(TEMPLATES / f"{template_name}.jinja", path / CHAT_TEMPLATE)
    original = load_bundle("starter", path).manifest
    files = hash_files(path, [*original.files, CHAT_TEMPLATE])
    write_manifest(path, original.model_copy(update={"files": files, **manifest}))
    return path


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.main(["inspect", str(path), "--json"]) == 0
    shown: dict[str, object] = json.loads(capsys.readouterr().out)
    return shown


def test_inspect_shows_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle_with(tmp_path, "qwen3")
    shown = inspected(path, capsys)
    assert shown["tool_format"] == {"call": HERMES_CALL, "separator": "\n"}
    assert shown["thinking_marks"] == ["<think>", "</think>"]
    assert cli.main(["inspect", str(path)]) == 0
    assert "$ARGUMENTS" in capsys.readouterr().out


def test_the_manifest_has_the_last_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"call": "<call>$NAME $ARGUMENTS</call>", "separator": "\n"}
    path = bundle_with(tmp_path, "qwen3", tool_format=own, thinking_marks=("<r>", "</r>"))
    shown = inspected(path, capsys)
    assert shown["tool_format"] == own
    assert shown["thinking_marks"] == ["<r>", "</r>"]


def test_a_response_template_tells_what_the_chat_template_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {
        "open_pattern": r"<call>(?P<name>\w+)",
        "close": "</call>",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    thoughts = {"open": "<r>\n", "close": "</r>", "content": "text"}
    spec = {"fields": {"tool_calls": call, "thinking": thoughts}}
    shown = inspected(bundle_with(tmp_path / "a", "no_tools", response_template=spec), capsys)
    assert shown["tool_format"] == {"call": "<call>$NAME$ARGUMENTS</call>"}
    assert shown["thinking_marks"] == ["<r>", "</r>"]
    shown = inspected(bundle_with(tmp_path / "b", "qwen3", response_template=spec), capsys)
    assert shown["tool_format"] == {"call": HERMES_CALL, "separator": "\n"}
    assert shown["thinking_marks"] == ["<think>", "</think>"]


def test_a_wrong_format_in_the_manifest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundle_with(tmp_path, "qwen3", tool_format={"call": "$NAME"})
    assert cli.main(["inspect", str(path)]) == 1
    assert "the manifest's tool_format: call must have" in capsys.readouterr().err
