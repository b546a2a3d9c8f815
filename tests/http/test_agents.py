"""Bodies that Claude Code, Codex and other agents send, as they send them."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.http.chat_bundles import TEMPLATES, make_chat_bundle

# Tools and calls stand in the prompt as JSON; a system message is refused but at the beginning.
FIRST_ONLY = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{{- '[' + message.role + ':' + message.content + ']' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant:' }}{%- endif %}
"""
ALTERNATING = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{{- '[' + message.role + ':' + message.content + ']' }}
{%- endfor %}
"""
IN_PLACE = """\
{%- for message in messages %}{{- '[' + message.role + ':' + message.content + ']' }}{%- endfor %}
"""
IGNORED, TOOLS_LEFT = "x-ignored-fields", "x-ignored-tools"


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("agents")
    hermes = (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")
    templates = {
        "hermes": hermes,
        "first": FIRST_ONLY,
        "alternating": ALTERNATING,
        "in_place": IN_PLACE,
    }
    models = {name: make_chat_bundle(folder / name, each) for name, each in templates.items()}
    server = start_server(models=models, slots=2)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def ask(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    reply = http.post(path, json={"model": "hermes"} | body)
    assert reply.status_code == 200, reply.text
    return reply


def refused(http: httpx.Client, path: str, **body: Any) -> str:
    reply = http.post(path, json={"model": "hermes"} | body)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


def messages(http: httpx.Client, *given: Any, **body: Any) -> httpx.Response:
    return ask(http, "/v1/messages", messages=[*given], **{"max_tokens": 1} | body)


def count(http: httpx.Client, *given: Any, **body: Any) -> int:
    reply = ask(http, "/v1/messages/count_tokens", messages=[*given], **body)
    return int(reply.json()["input_tokens"])


USER = {"role": "user", "content": "hi"}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": "d", "input_schema": {"type": "object"}, **fields}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


def apply_patch(lark: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "syntax": "lark", "definition": lark}
    return {"type": "custom", "name": "apply_patch", "description": "d", "format": grammar}


def prompt(http: httpx.Client, model: str, *given: tuple[str, str]) -> str:
    """What a template makes of a conversation."""
    body = {"messages": [{"role": role, "content": content} for role, content in given]}
    tokens = ask(http, "/tokenize", model=model, **body).json()["tokens"]
    return str(ask(http, "/detokenize", model=model, tokens=tokens).json()["prompt"])


class TestClaudeCode:
    def test_its_first_request(self, http: httpx.Client) -> None:
        reply = messages(
            http,
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "system", "content": "Be brief."},
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.b2c;"},
                {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}},
            ],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            thinking={"type": "adaptive", "display": "updates"},
            tools=[tool("Read"), tool("DeferredToolPlaceholder", defer_loading=True)],
            metadata={"user_id": "u"},
            output_config={"effort": "high"},
            max_tokens=32_000,
            stop_sequences=["e", "a", " ", "i", "o"],
        )
        told = reply.headers[IGNORED].split(", ")
        assert sorted(told) == [
            "context_management",
            "system.x-anthropic-billing-header",
            "thinking.display",
        ]
        assert reply.json()["role"] == "assistant"

    def test_a_summary_of_the_context_is_refused(self, http: httpx.Client) -> None:
        edits = {"edits": [{"type": "compact_20260112"}]}
        sentence = refused(
            http, "/v1/messages", messages=[USER], max_tokens=1, context_management=edits
        )
        assert sentence.startswith("context_management: compact_20260112 is not supported")
        for wrong in ({"edits": 3}, 3, {"edits": [3]}):
            refused(http, "/v1/messages", messages=[USER], max_tokens=1, context_management=wrong)

    def test_the_billing_line_is_no_part_of_the_prompt(self, http: httpx.Client) -> None:
        billing = "x-anthropic-billing-header: cc_version=2.1.332.b2c; cc_is_subagent=true;"
        plain = count(http, USER, system=[{"type": "text", "text": "You are."}])
        blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "You are."}]
        assert count(http, USER, system=blocks) == plain
        assert count(http, USER, system=blocks[::-1]) > plain
        for system, told in ((blocks, "system.x-anthropic-billing-header"), (blocks[::-1], None)):
            body = {"model": "hermes", "system": system, "messages": [USER], "max_tokens": 1}
            assert http.post("/v1/messages", json=body).headers.get(IGNORED) == told

    def test_tools_that_wait_are_described_where_they_are_named(self, http: httpx.Client) -> None:
        waiting = [tool("Fetch", defer_loading=True, description="Fetches a page")]
        search = tool("Search")
        alone = count(http, USER, tools=[search])
        assert count(http, USER, tools=[search, *waiting]) == alone
        found = [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "Search", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "tool_reference", "tool_name": "Fetch"}],
                    }
                ],
            },
        ]
        tools = [search, *waiting]
        assert count(http, *found, tools=tools) > count(http, *found, tools=[search])
        choice = {"type": "tool", "name": "Fetch"}
        reply = messages(http, *found, tools=tools, tool_choice=choice, max_tokens=80)
        assert reply.json()["content"][0]["name"] == "Fetch"
        # One that nobody named yet cannot be called, unless the choice names it.
        sentence = refused(
            http,
            "/v1/messages",
            messages=[USER],
            max_tokens=1,
            tools=tools,
            tool_choice={"type": "tool", "name": "Other"},
        )
        assert "no tool is named 'Other'; the tools are Search" in sentence
        messages(http, USER, tools=tools, tool_choice=choice)

    def test_a_search_that_anthropic_runs_leaves_no_tool_waiting(self, http: httpx.Client) -> None:
        waiting = tool("Fetch", defer_loading=True)
        search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
        reply = messages(http, USER, tools=[search, waiting])
        assert reply.headers[TOOLS_LEFT] == "tool_search_tool_regex_20251119"
        with_search = count(http, USER, tools=[search, waiting])
        assert with_search == count(http, USER, tools=[tool("Fetch")])

    def test_server_tools_are_left_out_unless_one_is_required(self, http: httpx.Client) -> None:
        web = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
        assert messages(http, USER, tools=[web]).headers[TOOLS_LEFT] == "web_search_20250305"
        body = {"messages": [USER], "max_tokens": 1, "tools": [web]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
            assert "no tools to call" in refused(http, "/v1/messages", **body, tool_choice=choice)

    def test_what_other_providers_left_in_a_conversation(self, http: httpx.Client) -> None:
        blocks = [
            {"type": "redacted_thinking", "data": "abc"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "a", "citations": []},
        ]
        reply = messages(http, USER, {"role": "assistant", "content": blocks}, USER)
        told = reply.headers[IGNORED].split(", ")
        assert "messages.content.redacted_thinking" in told

    def test_documents_of_text_are_text(self, http: httpx.Client) -> None:
        source = {"type": "text", "media_type": "text/plain", "data": "The king."}
        document = {"type": "document", "source": source}
        text = {"type": "text", "text": "The king."}
        counts = [count(http, {"role": "user", "content": [each]}) for each in (document, text)]
        assert counts[0] == counts[1]

    def test_images_are_left_out_of_results_and_refused_elsewhere(self, http: httpx.Client) -> None:
        image = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "x"},
        }
        called = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a.png"}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [image]}
        given = [
            USER,
            {"role": "assistant", "content": [called]},
            {"role": "user", "content": [result]},
        ]
        reply = messages(http, *given, tools=[tool("Read")])
        assert reply.headers[IGNORED] == "messages.content.image"
        body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        assert "type 'image' are not supported" in refused(http, "/v1/messages", **body)


class TestCodex:
    def test_its_first_request(self, http: httpx.Client) -> None:
        namespace = {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "d",
            "tools": [function("spawn_agent")],
        }
        reply = ask(
            http,
            "/v1/responses",
            instructions="You are.",
            input=[
                {"type": "message", "role": "developer", "content": "a"},
                {"type": "message", "role": "developer", "content": "b"},
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            ],
            tools=[
                function("exec_command", strict=False),
                namespace,
                {"type": "web_search", "external_web_access": True},
                {"type": "image_generation"},
                {"type": "local_shell"},
            ],
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"effort": "none", "summary": "auto"},
            store=False,
            stream=False,
            include=["reasoning.encrypted_content"],
            service_tier="auto",
            prompt_cache_key="k",
            client_metadata={"session_id": "x"},
            max_output_tokens=1,
        )
        assert reply.headers[TOOLS_LEFT] == "web_search, image_generation, local_shell"
        assert IGNORED not in reply.headers

    def test_a_call_says_its_namespace(self, http: httpx.Client) -> None:
        space = {"type": "namespace", "name": "mcp__files__", "tools": [function("read")]}
        choice = {"type": "function", "namespace": "mcp__files__", "name": "read"}
        body = {"input": "hi", "tools": [space], "tool_choice": choice, "max_output_tokens": 90}
        reply = ask(http, "/v1/responses", **body, seed=3).json()
        call = reply["output"][-1]
        assert (call["type"], call["name"]) == ("function_call", "read")
        assert call["namespace"] == "mcp__files__"
        assert reply["tool_choice"] == choice
        # It comes back with the conversation.
        past = {key: call[key] for key in ("type", "call_id", "name", "namespace")}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        items = [{"role": "user", "content": "hi"}, past | {"arguments": "{}"}, result]
        ask(http, "/v1/responses", input=items, tools=[space], max_output_tokens=1)

    def test_a_custom_tool_takes_a_text(self, http: httpx.Client) -> None:
        custom = {
            "type": "custom",
            "name": "apply",
            "format": {"type": "grammar", "syntax": "regex", "definition": "a{3}"},
        }
        choice = {"type": "custom", "name": "apply"}
        body = {"input": "hi", "tools": [custom], "tool_choice": choice, "max_output_tokens": 200}
        (call,) = ask(http, "/v1/responses", **body, parallel_tool_calls=False).json()["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply", "aaa")
        with http.stream(
            "POST",
            "/v1/responses",
            json={"model": "hermes", "stream": True, "parallel_tool_calls": False, **body},
        ) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
        events = [json.loads(line[6:]) for line in lines]
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds == [
            "created",
            "in_progress",
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
            "completed",
        ]
        past = [
            {"type": "custom_tool_call", "call_id": "c", "name": "apply", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ]
        ask(http, "/v1/responses", input=past, tools=[custom], max_output_tokens=1)

    def test_a_lark_grammar_is_enforced(self, http: httpx.Client) -> None:
        custom = apply_patch('start: "*** Begin" LF /["+-]{3}/ LF\n%import common.LF')
        choice = {"type": "custom", "name": "apply_patch"}
        body = {"input": "hi", "tools": [custom], "max_output_tokens": 200, "temperature": 1}
        for seed in range(3):
            reply = ask(http, "/v1/responses", **body, tool_choice=choice, seed=seed)
            assert "x-schema-warnings" not in reply.headers
            for call in reply.json()["output"]:
                assert call["type"] == "custom_tool_call"
                assert re.fullmatch(r'\*\*\* Begin\n["+-]{3}\n', call["input"])

    @pytest.mark.parametrize(
        ("grammar", "reason"),
        [
            ("start: line", 'unknown name: "line"'),
            ("start: /(/", "unclosed group"),
            ("start: <think>", "special tokens and other grammars are not part of a text"),
        ],
    )
    def test_a_grammar_that_is_wrong(self, http: httpx.Client, grammar: str, reason: str) -> None:
        body = {"input": "hi", "tools": [apply_patch(grammar)], "max_output_tokens": 1}
        message = refused(http, "/v1/responses", **body)
        assert message.startswith("tools")
        assert reason in message
        half = {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}
        message = refused(http, "/v1/responses", input="hi", tools=[half])
        assert message.endswith("definition: belongs to the type grammar, and only to that")

    def test_a_grammar_that_cannot_be_enforced_is_told(self, http: httpx.Client) -> None:
        custom = apply_patch('start: %json {"type": "integer"}')
        reply = ask(http, "/v1/responses", input="hi", tools=[custom], max_output_tokens=1)
        warning = "apply_patch: its Lark grammar is not enforced"
        assert reply.headers["x-schema-warnings"] == warning

    def test_items_of_openais_own_tools_are_left_out(self, http: httpx.Client) -> None:
        items = [
            {"role": "user", "content": "hi"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "compaction", "encrypted_content": "abc"},
            {"type": "message", "role": "assistant", "content": []},
        ]
        reply = ask(http, "/v1/responses", input=items, max_output_tokens=1)
        assert sorted(reply.headers[IGNORED].split(", ")) == [
            "input.compaction",
            "input.web_search_call",
        ]

    def test_images_are_left_out_of_results_and_refused_elsewhere(self, http: httpx.Client) -> None:
        image = {"type": "input_image", "image_url": "data:image/png;base64,x"}
        items = [
            {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image]},
        ]
        reply = ask(http, "/v1/responses", input=items, max_output_tokens=1)
        assert reply.headers[IGNORED] == "messages.content.image"
        body = {"input": [{"role": "user", "content": [image]}], "max_output_tokens": 1}
        assert "no model here reads images" in refused(http, "/v1/responses", **body)


class TestCustomTools:
    """OpenAI's tools that take a text, in `/v1/chat/completions`, with its own SDK."""

    GRAMMAR = 'start: "*** Begin" LF /["+-]{3}/ LF\n%import common.LF'
    MATCH = r'\*\*\* Begin\n["+-]{3}\n'

    def body(self, syntax: str, definition: str) -> dict[str, Any]:
        grammar = {"syntax": syntax, "definition": definition}
        custom = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
        plain = {"name": "read", "parameters": {"type": "object", "properties": {}}}
        return {
            "model": "hermes",
            "messages": [USER],
            "tools": [
                {"type": "custom", "custom": custom},
                {"type": "function", "function": plain},
            ],
            "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
            "parallel_tool_calls": False,
            "max_tokens": 200,
        }

    @pytest.mark.parametrize(
        ("syntax", "definition", "match"), [("lark", GRAMMAR, MATCH), ("regex", "a{3}", "a{3}")]
    )
    def test_calls(self, http: httpx.Client, syntax: str, definition: str, match: str) -> None:
        client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
        body = self.body(syntax, definition)
        message = client.chat.completions.create(**body).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "custom"
        assert call.custom.name == "patch"
        assert re.fullmatch(match, call.custom.input)
        # It comes back with the conversation.
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        past = [USER, message.to_dict(), result]
        client.chat.completions.create(**body | {"messages": past, "max_tokens": 1})

    def test_a_stream_says_the_same(self, http: httpx.Client) -> None:
        body = self.body("lark", self.GRAMMAR) | {"seed": 3}
        message = ask(http, "/v1/chat/completions", **body).json()["choices"][0]["message"]
        read: dict[int, dict[str, Any]] = {}
        with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
        for line in lines:
            for call in json.loads(line)["choices"][0]["delta"].get("tool_calls", ()):
                if "id" in call:
                    read[call["index"]] = {"name": call["custom"]["name"], "input": ""}
                read[call["index"]]["input"] += call["custom"]["input"]
        assert [*read.values()] == [call["custom"] for call in message["tool_calls"]]

    def test_what_belongs_to_another_type(self, http: httpx.Client) -> None:
        body = self.body("lark", self.GRAMMAR)
        body["tools"][1]["custom"] = {"name": "x"}
        message = refused(http, "/v1/chat/completions", **body)
        assert message == "tools[1]: custom: belongs to the type 'custom', and only to that"
        body = self.body("lark", self.GRAMMAR) | {"tool_choice": {"type": "custom"}}
        message = refused(http, "/v1/chat/completions", **body)
        assert message == "tool_choice: custom: this field is required"


class TestChatInterfaces:
    """What LibreChat's documentation says that it sends, and Page Assist's client for Ollama."""

    def test_librechat(self, http: httpx.Client) -> None:
        body = {
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "user": "65b1f2",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 4,
            "messages": [USER],
        }
        reply = ask(http, "/v1/chat/completions", **body)
        assert reply.text.endswith("data: [DONE]\n\n")
        assert '"usage":{' in reply.text
        assert IGNORED not in reply.headers

    @pytest.mark.parametrize(
        "origin", [None, "chrome-extension://jfgfiigpkhlkbnfnbobbkinehhfdhndo"]
    )
    def test_page_assist(self, http: httpx.Client, origin: str | None) -> None:
        options = {"temperature": 0.5, "top_k": 5, "num_ctx": 2048, "num_gpu": 1, "seed": 1}
        options |= {"use_mmap": True, "numa": False, "num_predict": 4, "repeat_last_n": 64}
        body = {"model": "hermes:latest", "messages": [{**USER, "images": []}], "stream": True}
        body |= {"keep_alive": "5m", "options": options, "think": False, "format": ""}
        headers = {} if origin is None else {"origin": origin}
        reply = http.post("/api/chat", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert json.loads(reply.text.splitlines()[-1])["done"]


class TestEditors:
    """What gateways and editors keep of other providers in `/v1/chat/completions`."""

    def test_histories_of_other_providers(self, http: httpx.Client) -> None:
        cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "look", "arguments": '{"path": "a'},
        }
        given = [
            {"role": "system", "content": [cached], "cache_control": {"type": "ephemeral"}},
            {"role": "user", "content": [cached]},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": [], "reasoning_text": "Hm.", "cot_id": "1"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "a", "reasoning_details": [], "thinking_blocks": []},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [image]},
        ]
        described = {"type": "function", "function": {"name": "look"}, "cache_control": {}}
        reply = ask(
            http,
            "/v1/chat/completions",
            messages=given,
            tools=[described, {"type": "web_search_preview"}],
            max_tokens=1,
        )
        assert reply.headers[IGNORED] == "messages.content.image"
        assert reply.headers[TOOLS_LEFT] == "web_search_preview"
        body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        assert "is an image" in refused(http, "/v1/chat/completions", **body)

    def test_ways_to_say_how_much_to_think(self, http: httpx.Client) -> None:
        for body in (
            {"reasoning": {"effort": "low", "enabled": True, "exclude": True}},
            {"include_reasoning": False, "enable_thinking": False},
            {"thinking": {"type": "disabled"}},
        ):
            ask(http, "/v1/chat/completions", messages=[USER], max_tokens=1, **body)
        refused(http, "/v1/chat/completions", messages=[USER], reasoning={"effort": 3})

    def test_any_tool_is_required(self, http: httpx.Client) -> None:
        tools = [{"type": "function", "function": {"name": "find"}}]
        body = {"messages": [USER], "tools": tools, "tool_choice": "any", "max_tokens": 60}
        choice = ask(http, "/v1/chat/completions", **body).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "find"

    def test_many_tools_messages_and_long_names(self, http: httpx.Client) -> None:
        """The prompt is too long for this model, and that is all that is said against it."""
        functions = [
            {"type": "function", "function": {"name": f"mcp__{'x' * 80}/{index}"}}
            for index in range(300)
        ]
        for body in ({"tools": functions, "messages": [USER]}, {"messages": [USER] * 3000}):
            sentence = refused(http, "/v1/chat/completions", **body, max_tokens=1)
            assert sentence.startswith("prompt is too long: ")

    def test_ten_megabytes_of_tools_are_an_error(self, http: httpx.Client) -> None:
        schema = {"type": "object", "properties": {"a": {"description": "x" * 10_000_000}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        reply = http.post(
            "/v1/chat/completions", json={"model": "hermes", "messages": [USER], "tools": tools}
        )
        assert reply.status_code in (400, 413)


class TestRoles:
    def test_leading_system_messages_become_one(self, http: httpx.Client) -> None:
        for model in ("first", "in_place"):
            text = prompt(http, model, ("system", "A"), ("developer", "B"), ("user", "hi"))
            assert text.startswith("[system:A\n\nB][user:hi]")

    def test_later_ones_stay_where_the_template_takes_them(self, http: httpx.Client) -> None:
        given = (("system", "A"), ("user", "hi"), ("system", "B"), ("assistant", "yes"))
        assert prompt(http, "in_place", *given) == "[system:A][user:hi][system:B][assistant:yes]"

    def test_or_become_part_of_the_message_before(self, http: httpx.Client) -> None:
        given = (("system", "A"), ("user", "hi"), ("system", "B"), ("assistant", "yes"))
        text = prompt(http, "first", *given, ("system", "C"), ("user", "go"))
        assert text.startswith("[system:A][user:hi\n\nB][assistant:yes][user:C\n\ngo]")
        assert prompt(http, "first", *given).startswith("[system:A][user:hi\n\nB][assistant:yes]")

    def test_a_template_without_system_messages_that_alternates(self, http: httpx.Client) -> None:
        given = (("system", "A"), ("user", "hi"), ("user", "there"), ("assistant", "yes"))
        assert prompt(http, "alternating", *given) == "[user:A\n\nhi\n\nthere][assistant:yes]"

    def test_claudes_inline_system_message(self, http: httpx.Client) -> None:
        inline = {"role": "system", "content": "B"}
        messages(http, USER, inline, model="first", system="A")
