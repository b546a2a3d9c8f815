"""What templates are given of a conversation: calls with their results, and roles that they take.

The large inputs would take minutes if time grew with their square.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from maskdial.causal.chat.history import render_messages
from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.chat.roles import RoleRules
from maskdial.causal.tools import ReplyFormat, ToolFormat
from maskdial.causal.tools.format import ArgumentList

JSON = '{"name": "$NAME", "arguments": $ARGUMENTS}'
ONE_A_TURN = ToolFormat(JSON)
SEVERAL = ToolFormat(JSON, separator="\n")
BY_ID = ToolFormat("$ID $ARGUMENTS", separator="", id_form="functions.$NAME:$INDEX")
UNTOLD_BY_INDEX = ToolFormat("$NAME#$INDEX$ARGUMENTS", separator="", untold=True)
UNTOLD_LIST = ToolFormat(
    "$NAME($ARGUMENTS)",
    arguments=ArgumentList("$KEY=$VALUE", ", ", quote='"', python=True),
    separator=", ",
    untold=True,
)


def calls(*named: tuple[str, str]) -> ChatMessage:
    found = tuple(ToolCall(call_id, name, "{}") for call_id, name in named)
    return ChatMessage("assistant", "", tool_calls=found)


def result(call_id: str, text: str) -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id=call_id)


def rendered(form: ToolFormat, *messages: ChatMessage) -> list[Any]:
    return list(render_messages(messages, ReplyFormat(form, None)))


def test_a_result_belongs_to_the_nearest_call_with_its_id() -> None:
    """Some models and clients number the calls of each turn from 0."""
    messages = (
        calls(("0", "a"), ("1", "b")),
        result("1", "B1"),
        result("0", "A1"),
        calls(("0", "c"), ("1", "d")),
        result("0", "A2"),
        result("1", "B2"),
        calls(("0", "e")),
        result("0", "A3"),
    )
    told = rendered(ONE_A_TURN, *messages)
    texts = [each["tool_calls"][0]["function"]["name"] if "tool_calls" in each else each["content"]
             for each in told]  # fmt: skip
    assert texts == ["a", "A1", "b", "B1", "c", "A2", "d", "B2", "e", "A3"]
    names = [each["name"] for each in told if each["role"] == "tool"]
    assert names == ["a", "b", "c", "d", "e"]
    several = rendered(SEVERAL, *messages)
    assert [each.get("name") for each in several] == [None, "b", "a", None, "c", "d", None, "e"]


def test_ids_that_the_template_makes_are_those_of_the_results() -> None:
    told = rendered(BY_ID, calls(("0", "a")), result("0", "A"), calls(("0", "b")), result("0", "B"))
    assert [each["tool_call_id"] for each in told if each["role"] == "tool"] == [
        "functions.a:0",
        "functions.b:1",
    ]
    assert [each["tool_calls"][0]["id"] for each in told if "tool_calls" in each] == [
        "functions.a:0",
        "functions.b:1",
    ]


def test_calls_of_a_turn_with_one_id_have_their_results_in_order() -> None:
    told = rendered(ONE_A_TURN, calls(("x", "a"), ("x", "b")), result("x", "A"), result("x", "B"))
    assert [each.get("name", "") + each["content"] for each in told] == ["", "aA", "", "bB"]


def test_results_without_a_call_stay_where_they_are() -> None:
    told = rendered(ONE_A_TURN, result("x", "A"), calls(("x", "a"), ("y", "b")), result("z", "C"))
    assert [each["content"] for each in told] == ["A", "", "", "C"]
    assert told[0]["tool_call_id"] == "x"
    assert "name" not in told[0]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Paris", "days": ', {"city": "Paris"}),
        ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}),
        ("no json", {}),
        ("[1, 2]", {}),
    ],
)
def test_a_broken_call_with_a_result_stays_a_call(written: str, read: dict[str, Any]) -> None:
    """Templates refuse a result behind no call, or leave it out."""
    broken = ChatMessage("assistant", "", tool_calls=(ToolCall("x", "a", written),))
    told = rendered(ONE_A_TURN, broken, result("x", "it is no JSON"))
    assert told[0]["tool_calls"][0]["function"] == {"name": "a", "arguments": read}
    (alone,) = rendered(ONE_A_TURN, broken)
    assert alone["content"] == f'{{"name": "a", "arguments": {written}}}'


def test_an_id_of_many_digits() -> None:
    (told,) = rendered(UNTOLD_BY_INDEX, calls(("1" * 300_000 + "x", "a"), ("call_23", "b")))
    assert told["content"] == "a#{}b#23{}"


def test_placeholders_in_arguments_are_text() -> None:
    arguments = {"$VALUE" * 3: "$KEY", "$KEY$NAME": "$VALUE$ARGUMENTS"}
    call = ToolCall("call_0", "a", json.dumps(arguments))
    (told,) = rendered(UNTOLD_LIST, ChatMessage("assistant", "", tool_calls=(call,)))
    assert told["content"] == ('a($VALUE$VALUE$VALUE="$KEY", $KEY$NAME="$VALUE$ARGUMENTS")')


STRICT = RoleRules(system=True, later_system=False, repeated_user=False)


def said(rules: RoleRules, *messages: tuple[str, str]) -> list[tuple[str, str]]:
    given = [{"role": role, "content": content} for role, content in messages]
    return [(each["role"], each["content"]) for each in rules.applied(given)]


def test_roles_that_a_template_does_not_take() -> None:
    assert said(
        STRICT, ("system", "a"), ("system", "b"), ("user", "c"), ("user", "d"), ("system", "e"),
        ("assistant", "f"), ("system", "g"), ("user", "h"),
    ) == [
        ("system", "a\n\nb"), ("user", "c\n\nd\n\ne"), ("assistant", "f"), ("user", "g\n\nh"),
    ]  # fmt: skip
    none = RoleRules(system=False, later_system=False)
    assert said(none, ("system", "a"), ("system", "b"), ("user", "c"), ("user", "d")) == [
        ("user", "a\n\nb\n\nc"),
        ("user", "d"),
    ]


def writes_all(messages: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(each["content"] for each in messages)


def last_system_alone(messages: Sequence[Mapping[str, Any]]) -> str:
    """As DeepSeek R1's template."""
    systems = [each for each in messages if each["role"] == "system"]
    return writes_all([*systems[-1:], *(each for each in messages if each["role"] != "system")])


def system_in_the_last(messages: Sequence[Mapping[str, Any]]) -> str:
    """As Mistral Nemo's: it is within the last message, if that is a user's."""
    written = messages[-1]["role"] == "user"
    return writes_all([each for each in messages if written or each["role"] != "system"])


def no_results(messages: Sequence[Mapping[str, Any]]) -> str:
    """As Phi 3's."""
    return writes_all([each for each in messages if each["role"] != "tool"])


def results_of_calls(messages: Sequence[Mapping[str, Any]]) -> str:
    """As gpt-oss's, which fails on others."""
    called = [bool(each.get("tool_calls")) for each in messages]
    for index, each in enumerate(messages):
        if each["role"] == "tool" and not called[index - 1]:
            return ""
    return writes_all(messages)


def results_of_their_calls(messages: Sequence[Mapping[str, Any]]) -> str:
    """As Gemma 4's, which fails on results with another id."""
    asked = {call["id"] for each in messages for call in each.get("tool_calls", ())}
    known = all(each["tool_call_id"] in asked for each in messages if each["role"] == "tool")
    return results_of_calls(messages) if known else ""


def no_calls(messages: Sequence[Mapping[str, Any]]) -> str:
    """As Kimi K2's, which fails on calls, as the sandbox lets no template change a list."""
    return "" if any(each.get("tool_calls") for each in messages) else writes_all(messages)


def texts_as_arguments(messages: Sequence[Mapping[str, Any]]) -> str:
    """As DeepSeek's, which fails on mappings."""
    found = (call for each in messages for call in each.get("tool_calls", ()))
    texts = all(isinstance(each["function"]["arguments"], str) for each in found)
    return writes_all(messages) if texts else ""


@pytest.mark.parametrize(
    ("render", "rules"),
    [
        (writes_all, RoleRules()),
        (last_system_alone, RoleRules(later_system=False)),
        (system_in_the_last, RoleRules(system_with_result=False, later_system=False)),
        (no_results, RoleRules(results=False, other_results=False, stray_results=False)),
        (results_of_calls, RoleRules(stray_results=False)),
        (results_of_their_calls, RoleRules(other_results=False, stray_results=False)),
        (no_calls, RoleRules(results=False, other_results=False)),
        (texts_as_arguments, RoleRules()),
        (lambda _: "", RoleRules()),
    ],
)
def test_what_a_template_takes_is_learned(render: Any, rules: RoleRules) -> None:
    assert RoleRules.learned(render) == rules


def test_results_that_a_template_does_not_take_are_a_users() -> None:
    called: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"id": "0"}]}
    of_call = {"role": "tool", "content": "b", "tool_call_id": "0", "name": "f"}
    stray = {"role": "tool", "content": "c", "tool_call_id": "1"}
    user = {"role": "user", "content": "d"}
    messages = [called, of_call, stray, user]
    assert RoleRules().applied(messages) == messages
    found = RoleRules(other_results=False, repeated_user=False).applied(messages)
    assert found == [called, of_call, {"role": "user", "content": "c\n\nd"}]
    none = RoleRules(results=False, other_results=False).applied(messages)
    assert none == [called, *({"role": "user", "content": each} for each in "bcd")]


def test_a_result_of_a_turn_with_calls_is_not_stray() -> None:
    """Whatever its id is: Mistral's templates read none, and take no user's message there."""
    called: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"id": "0"}]}
    system, other = {"role": "system", "content": "a"}, {"role": "tool", "content": "b"}
    user = {"role": "user", "content": "c"}
    applied = RoleRules(stray_results=False).applied
    assert applied([called, system, other, user]) == [called, system, other, user]
    assert applied([called, user, other]) == [called, user, {"role": "user", "content": "b"}]


def test_a_system_message_that_a_result_would_hide_is_in_the_users_last() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "0"}]}
    of_call = {"role": "tool", "content": "d", "tool_call_id": "0"}
    first = [{"role": "system", "content": each} for each in "ab"]
    turn: list[Mapping[str, Any]] = [{"role": "user", "content": "c"}, called, of_call]
    rules = RoleRules(system_with_result=False)
    assert rules.applied([*first, *turn]) == [{"role": "user", "content": "a\n\nb\n\nc"}, *turn[1:]]
    later = [*turn, {"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}]
    joined = {"role": "system", "content": "a\n\nb"}
    assert rules.applied([*first, *later]) == [joined, *later]
    assert rules.applied([*first, *later, *turn[1:]]) == [
        *later[:-1], {"role": "user", "content": "a\n\nb\n\nf"}, *turn[1:]
    ]  # fmt: skip
    assert rules.applied(turn) == turn
    assert rules.applied([first[0], of_call]) == [first[0], of_call]
    assert rules.applied([]) == []


@pytest.mark.parametrize("last", [("user", "e"), ("assistant", "e")])
def test_calls_and_their_results_stay_together(last: tuple[str, str]) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "0"}, {"id": "1"}]}
    messages: Sequence[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        called,
        {"role": "system", "content": "b"},
        {"role": "tool", "content": "c"},
        {"role": "tool", "content": "d"},
        {"role": last[0], "content": last[1]},
    ]
    applied = RoleRules(later_system=False).applied(messages)
    assert [(each["role"], each["content"]) for each in applied] == [
        ("user", "a"),
        ("assistant", ""),
        ("tool", "c"),
        ("tool", "d\n\nb"),
        last,
    ]
    assert RoleRules(later_system=False).applied(messages[:3])[2:] == [
        {"role": "user", "content": "b"}
    ]


def test_many_messages_of_one_role() -> None:
    texts = ["word " * 30] * 100_000
    for role in ("system", "user"):
        ((_, content),) = said(STRICT, *((role, text) for text in texts))
        assert content == "\n\n".join(texts)
