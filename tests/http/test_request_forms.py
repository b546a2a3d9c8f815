"""docs/architecture.md tells what a request becomes on its way; a followed request does just that.

The number of files that it enters has a bound, since a path grows by a file at a time.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import maskdial
from maskdial.config import load_config
from maskdial.offline.application import Application
from maskdial.registry.catalog import STARTER_FOLDER

ROOT = Path(maskdial.__file__).parent
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
MADE_BY = re.compile(r"\| `([\w/]+\.py)` `([\w.]+)` \|$")

BODIES: dict[str, dict[str, Any]] = {
    "/fill-mask": {"model": "hybrid", "inputs": "The [MASK] barked."},
    "/generate": {"model": "hybrid", "inputs": "Once", "parameters": {"max_new_tokens": 3}},
    "/v1/chat/completions": {
        "model": "chat",
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 3,
    },
}
# Twenty of these are the guard and the reply, fifteen the registry and the runtime.
MOST_FILES = {"/fill-mask": 43, "/generate": 70, "/v1/chat/completions": 85}


class Walk:
    """The functions of the server that are called while it is open, in the order of first calls."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self._open = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows the threads that begin within the block, and this one."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def open(self) -> Iterator[None]:
        self.calls.clear()
        self._open = True
        yield
        self._open = False

    def copy(self) -> "Walk":
        """The calls so far, for another one to be opened."""
        other = Walk()
        other.calls = self.calls.copy()
        return other

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._open and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                name = f"{path.relative_to(ROOT)}", frame.f_code.co_qualname
                self.calls.setdefault(name)


def documented(path: str) -> list[tuple[str, str]]:
    """The functions that the table of a path names, each with its file."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition(f"\n### `{path}`\n")[2].partition("\n#")[0]
    return [(m[1], m[2]) for line in section.splitlines() if (m := MADE_BY.search(line))]


@pytest.fixture(scope="module")
def walks(chat_bundle: Path) -> dict[str, Walk]:
    """A request to each path after a first one, which makes what is made once.

    Of several the one that enters the fewest files: what runs beside them belongs to none.
    """
    models = [
        f"{name}={folder}"
        for name, folder in {"hybrid": STARTER_FOLDER / "hybrid", "chat": chat_bundle}.items()
    ]
    config = load_config({"model": models, "threads": 1})

    async def ask(path: str) -> list[Walk]:
        walk, walks, body = Walk(), [], json.dumps(BODIES[path]).encode()
        with walk.following():
            async with Application.start(config) as application:
                for _ in range(4):
                    with walk.open():
                        stream = application.stream("POST", path, body)
                        messages = [message async for message in stream]
                    assert messages[0]["status"] == 200
                    walks.append(walk.copy())
        return walks[1:]

    return {path: min(asyncio.run(ask(path)), key=lambda each: len(each.files)) for path in BODIES}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_takes_the_documented_forms_in_their_order(
    path: str, walks: dict[str, Walk]
) -> None:
    functions = documented(path)
    assert len(functions) > 10
    calls = list(walks[path].calls)
    assert [each for each in functions if each not in calls] == []
    assert sorted(functions, key=calls.index) == functions


@pytest.mark.parametrize("path", BODIES)
def test_a_request_enters_no_more_files_than_it_did(path: str, walks: dict[str, Walk]) -> None:
    files = walks[path].files
    assert len(files) <= MOST_FILES[path], sorted(files)
