"""Where the next prompt of a conversation parts from this one, as the template writes both."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from maskdial.causal.chat.history import render_messages
from maskdial.causal.chat.message import ChatMessage
from maskdial.causal.chat.template import ChatTemplate, Rendered
from maskdial.causal.tools import ReplyFormat

# As Qwen3's: what the assistant thought before the user's last message is left out.
DROPS = """
{%- if tools %}{{ '[' ~ (tools | tojson) ~ ']' }}{% endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
<{{ m.role }}>
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.user -%}
(thinks {{ m.reasoning_content }})
{%- endif -%}
{{ m.content }}</>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
# The tools stand before the user's last message, wherever that is, as in early Mistrals.
MOVES = """
{%- for m in messages -%}
{%- if loop.last and tools %}{{ '[' ~ (tools | tojson) ~ ']' }}{% endif -%}
<{{ m.role }}>{{ m.content }}</>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
PARTS = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}</>{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]

Message = Mapping[str, Any]


def message(role: str, content: str, **fields: object) -> Message:
    return {"role": role, "content": content, **fields}


SYSTEM, FIRST, SECOND = message("system", "Be."), message("user", "One"), message("user", "Two")
ANSWER = message("assistant", "Yes", reasoning_content="hm")
RESULT = message("tool", "42", tool_call_id="a")


@pytest.fixture
def rendered(request: pytest.FixtureRequest) -> Iterator[Any]:
    templates = []

    def render(source: str, messages: Sequence[Message], **options: Any) -> Rendered:
        template = ChatTemplate(source, name="m")
        templates.append(template)
        found = template.submit_with_borders(messages, **options).result()
        assert found.text == template.render(messages, **options)
        return found

    yield render
    for template in templates:
        template.close()


def before(found: Rendered) -> list[str]:
    """The pieces of a prompt between its borders."""
    ends = [*found.borders, len(found.text)]
    return [found.text[i:j] for i, j in zip([0, *ends], ends, strict=False) if i < j]


def test_a_first_turn(rendered: Any) -> None:
    found = rendered(DROPS, [SYSTEM, FIRST], tools=TOOLS)
    tools = '[[{"type": "function", "function": {"name": "f"}}]]'
    assert before(found) == [tools + "<system>Be.</><user>", "One</>", "<assistant>"]
    assert found.borders[-1] == len(found.text)  # the next turn begins with all of this


def test_what_was_thought_in_this_turn_is_not_in_the_next(rendered: Any) -> None:
    """After calls, the prompt has thoughts; the next turn's parts from it where they begin."""
    messages = [SYSTEM, FIRST, ANSWER, SECOND, ANSWER, RESULT]
    found = rendered(DROPS, messages)
    assert before(found) == [
        "<system>Be.</><user>",
        "One</><assistant>Yes</><user>",
        "Two</><assistant>",
        "(thinks hm)Yes</><tool>42</>",
        "<assistant>",
    ]


def test_the_next_turn_really_parts_there(rendered: Any) -> None:
    turn = [SYSTEM, FIRST, ANSWER, RESULT]
    found = rendered(DROPS, turn)
    following = rendered(DROPS, [*turn, ANSWER, SECOND]).text
    parting = next(
        i for i, (one, other) in enumerate(zip(found.text, following, strict=False)) if one != other
    )
    assert parting in found.borders
    assert parting == found.text.index("(thinks")


def test_what_moves_with_the_last_message(rendered: Any) -> None:
    found = rendered(MOVES, [SYSTEM, FIRST, ANSWER, SECOND], tools=TOOLS)
    following = rendered(MOVES, [SYSTEM, FIRST, ANSWER, SECOND, ANSWER, FIRST], tools=TOOLS).text
    end = max(b for b in found.borders if found.text[:b] == following[:b])
    assert found.text[end] == "["  # where the tools were


def test_where_a_client_says_so(rendered: Any) -> None:
    """A hint is at the end of a message: what follows begins otherwise. No template sees it."""
    said = [
        ChatMessage("user", "One", ends_prefix=True),
        ChatMessage("assistant", "Yes"),
        ChatMessage("user", "Two"),
        ChatMessage("assistant", "Well"),
        ChatMessage("user", "Three"),
    ]
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    given = render_messages(said, ReplyFormat(None, None))
    plain = [{k: m[k] for k in ("role", "content")} for m in given]
    found, unmarked = rendered(source, given), rendered(source, plain)
    assert found.text == unmarked.text
    assert set(found.borders) - set(unmarked.borders) == {found.text.index("Yes")}


def test_contents_in_parts(rendered: Any) -> None:
    found = rendered(PARTS, [SYSTEM, FIRST])
    assert found.borders[0] == found.text.index("One")


def test_a_template_that_fails_on_another_conversation(rendered: Any) -> None:
    """It has no border there, and the prompt is what it is."""
    source = (
        "{% for m in messages %}{% if m.content != 'One' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    found = rendered(source, [FIRST])
    assert found.text == "One>"
    assert found.borders == (3,)


def test_a_continued_message(rendered: Any) -> None:
    found = rendered(DROPS, [FIRST, message("assistant", "Well, ")], continue_final_message=True)
    assert found.text.endswith("Well, ")
    assert found.borders[0] == found.text.index("One")
    assert max(found.borders) <= len(found.text)
