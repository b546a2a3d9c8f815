"""Which calls the results of Ollama's conversations belong to: those need no ids."""

from typing import Any

from maskdial.dialects.ollama.messages import MessageBody, conversation


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}, **fields}


def answered(*messages: dict[str, Any]) -> list[str]:
    bodies = [MessageBody.model_validate({"content": "", **each}) for each in messages]
    return [each.tool_call_id for each in conversation(bodies) if each.role == "tool"]


def test_results_by_name_by_order_and_by_id() -> None:
    calls = [call("a"), call("b"), call("a"), call("c", id="own")]
    assert answered(
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "a"},
        {"role": "tool"},
        {"role": "tool", "tool_call_id": "own"},
        {"role": "tool", "tool_name": "a"},
        {"role": "tool", "tool_name": "a"},
        {"role": "tool"},
    ) == ["call_0", "call_1", "own", "call_2", "", ""]


def test_a_turn_may_use_an_earlier_id_again() -> None:
    turn = {"role": "assistant", "tool_calls": [call("a", id="0")]}
    assert answered(turn, {"role": "tool"}, turn, {"role": "tool", "tool_name": "a"}) == ["0", "0"]


def test_many_results_of_other_names() -> None:
    """They would take minutes if each looked at all calls."""
    turn = {"role": "assistant", "tool_calls": [call("a")] * 30_000}
    results = [{"role": "tool", "tool_name": "b"}] * 30_000
    assert answered(turn, *results) == [""] * 30_000
