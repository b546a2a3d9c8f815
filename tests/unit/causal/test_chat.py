"""Chat templates: what they may do, what they may not, and what is said when they fail."""

import contextlib
import dataclasses
import shutil
import threading
from datetime import datetime
from pathlib import Path

import psutil
import pytest

import maskdial
from maskdial.bundle.bundle import hash_files, load_bundle, write_manifest
from maskdial.bundle.manifest import CHAT_TEMPLATE
from maskdial.causal.chat import template as chat
from maskdial.causal.chat.renderer import MAX_CHARACTERS
from maskdial.causal.chat.template import ChatTemplate, TemplateFacts
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import BundleError, OverloadedError, UnavailableError, ValidationError

STARTER = Path(maskdial.__file__).parent / "starter" / "hybrid"
USER = {"role": "user", "content": "Hi <b>you</b>"}
CHAT = [USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on."}]


def render(source: str, messages: list[dict[str, str]] | None = None) -> str:
    template = ChatTemplate(source, name="m", tokens={"bos_token": "<s>"})
    return template.render([USER] if messages is None else messages)


def bundle_with(folder: Path, content: bytes | None) -> ChatTemplate:
    """The template of a bundle that holds ``content`` as its chat template, or none."""
    path = folder / "bundle"
    shutil.copytree(STARTER, path)
    manifest = load_bundle("starter", path).manifest
    if content is not None:
        (path / CHAT_TEMPLATE).write_bytes(content)
        hashes = hash_files(path, [*manifest.files, CHAT_TEMPLATE])
        write_manifest(path, manifest.model_copy(update={"files": hashes}))
    return ChatTemplate.from_bundle(
        load_bundle("mine", path), tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi <b>you</b>"),
        (
            "{{ eos_token is defined }} {{ tools is none }} {{ documents is none }}",
            "False True True",
        ),
        ("{% if add_generation_prompt %}\nassistant:\n{% endif %}\n", "assistant:\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>you</b>"}]'),
        ("{{ 'é' | tojson }} {{ 'é' | tojson(ensure_ascii=True) }}", '"é" "\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "1"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        (
            "{{ dict(a=1).a }}{{ dict.fromkeys('a', 2).a }}{{ [1] * 2 }}{{ 2 ** 10 }}",
            "12[1, 1]1024",
        ),
        ("{% for _ in nobody %}x{% else %}none{% endfor %}{{ messages[3] }}", "none"),
        ("", ""),
    ],
)
def test_a_template_finds_what_transformers_gives_it(source: str, expected: str) -> None:
    assert render(source) == expected


def test_loops_know_their_place() -> None:
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}"
        "{{ ' last' if loop.last }} {{ loop.previtem.content if loop.previtem }};{% endfor %}"
    )
    assert render(source, CHAT) == "1/2 ;2/2 last Hi <b>you</b>;"


def test_the_date_is_todays() -> None:
    before = f"{datetime.now():%d %B %Y}"
    rendered = render("{{ strftime_now('%d %B %Y') }}")
    assert rendered in (before, f"{datetime.now():%d %B %Y}")


def test_messages_are_not_the_templates_to_change() -> None:
    messages = [dict(USER)]
    with pytest.raises(ValidationError, match=r"append.*unsafe"):
        render("{{ messages.append(1) }}", messages)
    with pytest.raises(ValidationError, match=r"update.*unsafe"):
        render("{{ messages[0].update(role='system') }}", messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must\\n alternate') }}", "fails on them: Roles must alternate"),
        ("{{ raise_exception('') }}", "fails on them: TemplateError"),
        ("{{ raise_exception('x' * 1000) }}", r"x{300}\.\.\.$"),
        ("{{ nobody.name }}", "'nobody' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for _ in 5 %}{% endfor %}", "not iterable"),
        ("{% include 'other' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''['__class__'].x }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "begins with _"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "begins with _"),
        ("{{ dict.update(messages[0], role='x') }}", "no attribute 'update'"),
        ("{{ lipsum(n=10 ** 9) }}", "'lipsum' is undefined"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_failing_template_is_a_sentence(source: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        render(source)
    assert caught.value.message.startswith("the chat template of model 'm' fails on")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for _ in range(10 ** 9) %}{% endfor %}", "Range too big"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1,000,000 steps",
        ),
        (
            "{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            # Its steps are calls: on a slow machine the seconds end before them.
            "more than (1,000,000 steps|2 s)",
        ),
        (
            "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
            "RecursionError",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (
            "{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
            "writes more than 10,000,000 characters",
        ),
        ("{{ 'x' * 10 ** 12 }}", "writes more than"),
        ("{{ 10 ** 12 * ['x'] }}", "writes more than"),
        ("{{ 9 ** (9 ** 9) }}", "4,096 bits"),
        (
            "{% set ns = namespace(n=9) %}"
            "{% for _ in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
            "4,096 bits",
        ),
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        # A text joined to itself, and lists of lists, double with every step.
        "{% set ns = namespace(x='x' * 1000) %}{% for _ in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x | length }}",
        "{% set ns = namespace(x=[1]) %}{% for _ in range(40) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}{{ ns.x | length }}",
        "{{ ('x' * 9999999).join('y' * 9999999) | length }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%0*d' % (2000000000, 1) }}",
        "{{ '{:>2000000000}'.format(1) | length }}",
        "{{ [messages] | tojson(indent=2000000000) }}",
        "{{ 'x'.center(2000000000) | length }}",
        "{{ 'x' | indent(2000000000) | length }}",
    ],
)
def test_memory_that_no_count_sees_is_limited(source: str) -> None:
    with pytest.raises(ValidationError, match=r"takes too much|more than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for _ in range(100) %}{% set x = range(99999) | map('string') | sort %}{% endfor %}",
        "{% for _ in range(9999) %}{% set x = ('a' * 9999999).find('b') %}{% endfor %}",
        "{% for _ in range(9999) %}{% set x = ('a' * 999999) | upper | lower %}{% endfor %}",
    ],
)
def test_time_that_no_count_sees_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMITS", dataclasses.replace(chat.LIMITS, cpu_seconds=0.5))
    template = ChatTemplate(source, name="m")
    try:
        with pytest.raises(ValidationError, match=r"fails on them: it takes more than 0\.5 s"):
            template.render([USER])
    finally:
        template.close()


def test_a_template_that_was_slow_once_renders_the_next_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "LIMITS", dataclasses.replace(chat.LIMITS, cpu_seconds=0.5))
    source = "{% if messages[0].content == 'spin' %}{% for _ in range(9999) %}"
    source += "{% set x = ('a' * 9999999).find('b') %}{% endfor %}{% endif %}fine"
    template = ChatTemplate(source, name="m")
    with pytest.raises(ValidationError, match=r"more than 0\.5 s"):
        template.render([{"role": "user", "content": "spin"}])
    assert template.render([USER]) == "fine"
    template.close()


def test_a_child_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("fine", name="m")
    before = set(psutil.Process().children())
    assert template.render([USER]) == "fine"
    for child in before:
        child.kill()
    with contextlib.suppress(UnavailableError):  # if it died with the question
        template.render([USER])
    assert template.render([USER]) == "fine"
    template.close()


def test_more_conversations_than_can_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_WAITING", 2)
    template = ChatTemplate("{{ messages[0].content }}", name="m")
    held = threading.Event()
    template._rendering.submit(held.wait)
    token = usage_of_request.set(ClientUsage("a client"))
    first, second = (template.submit([{"content": text}]) for text in "ab")
    with pytest.raises(OverloadedError, match="2 conversations wait"):
        template.submit([USER])
    usage_of_request.reset(token)
    third = template.submit([{"content": "d"}])  # of this process, whom nobody refuses
    held.set()
    assert [each.result(30) for each in (first, second, third)] == ["a", "b", "d"]
    assert template.render([{"content": "c"}]) == "c"
    template.close()


def test_facts_and_prompts_that_are_asked_for_at_once_are_not_mixed_up() -> None:
    slow = "{% for i in range(9999) %}{% endfor %}"
    template = ChatTemplate("{{ messages[0].content }}<end>" + slow, name="m")
    texts = [str(number) for number in range(20)]
    rendering = [template.submit([{"content": text}]) for text in texts]
    facts = []
    while not all(each.done() for each in rendering):
        facts.append(template.facts)
    assert [each.result() for each in rendering] == [f"{text}<end>" for text in texts]
    assert set(facts) == {TemplateFacts("<end>", frozenset({"messages"}))}
    template.close()


# As SmolVLM's and LLaVA's: a text is a sequence of characters there, which have no type
_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %};{% endfor %}"
)


def test_a_template_that_reads_parts_only_gets_the_text_as_one() -> None:
    assert render(_PARTS, CHAT) == "user:Hi <b>you</b>;assistant:Yes?;user:Go on.;"
    template = ChatTemplate(_PARTS, name="m")
    assert template.render(CHAT, continue_final_message=True).endswith("user:Go on.")
    template.close()


def test_a_template_that_reads_texts_too_gets_texts() -> None:
    source = "{{ messages[0].content is string }}{% if messages[0].content is string %}"
    source += "{{ messages[0].content }}{% else %}{{ messages[0].content[0].text }}{% endif %}"
    assert render(source) == "TrueHi <b>you</b>"


def test_a_template_for_tools_may_read_parts_alone() -> None:
    template = ChatTemplate("{{ messages[0].content }}", name="m", tool_source=_PARTS)
    assert template.render([USER]) == "Hi <b>you</b>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert template.render([USER], tools=[tool]) == "user:Hi <b>you</b>;"
    template.close()


def test_a_bound_that_is_met_is_not_broken() -> None:
    assert len(render(f"{{{{ 'x' * {MAX_CHARACTERS} }}}}")) == MAX_CHARACTERS
    rows = "{% for a in range(990) %}{% for b in range(990) %}{% endfor %}{% endfor %}"
    assert render(rows + "done") == "done"
    assert render(rows + "done") == "done"  # each rendering has its own steps


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if true %}", r"not a valid template: line 1: Unexpected end"),
        ("\n{{ messages | nofilter }}", r"line 2: No filter named 'nofilter'"),
        ("{{ " + "(" * 5000, "RecursionError"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested"),
    ],
)
def test_a_template_that_does_not_compile_is_a_bundle_error(source: str, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        ChatTemplate(source, name="m")


def test_a_bundles_template_is_read_with_its_tokens(tmp_path: Path) -> None:
    template = bundle_with(tmp_path, "{{ bos_token }}é{{ eos_token }}".encode())
    assert template.render([USER]) == "<s>é</s>"


def test_a_bundle_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    template = bundle_with(tmp_path, None)
    with pytest.raises(ValidationError, match=r"model 'mine' has no chat template.*as a text"):
        template.render([USER])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{% for %}"])
def test_a_bundle_with_a_bad_template_is_not_served(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BundleError, match=r"model 'mine': chat_template\.jinja is not"):
        bundle_with(tmp_path, content)
