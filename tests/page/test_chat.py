"""The chat in a browser: conversations, what can be done with a turn, Markdown, tools, errors."""

import contextlib
import io
import json
import shlex
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.conftest import Visit
from tests.page.test_page import HOSTILE, code, endless, fulfill

Visits = Callable[..., Visit]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
MARKDOWN = """# A title

Some *emphasis*, **strength**, `code_of_it` and 2 * 3 * 4, snake_case_name.
A [link](https://example.org/a) and a [bad one](javascript:alert(1)).

1. First
   - inner
2. Second

```python
x = 1  # **not bold**
```

| a | b |
|---|---|
| 1 | **2** |

> quoted
"""


def open_chat(visit: Visit) -> Page:
    page = visit.open("/#chat/chat")
    expect(page.get_by_label("Message")).to_be_visible()
    return page


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def replies(page: Page, *deltas: dict[str, Any], end: str = "stop") -> list[dict[str, Any]]:
    """Has every request answered by these deltas; returns the bodies of requests to come."""
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append({"choices": [{"delta": {}, "finish_reason": end}]})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(json.loads(str(route.request.post_data)))
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer)
    return bodies


def turns(page: Page) -> list[tuple[str | None, str]]:
    """Role and text of each turn, once no reply is under way."""
    expect(page.locator(".turn[aria-busy]")).to_have_count(0)
    found = page.locator(".turn")
    return [
        (each.get_attribute("data-role"), each.locator(".body").inner_text())
        for each in found.all()
    ]


def test_a_conversation_is_held_kept_and_found_again(visit: Visits) -> None:
    one = visit()
    page = open_chat(one)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Most tokens of a reply").fill("5")
    page.get_by_role("spinbutton", name="Temperature").fill("0")  # one that is drawn may end sooner
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_text("Settings", exact=True).click()
    send(page, "Hello")
    reply = page.locator('.turn[data-role="assistant"]')
    expect(reply.locator(".note")).to_contain_text("5 written")
    expect(reply.locator(".note")).to_contain_text("cut at the limit of 5 tokens")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    # What was sent can be copied, and runs.
    page.get_by_text("The request, to copy").click()
    _, _, address, _, data = shlex.split(code(page, "curl").replace("\\\n", " "))
    assert json.loads(data)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert httpx.post(address, content=data).status_code == 200
    for form in ("Python", "OpenAI SDK"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code(page, form), {})
    held = turns(page)
    page.reload()
    expect(page.locator(".empty")).to_be_visible()
    page.locator(".conversations").get_by_role("button", name="Hello", exact=True).click()
    assert turns(page) == held
    assert page.get_by_label("Most tokens of a reply").input_value() == "5"
    page.get_by_role("button", name="New chat").click()
    assert turns(page) == []
    page.get_by_role("button", name="Delete “Hello”").click()
    expect(page.locator(".conversations li")).to_have_count(0)
    assert page.evaluate("localStorage.getItem('maskdial-conversations')") == "[]"


def test_enter_sends_shift_enter_does_not_and_turns_are_edited_and_asked_again(
    visit: Visits,
) -> None:
    page = open_chat(visit())
    sent = replies(page, {"content": "One."})
    page.get_by_label("Message").type("a")
    page.get_by_label("Message").press("Shift+Enter")
    page.get_by_label("Message").type("b")
    page.get_by_label("Message").press("Enter")
    assert turns(page) == [("user", "a\nb"), ("assistant", "One.")]
    send(page, "second")
    assert len(turns(page)) == 4
    assert [each["content"] for each in sent[1]["messages"]] == ["a\nb", "One.", "second"]
    replies(page, {"content": "Two."})
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn").last).to_contain_text("Two.")
    assert [text for _, text in turns(page)] == ["a\nb", "One.", "second", "Two."]
    page.get_by_role("button", name="Edit").first.click()
    expect(page.get_by_label("Message")).to_have_value("a\nb")
    page.get_by_label("Message").press("Escape")
    expect(page.get_by_label("Message")).to_have_value("")
    page.get_by_role("button", name="Edit").first.click()
    send(page, "other")
    assert turns(page) == [("user", "other"), ("assistant", "Two.")]


def test_markdown_is_shown_and_hostile_texts_become_no_markup(visit: Visits) -> None:
    page = open_chat(visit())
    replies(page, {"reasoning_content": "Let me think."}, {"content": MARKDOWN})
    send(page, "Show me")
    reply = page.locator('.turn[data-role="assistant"]')
    expect(reply.locator(".body h3")).to_have_text("A title")
    expect(reply.locator("em")).to_have_text("emphasis")
    expect(reply.locator("td strong")).to_have_text("2")
    expect(reply.locator("p > code")).to_have_text("code_of_it")
    expect(reply.locator("p").filter(has_text="snake_case_name")).to_contain_text("2 * 3 * 4")
    assert reply.locator("ol > li").count() == 2
    expect(reply.locator("ol ul li")).to_have_text("inner")
    expect(reply.locator(".code pre")).to_have_text("x = 1  # **not bold**")
    expect(reply.locator(".code figcaption")).to_contain_text("python")
    expect(reply.locator("blockquote")).to_have_text("quoted")
    assert [each.get_attribute("href") for each in reply.locator("a").all()] == [
        "https://example.org/a"
    ]
    expect(reply.locator("details.thoughts")).not_to_have_attribute("open", "")
    expect(reply.locator("details.thoughts p")).to_have_text("Let me think.")
    for text in (HOSTILE, f"```\n{HOSTILE}", f"| {HOSTILE} |\n|---|\n", f"1. {HOSTILE}"):
        replies(page, {"reasoning_content": HOSTILE, "content": text})
        send(page, HOSTILE)
        assert "onerror" in turns(page)[-1][1]
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("globalThis.hacked") is None
    # A browser's stack has an end, and lists and quotes within each other need none.
    for mark in ("- ", "> ", ">", "1. "):
        replies(page, {"content": mark * 5000 + "deepest"})
        send(page, mark)
        assert "deepest" in turns(page)[-1][1]
    # Neither blank lines nor spaces cost their number's square.
    blank = "- a" + "\n" * 30_000 + "  b\n\n|\n" + " " * 200_000 + "x"
    replies(page, {"content": blank + "\r\n\r\n# After\r\n"})
    send(page, "blank")
    expect(reply.last.locator(".body h3")).to_have_text("After")
    # Emphasis that never ends costs no more than its length.
    replies(page, {"content": "*a " * 6000 + "`" * 3000 + "[" * 3000})
    send(page, "much")
    assert len(turns(page)[-1][1]) > 20_000


def test_a_call_of_a_tool_is_shown_and_takes_its_result(visit: Visits) -> None:
    page = open_chat(visit())
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Tools").fill("[")
    page.get_by_text("Settings", exact=True).click()
    send(page, "Look")
    expect(page.locator(".thread > .error")).to_contain_text("the tools are not JSON")
    expect(page.get_by_label("Message")).to_have_value("Look")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Tools").fill(json.dumps(TOOLS))
    page.get_by_text("Settings", exact=True).click()
    calls = [
        {"index": index, "id": f"call-{index}", "function": {"name": "look", "arguments": '{"at'}}
        for index in range(2)
    ]
    rest = [{"index": index, "function": {"arguments": '": 1}'}} for index in range(2)]
    sent = replies(page, {"tool_calls": calls}, {"tool_calls": rest}, end="tool_calls")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".call pre").first).to_have_text('{\n  "at": 1\n}')
    assert sent[0]["tools"] == TOOLS
    asked = replies(page, {"content": "Seen."})
    for text in ("a cat", "a dog"):
        page.get_by_label("Result of look").first.fill(text)
        page.get_by_role("button", name="Send the result").first.click()
    expect(page.locator(".turn").last).to_contain_text("Seen.")
    user, call, *results = asked[0]["messages"]
    assert user == {"role": "user", "content": "Look"}
    assert [each["id"] for each in call["tool_calls"]] == ["call-0", "call-1"]
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert results == [
        {"role": "tool", "tool_call_id": "call-0", "content": "a cat"},
        {"role": "tool", "tool_call_id": "call-1", "content": "a dog"},
    ]


def test_a_refusal_gives_the_message_back_and_a_reply_can_be_stopped(visit: Visits) -> None:
    page = open_chat(visit())
    page.route(
        "**/v1/chat/completions", lambda route: fulfill(route, 429, {"error": {"message": "busy"}})
    )
    send(page, "Hello")
    expect(page.locator(".thread > .error")).to_have_text("busy")
    expect(page.get_by_label("Message")).to_have_value("Hello")
    assert turns(page) == []
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", endless)
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".turn[aria-busy]")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn .note")).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_an_edit_or_a_retry_that_is_refused_leaves_the_conversation(visit: Visits) -> None:
    page = open_chat(visit())
    replies(page, {"content": "One."})
    for text in ("first", "second"):
        send(page, text)
        held = turns(page)
    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions", lambda route: fulfill(route, 429, {"error": {"message": "busy"}})
    )
    problem = page.locator(".thread > .error")
    page.get_by_role("button", name="Edit").first.click()
    send(page, "other")
    expect(problem).to_have_text("busy")
    assert (turns(page), len(held)) == (held, 4)
    expect(page.get_by_label("Message")).to_have_value("other")
    page.get_by_label("Message").fill("")
    page.get_by_role("button", name="Retry").click()
    expect(problem).to_have_text("busy")
    assert turns(page) == held
    replies(page, {"content": "Two."})
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn").last).to_contain_text("Two.")
    assert [text for _, text in turns(page)] == ["first", "One.", "second", "Two."]


def test_what_a_model_writes_cannot_edit_the_copied_request(visit: Visits) -> None:
    page = open_chat(visit())
    replies(page, {"content": "a'\x7f\x7f;\x9b'"})
    for number, text in enumerate(("Hello", "More"), 1):
        send(page, text)
        # Nothing is sent before the reply has ended
        expect(page.locator(".turn")).to_have_count(2 * number)
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
    page.get_by_text("The request, to copy").click()
    curl = code(page, "curl")
    assert not set("\x7f\x9b") & set(curl)
    data = json.loads(shlex.split(curl.replace("\\\n", " "))[-1])
    assert data["messages"][1]["content"] == "a'\x7f\x7f;\x9b'"
    for form in ("Python", "OpenAI SDK"):
        assert not set("\x7f\x9b") & set(code(page, form))
        compile(code(page, form), form, "exec")


def test_a_conversation_that_is_deleted_stays_deleted(visit: Visits) -> None:
    page = open_chat(visit())
    replies(page, {"content": "One."})
    send(page, "secret")
    assert len(turns(page)) == 2
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", endless)
    send(page, "more")
    expect(page.locator(".turn[aria-busy]")).to_be_visible()
    page.get_by_role("button", name="Delete “secret”").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".conversations li")).to_have_count(0)
    assert page.evaluate("localStorage.getItem('maskdial-conversations')") == "[]"


def test_an_address_that_was_cut_opens_the_page(visit: Visits) -> None:
    page = visit().open("/#chat/chat%")
    expect(page.get_by_label("Message")).to_be_visible()
    page.get_by_role("link", name="Models").click()
    expect(page.locator(".model").first).to_be_visible()


def test_what_the_browser_keeps_may_be_anything(visit: Visits) -> None:
    page = open_chat(visit())
    kept = '[1, {"turns": 3}, {"turns": [null]}, {"turns": [{"role": "user"}]}]'
    for text in ("null", "{", kept, '{"a": 1}'):
        page.evaluate("text => localStorage.setItem('maskdial-conversations', text)", text)
        page.evaluate("localStorage.setItem('maskdial-chat-settings', 'null')")
        page.reload()
        expect(page.locator(".empty")).to_be_visible()
    # A full store loses the oldest conversations, not this one.
    page.evaluate("""() => {
        const turns = [{ role: "user", content: "x".repeat(2400000) }];
        const each = (id) => ({ id, model: "chat", turns, changed: 1 });
        localStorage.setItem("maskdial-conversations", JSON.stringify([each("a"), each("b")]));
    }""")
    replies(page, {"content": "y" * 600_000})
    send(page, "Hello")
    assert len(turns(page)) == 2
    ids = page.evaluate("JSON.parse(localStorage['maskdial-conversations']).map((c) => c.id)")
    assert len(ids) == 2
    assert ids[1] == "a"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(visit: Visits, scheme: str) -> None:
    one = visit(color_scheme=scheme)
    one.page.set_viewport_size({"width": 360, "height": 640})
    page = open_chat(one)
    replies(page, {"content": MARKDOWN + "\n```\n" + "long " * 99 + "\n```\n" + "w" * 300})
    send(page, "Show me")
    assert len(turns(page)) == 2
    size = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    assert page.evaluate(size) == [360, 640]
    expect(page.get_by_label("Message")).to_be_in_viewport()


def test_a_server_of_a_chat_model_alone_begins_with_the_chat(visit: Visits) -> None:
    one = visit()
    info = httpx.get(f"{one.url}/info").json()
    info["models"] = [model for model in info["models"] if model["name"] == "chat"]
    one.page.route("**/info", lambda route: fulfill(route, 200, info))
    page = one.open()
    expect(page.get_by_label("Message")).to_be_focused()
    page.get_by_role("link", name="Models").click()
    expect(page.locator(".panel")).to_be_visible()
    expect(page.get_by_label("Message")).to_be_hidden()
    page.locator(".model").get_by_role("link", name="Chat").click()
    expect(page.get_by_label("Message")).to_be_visible()
