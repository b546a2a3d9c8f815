"""The page in a browser: the dial, every panel, the load, keys, errors, hostile texts."""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from maskdial.registry.catalog import STARTER_FOLDER
from tests.page.conftest import Visit

HOSTILE = '<img src=x onerror="globalThis.hacked = 1"><script>hacked = 1</script>'
PANELS = {
    "hybrid/generate": ".written .piece",
    "hybrid/fill-mask": ".bar",
    "hybrid/score": ".written .piece",
    "sentiment/classify": ".bar",
    "tagger/token-classify": ".marked",
    "tagger/redact": ".marked",
    "finder/token-classify": ".marked",
    "finder/redact": ".marked",
    "extractor/extract": ".records td",
    "reader/question-answering": ".marked",
    "nli/zero-shot-classify": ".bar",
    "ranker/rerank": ".bar",
    "embedder/embed": ".map circle",
    "embedder/similarity": ".similarities td",
}
# The same panels for other models.
ALIKE = {
    *("nli/classify", "ranker/classify", "chat/generate", "chat/score"),
    *("extractor/token-classify", "extractor/redact", "extractor/zero-shot-classify"),
}

Visits = Callable[..., Visit]


def open_dial(visit: Visit) -> Page:
    page = visit.open()
    expect(page.locator(".word").first).to_be_visible()
    return page


def open_panel(page: Page, name: str) -> Any:
    page.locator(f'.tasks [data-panel="{name}"]').click()
    return page.locator(".panel")


def run_panel(page: Page, name: str) -> Any:
    """Runs a panel with what it starts with, and waits for its answer."""
    panel = open_panel(page, name)
    panel.locator("button.primary").click()
    expect(panel.locator(PANELS[name]).first).to_be_visible()
    expect(panel).not_to_have_attribute("aria-busy", "")
    return panel


def code(panel: Any, form: str) -> str:
    panel.get_by_role("tab", name=form, exact=True).click()
    return str(panel.locator("pre code").text_content())


def score(url: str, text: str, mask: str) -> Any:
    body = {"inputs": text, "model": "hybrid", "mask": mask}
    return httpx.post(f"{url}/score", json=body).json()[0]


def test_the_dial_shows_what_the_model_says_under_either_mask(visit: Visits) -> None:
    one = visit()
    page = open_dial(one)
    text = page.get_by_label("A sentence to read").input_value()
    bits = {
        mask: -score(one.url, text, mask)["log_likelihood"] / 0.6931471805599453
        for mask in ("causal", "full")
    }
    for mask, total in bits.items():
        shown = page.locator(f'.total[data-mask="{mask}"] .number')
        expect(shown).to_have_text(f"{total:.1f} bits")
    worth = f"is worth {bits['causal'] - bits['full']:.1f} bits"
    expect(page.locator(".sum strong")).to_have_text(worth)
    assert page.locator(".token").count() == len(score(one.url, text, "full")["tokens"])
    before = page.locator(".word").first.get_attribute("aria-label")
    # By keyboard: the dial is a group of radio buttons.
    page.get_by_role("radio", name="Causal").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="Full")).to_be_checked()
    expect(page.locator(".matrix")).to_have_attribute("data-mask", "full")
    assert page.locator(".word").first.get_attribute("aria-label") != before
    page.locator(".face").click()
    expect(page.get_by_role("radio", name="Causal")).to_be_checked()


def test_a_word_is_hidden_filled_and_replaced_and_the_text_written_on(visit: Visits) -> None:
    page = open_dial(visit())
    page.locator(".word").nth(4).press("Enter")
    candidates = page.locator(".fill .bar-label")
    expect(candidates).to_have_count(6)
    page.get_by_role("button", name="Cut after “ship”").click()
    written = page.locator(".cut .written")
    expect(written).to_contain_text("The captain of the ship")
    expect(page.locator(".writer")).to_have_attribute("data-state", "done")
    assert written.locator(".piece").count() > 1
    expect(page.locator(".rates")).to_contain_text("first after")
    written.locator(".piece").first.hover()
    expect(page.locator(".rival")).to_have_count(5)
    word = str(candidates.nth(1).text_content())
    candidates.nth(1).click()
    expect(page.get_by_label("A sentence to read")).to_have_value(
        f"The captain of the {word} looked at the sea and said nothing."
    )
    expect(page.locator(".word").nth(4)).to_contain_text(word)


def test_every_panel_answers_and_its_requests_can_be_copied(visit: Visits) -> None:
    one = visit()
    page = open_dial(one)
    tabs = page.locator(".tasks button")
    shown = {tabs.nth(index).get_attribute("data-panel") for index in range(tabs.count())}
    assert shown == PANELS.keys() | ALIKE
    for name in PANELS:
        panel = run_panel(page, name)
        assert not panel.locator(".error:visible").count(), name
        if name == "hybrid/generate":
            expect(panel.locator(".writer")).to_have_attribute("data-state", "done")
            expect(panel.locator(".rates")).to_contain_text("tokens/s")
        run_copies(panel, one.url)


def run_copies(panel: Any, url: str) -> None:
    """Runs the request of a panel in each form that it is shown in."""
    _, *options = shlex.split(code(panel, "curl").replace("\\\n", " "))
    address, flag, data = (each for each in options if each != "-N")
    assert address.startswith(url)
    assert flag == "-d"
    reply = httpx.post(address, content=data)
    assert reply.status_code == 200, reply.text
    for form in ("Python", "OpenAI SDK"):
        if panel.get_by_role("tab", name=form).count():
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code(panel, form), {})


def test_an_error_is_the_servers_sentence_beside_what_caused_it(visit: Visits) -> None:
    one = visit()
    page = open_dial(one)
    panel = open_panel(page, "hybrid/fill-mask")
    panel.get_by_label("Text").fill("No blank here.")
    panel.get_by_label("Text").press("Control+Enter")
    body = {"inputs": "No blank here.", "model": "hybrid", "parameters": {"top_k": 5}}
    refusal = httpx.post(f"{one.url}/fill-mask", json=body).json()["error"]
    expect(panel.locator(".inputs .error")).to_have_text(refusal)
    # An answer takes the error away.
    panel.get_by_label("Text").fill("A [MASK] here.")
    panel.locator("button.primary").click()
    expect(panel.locator(".bar").first).to_be_visible()
    expect(panel.locator(".error")).to_be_hidden()
    too_long = "word " * 79
    page.get_by_label("A sentence to read").fill(too_long)
    page.route(
        "**/score",
        lambda route: fulfill(route, 422, {"error": "too long", "error_type": "validation"}),
    )
    page.get_by_role("button", name="Read it").click()
    expect(page.locator(".try .error")).to_have_text("too long")


def test_several_blanks_are_filled_in_place_pass_by_pass(visit: Visits) -> None:
    one = visit()
    page = open_dial(one)
    panel = open_panel(page, "hybrid/fill-mask")
    text = "The old [MASK] lived in a [MASK] by the [MASK]."
    panel.get_by_label("Text").fill(text)
    slider = panel.get_by_label("Blanks per pass")
    for per_pass, steps in ((1, 3), (2, 2)):
        body = {"inputs": text, "model": "hybrid", "parameters": {"joint": True, "steps": steps}}
        (filling,) = httpx.post(f"{one.url}/fill-mask", json=body).json()
        panel.locator("button.primary").click()
        hint = f"Filled together in {steps} passes; {filling['score']:.0%} a word"
        expect(panel.locator(".unmasked + .hint")).to_contain_text(hint)
        words = panel.locator(".filled")
        assert words.count() == 3
        for index, token in enumerate(filling["tokens"]):
            where = f"filled in pass {token['step'] + 1} of {steps}, "
            expect(words.nth(index)).to_have_attribute("title", re.compile(f"^{where}"))
            expect(words.nth(index)).to_contain_text(token["token_str"].strip())
        assert panel.locator(".columns section").count() == 3
        slider.press("ArrowRight")
        expect(panel.locator(".reading")).to_have_text(str(per_pass + 1))


def test_what_a_schema_names_is_shown_in_the_text_and_in_tables(visit: Visits) -> None:
    one = visit()
    panel = run_panel(open_dial(one), "extractor/extract")
    data = shlex.split(code(panel, "curl").replace("\\\n", " "))[-1]
    found = httpx.post(f"{one.url}/extract", content=data).json()
    assert len(found["entities"]["person"]) > 1
    marks = sum(map(len, found["entities"].values()))
    # Of entities that overlap, the first one is marked.
    assert 1 < panel.locator(".marked mark").count() <= marks
    cells = [
        ", ".join(each["text"] for each in record[field])
        for record in found["trip"]
        for field in ("from", "to")
    ]
    assert panel.locator(".records td").all_inner_texts() == cells
    pairs = [
        " → ".join(each["text"] for each in pair.values())
        for pair in found["relation_extraction"]["visits"]
    ]
    assert panel.locator(".columns li:not(:has(.bar))").all_inner_texts() == pairs != []
    expect(panel.locator(".bar-label")).to_have_text(found["label"]["label"])
    # Only what is asked for is sent and shown.
    for name in ("Entities", "A record", "Relations"):
        panel.get_by_label(name).fill("")
    panel.locator("button.primary").click()
    expect(panel.locator(".out section")).to_have_count(1)
    panel.get_by_label("Labels").fill("")
    panel.locator("button.primary").click()
    expect(panel.locator(".error")).to_contain_text("schema")


def fulfill(route: Route, status: int, content: object) -> None:
    route.fulfill(status=status, content_type="application/json", body=json.dumps(content))


def test_no_text_becomes_markup(visit: Visits) -> None:
    one = visit()
    page = open_dial(one)
    page.get_by_label("A sentence to read").fill(HOSTILE)
    page.get_by_role("button", name="Read it").click()
    expect(page.locator(".word").first).to_contain_text("<")
    page.locator(".word").nth(2).click()
    expect(page.locator(".blanked")).to_be_visible()
    panel = open_panel(page, "hybrid/generate")
    panel.get_by_label("Prompt").fill(HOSTILE)
    panel.locator("button.primary").click()
    expect(panel.locator(".written .prompt")).to_have_text(HOSTILE)
    replies = {
        "classify": [[{"label": HOSTILE, "score": 1.0}]],
        "token-classify": [
            {"entity_group": HOSTILE, "score": 1, "word": "A", "start": 0, "end": 1}
        ],
        "redact": {
            "text": "A",
            "replacements": [
                {"label": HOSTILE, "score": 1, "redacted_start": 0, "redacted_end": 1}
            ],
        },
        "question-answering": {"answer": HOSTILE, "score": 1, "start": 0, "end": 3},
        "extract": {
            "entities": {HOSTILE: [{"text": "A", "confidence": 1, "start": 0, "end": 1}]},
            "trip": [{"from": [{"text": HOSTILE, "confidence": 1}], "to": []}],
            "label": {"label": HOSTILE, "confidence": 1},
            "relation_extraction": {},
        },
    }
    for task, reply in replies.items():
        page.route(f"**/{task}", lambda route, _, reply=reply: fulfill(route, 200, reply))
        name = next(name for name in PANELS if name.endswith(f"/{task}"))
        expect(run_panel(page, name).locator(".out")).to_contain_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("globalThis.hacked") is None
    # And if the page's own code tried, the browser would refuse.
    refused = (
        "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } }"
    )
    assert page.evaluate(refused) == "TypeError"
    one.complaints.clear()


def test_a_policy_is_chosen_and_what_it_found_is_shown(visit: Visits) -> None:
    page = visit().open()
    panel = open_panel(page, "hybrid/generate")
    panel.locator("button.primary").click()
    expect(panel.locator('.writer[data-state="done"]')).to_be_visible()
    assert panel.locator(".verdicts li").count() == 0
    panel.get_by_label("Policy").select_option("names")
    panel.locator("button.primary").click()
    expect(panel.locator(".verdicts li").first).to_contain_text("redact by names")
    expect(panel.locator(".written")).to_contain_text(re.compile(r"\[(PER|LOC)_1\]"))
    expect(panel.locator(".request pre")).to_contain_text('-H "x-policy: names"')
    panel.get_by_role("tab", name="OpenAI SDK").click()
    expect(panel.locator(".request pre")).to_contain_text('extra_headers={"x-policy": "names"}')
    panel.get_by_role("tab", name="Python").click()
    expect(panel.locator(".request pre")).to_contain_text('policy="names"')


@pytest.fixture(scope="module")
def locked_url(start_server: Callable[..., Any]) -> Iterator[str]:
    """A server that asks for a key."""
    models = {"hybrid": STARTER_FOLDER / "hybrid"}
    server = start_server(models=models, api_keys=["sesame"])
    yield server.url
    server.stop()


def test_a_key_is_asked_for_once_and_stays_in_the_tab(visit: Visits, locked_url: str) -> None:
    one = visit(url=locked_url)
    page = one.open()
    dialog = page.get_by_role("dialog")
    refusal = httpx.get(f"{locked_url}/info")
    assert refusal.status_code == 401
    expect(dialog).to_contain_text(refusal.json()["error"])
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_label("API key").press("Enter")
    expect(dialog.get_by_label("API key")).to_have_value("")
    dialog.get_by_label("API key").fill("sesame")
    dialog.get_by_role("button", name="Use this key").click()
    expect(page.locator(".word").first).to_be_visible()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    page.reload()
    expect(page.locator(".word").first).to_be_visible()
    assert not page.get_by_role("dialog").count()
    # What is to be copied names the key, and does not have it.
    panel = run_panel(page, "hybrid/fill-mask")
    for form in ("curl", "Python"):
        assert "MASKDIAL_API_KEY" in code(panel, form)
        assert "sesame" not in code(panel, form)
    page.get_by_role("link", name="API", exact=True).click()
    expect(page.locator(".opblock").first).to_be_visible()


def test_the_load_is_drawn_while_it_is_looked_at(visit: Visits) -> None:
    page = open_dial(visit())
    page.locator("#load").scroll_into_view_if_needed()
    read = page.locator(".chart", has_text="Tokens read per second")
    expect(read.locator(".scale")).to_have_text("10")
    for _ in range(3):
        page.evaluate(
            "body => fetch('score', {method: 'POST', body})",
            json.dumps({"inputs": "It was late. " * 9, "model": "hybrid"}),
        )
    # The most of the last minute.
    expect(read.locator(".scale")).not_to_have_text("10")
    assert page.locator(".chart .line[d]").count() == 6


def test_a_text_can_be_stopped(visit: Visits) -> None:
    page = open_dial(visit())
    panel = open_panel(page, "hybrid/generate")
    page.route("**/generate_stream", endless)
    panel.locator("button.primary").click()
    panel.get_by_role("button", name="Stop").click()
    expect(panel.locator(".rates")).to_contain_text("stopped")
    expect(panel.get_by_role("button", name="Stop")).to_be_hidden()


def endless(route: Route) -> None:
    """No reply: the test ends before."""


def test_on_a_phone_in_the_dark_and_by_arrow_keys(visit: Visits) -> None:
    one = visit(color_scheme="dark", has_touch=True)
    one.page.set_viewport_size({"width": 360, "height": 740})
    page = open_dial(one)
    page.locator(".word").nth(4).click()
    expect(page.locator(".fill .bar").first).to_be_visible()
    run_panel(page, "embedder/similarity")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    luminance = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    )
    assert page.evaluate(luminance) < 150
    page.locator('.tasks [data-panel="hybrid/generate"]').focus()
    page.keyboard.press("ArrowRight")
    fill_mask = page.locator('.tasks [data-panel="hybrid/fill-mask"]')
    expect(fill_mask).to_be_focused()
    expect(fill_mask).to_have_attribute("aria-selected", "true")


def test_without_a_model_that_has_both_masks_there_is_no_dial(visit: Visits) -> None:
    one = visit()
    info = httpx.get(f"{one.url}/info").json()
    info["models"] = [model for model in info["models"] if model["name"] == "sentiment"]
    one.page.route("**/info", lambda route: fulfill(route, 200, info))
    page = one.open()
    expect(page.locator(".panel")).to_be_visible()
    assert page.locator("#dial").count() == 0


def test_the_documentation_needs_no_other_host(visit: Visits) -> None:
    page = visit().open("/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    expect(page.locator("#swagger")).to_contain_text("/fill-mask")


def test_a_model_is_unloaded_and_loaded_with_the_admin_key(
    visit: Visits, start_server: Callable[..., Any]
) -> None:
    models = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    server = start_server(models=models, admin_key="boss")
    page = visit(url=server.url).open()
    model = page.locator(".model", has_text="sentiment")
    model.get_by_role("button", name="Unload").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("the admin key")
    dialog.get_by_label("API key").fill("boss")
    dialog.get_by_label("API key").press("Enter")
    expect(model.get_by_role("button", name="Load", exact=True)).to_be_visible()
    expect(model).to_contain_text("unloaded")
    model.get_by_role("button", name="Load", exact=True).click()
    expect(model.get_by_role("button", name="Unload")).to_be_visible()
    assert page.evaluate("Object.keys(sessionStorage)") == ["maskdial-admin-key"]
    server.stop()


def test_a_look_at_the_server_leaves_what_has_not_changed(visit: Visits) -> None:
    one = visit()
    one.page.clock.install()
    page = open_dial(one)
    model = page.locator(".model", has_text="sentiment")
    button = model.get_by_role("button", name="Unload")
    button.click()
    expect(model).to_contain_text("started without an admin key")
    button.focus()
    with page.expect_response("**/info"):
        page.clock.fast_forward(11_000)
    page.clock.run_for(100)
    expect(button).to_be_focused()
    expect(model).to_contain_text("started without an admin key")
    one.complaints.clear()  # Chromium's of the request that was refused


def test_the_status_says_when_the_server_is_gone(visit: Visits) -> None:
    one = visit()
    one.page.clock.install()
    page = open_dial(one)
    expect(page.locator("#status")).to_contain_text("models ready")
    page.route("**/info", lambda route: route.abort())
    page.clock.fast_forward(11_000)
    expect(page.locator("#status")).to_contain_text("does not answer")
    page.unroute("**/info")
    page.clock.fast_forward(11_000)
    expect(page.locator("#status")).to_contain_text("models ready")
    one.complaints.clear()  # Chromium's of the request that failed
