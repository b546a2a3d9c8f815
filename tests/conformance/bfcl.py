"""The cases of the Berkeley Function Calling Leaderboard: do tools and right calls get through?

The leaderboard measures models, and the model here writes the first of the answers that the
leaderboard takes. What is tested is the server: it has to accept each case's tools and messages,
its grammar has to allow the right calls, and they have to come back as they were written. Cases of
several turns, and those that need a network, are left out.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import jsonschema

from maskdial.causal import prompts
from maskdial.causal.sequence import Sequence as Generated
from tests.agents.script import END, Call, Forced, spelled
from tests.conformance.sensible import accepts

_CALLED = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel"),
    *("parallel_multiple", "live_simple", "live_multiple", "live_parallel"),
    "live_parallel_multiple",
)
_NOT_CALLED = ("irrelevance", "live_irrelevance")
_TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object", "tuple": "array",
    "list": "array", "ArrayList": "array", "Array": "array", "Queue": "array", "Stack": "array",
    "float": "number", "double": "number", "byte": "integer", "short": "integer",
    "long": "integer", "Bigint": "integer", "bool": "boolean", "any": "string", "Any": "string",
    "String": "string", "char": "string", "integer": "integer",
}  # fmt: skip
"""What the leaderboard calls the types of JSON schemas."""
_MOST = 100  # about so many cases of a kind; all of them take a quarter of an hour
_NO_CALL = "None of these tools is of use."


def outcomes(data: Path, url: str) -> dict[str, str]:
    """Why cases failed, by their names; the empty string for those that passed.

    Args:
        data: the leaderboard's folder of cases.
        url: of the server, in this process.
    """
    found = {}
    with _written() as reply, httpx.Client(base_url=url, timeout=300) as http:
        for kind in (*_CALLED, *_NOT_CALLED):
            answers = {}
            if kind in _CALLED:
                lines = _lines(data / "possible_answer" / f"BFCL_v4_{kind}.json")
                answers = {each["id"]: each["ground_truth"] for each in lines}
            cases = [*_lines(data / f"BFCL_v4_{kind}.json")]
            for case in cases[:: max(1, len(cases) // _MOST)]:
                found[case["id"]] = _outcome(case, answers.get(case["id"]), http, reply)
    return found


def _outcome(case: Mapping[str, Any], answers: Any, http: httpx.Client, reply: list[str]) -> str:
    functions = [{**each, "parameters": _schema(each["parameters"])} for each in case["function"]]
    schemas = {each["name"]: each["parameters"] for each in functions}
    calls = [
        Call(name, _value(arguments, schemas[name]))
        for answer in answers or ()
        for name, arguments in answer.items()
    ]
    # Some right answers are not of the type that their schema says: there, nothing is called.
    if not all(_fits(call.arguments, schemas[call.name]) for call in calls):
        calls = []
    reply[:] = [
        "\n".join(spelled(call).removesuffix(END) for call in calls) + END
        if calls
        else _NO_CALL + END
    ]
    body = {
        "model": "chat",
        "messages": case["question"][0],
        "tools": [{"type": "function", "function": each} for each in functions],
        "tool_choice": "required" if calls else "auto",
    }
    answer = http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:300]}"
    message = answer.json()["choices"][0]["message"]
    got = [
        Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    text = None if calls else _NO_CALL
    return "" if got == calls and message["content"] == text else f"came as {message}"


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _schema(schema: Any) -> Any:
    """A schema with the types of JSON."""
    if isinstance(schema, list):
        return [_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _schema(value) for key, value in schema.items()}
    if isinstance(kind := schema.get("type"), str):
        changed["type"] = _TYPES.get(kind, kind if kind in _TYPES.values() else "string")
    return changed


def _value(options: Any, schema: Any) -> Any:
    """The first of the right answers, with its fields in the schema's order.

    An object has a list of the right answers for each field; ``""`` is one that leaves it out.
    """
    if isinstance(options, dict):
        parts = schema.get("properties", {}) if isinstance(schema, dict) else {}
        needed = schema.get("required", ()) if isinstance(schema, dict) else ()
        order = [key for key in dict.fromkeys((*parts, *needed, *options)) if key in options]
        given = {key: _chosen(options[key], parts.get(key)) for key in order}
        return {
            key: _value(value, parts.get(key))
            for key, value in given.items()
            if value != "" or "" not in options[key] or key in needed
        }
    if isinstance(options, list):
        return [_value(each, schema.get("items") if schema else None) for each in options]
    return options


def _chosen(options: Any, schema: Any) -> Any:
    """One of the right answers, of the schema's type if there is one."""
    if not isinstance(options, list):
        return options
    given = [each for each in options if each != ""]
    fitting = [each for each in given if _fits(_value(each, schema), schema)]
    return next(iter([*fitting, *given]), "")


def _fits(value: Any, schema: Any) -> bool:
    return schema is None or jsonschema.Draft202012Validator(schema).is_valid(value)


@contextmanager
def _written() -> Iterator[list[str]]:
    """Has every model in this process write what is put into the list, if the grammar allows it."""
    make, reply = prompts._make_sequences, [""]

    def scripted(
        request: Any, start: Any, params: Any, grammar: Any, *others: Any
    ) -> tuple[Generated, ...]:
        model = others[-1]
        ids = model.tokenizer.encode(reply[0], add_special_tokens=False).ids
        if grammar is not None and not accepts(grammar, ids):  # a case may have no tools
            raise AssertionError(f"the grammar does not allow {reply[0]}")
        forced: Any = Forced(ids, model.manifest.vocab_size)
        return make(request, start, params, forced, *others)

    with patch.object(prompts, "_make_sequences", scripted):
        yield reply
