"""A server with a model for every panel, and a browser to look at its page."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.chat_bundles import make_chat_bundle
from tests.page import bundles

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
POLICY = """
[policies.names]
[[policies.names.rules]]
name = "names"
on = "output"
model = "tagger"
threshold = 0.0
action = "redact"
"""
_TIMEOUT = 30_000  # ms; other tests may have the machine's cores
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def page_server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The starters, and bundles of the other tasks."""
    folder = tmp_path_factory.mktemp("page")
    models = {
        "hybrid": STARTER_FOLDER / "hybrid",
        "sentiment": STARTER_FOLDER / "sentiment",
        "tagger": bundles.make_tagger(folder / "tagger"),
        "finder": bundles.make_finder(folder / "finder"),
        "extractor": bundles.make_extractor(folder / "extractor"),
        "reader": bundles.make_reader(folder / "reader"),
        "nli": bundles.make_nli(folder / "nli"),
        "ranker": bundles.make_ranker(folder / "ranker"),
        "embedder": bundles.make_embedder(folder / "embedder"),
        "chat": make_chat_bundle(folder / "chat", CHAT_TEMPLATE),
    }
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    server = start_server(models=models, generation_config="auto", policy=policy)
    yield server
    server.stop()


# Not of the session: Playwright's event loop would run while other modules' tests want theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, the system's or Playwright's own."""
    expect.set_options(timeout=_TIMEOUT)
    with sync_playwright() as playwright:
        program = _program(playwright)
        if program is None:
            pytest.skip(f"there is no browser: install one of {', '.join(_BROWSERS)}")
        # Inside containers, Chromium's own sandbox does not start.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


def _program(playwright: Playwright) -> str | None:
    own = playwright.chromium.executable_path
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    return own if Path(own).is_file() else found


class Visit:
    """A page that is open, with what it asked for and what it complained of."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(_TIMEOUT)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._listen)

    def open(self, path: str = "/") -> Page:
        self.page.goto(self.url + path)
        return self.page

    def _listen(self, message: Any) -> None:
        # Chromium logs each reply that is an error, which some of the tests provoke.
        if message.type in ("error", "warning") and "status of 4" not in message.text:
            self.complaints.append(message.text)


@pytest.fixture
def visit(browser: Browser, page_server: Any) -> Iterator[Callable[..., Visit]]:
    """Opens pages, which must not complain, nor ask another host for anything."""
    visits = []

    def start(url: str = page_server.url, **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
        visits.append(Visit(context.new_page(), url))
        return visits[-1]

    yield start
    for each in visits:
        assert not each.complaints
        assert not [url for url in each.requests if not url.startswith((each.url, "data:"))]
        each.page.context.close()
