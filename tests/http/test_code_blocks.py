"""Blocks of code in the documents that need no more than a server run against one.

`test_readme.py` runs those of the README.
"""

import ast
import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.blocks import Block, blocks, commands
from tests.http.chat_bundles import make_chat_bundle, set_defaults
from tests.http.conftest import CHAT_TEMPLATE
from tests.page.bundles import make_embedder

ADDRESS = "http://127.0.0.1:8000"
HERE = [each for each in blocks("sh", "python") if not each.place.startswith("README.md")]
REQUESTS = [
    (block, arguments)
    for block in HERE
    if block.language == "sh"
    for arguments in commands(block.code)
    if arguments[0] == "curl"
]
SNIPPETS = [
    block
    for block in HERE
    if block.language == "python" and block.why_not is None and "import " in block.code
]


@pytest.fixture(scope="module")
def chat_server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """It has the model that documents call "mine", which writes its likeliest text: drawn from all
    tokens, one reply in fifteen is empty."""
    bundle = make_chat_bundle(tmp_path_factory.mktemp("bundles") / "chat", CHAT_TEMPLATE)
    set_defaults(bundle, top_k=1)
    running = start_server(models={"mine": bundle}, max_context=256, generation_config="auto")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def embedding_server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """It has the model that documents call "embedder"."""
    bundle = make_embedder(tmp_path_factory.mktemp("bundles") / "embedder")
    running = start_server(models={"embedder": bundle})
    yield running
    running.stop()


@pytest.fixture
def address(block: Block, request: pytest.FixtureRequest) -> str:
    """Of a server with the models that a block names: that one, or the starters."""
    for name, server in (("mine", "chat_server"), ("embedder", "embedding_server")):
        if f'"{name}"' in block.code:
            return str(request.getfixturevalue(server).url)
    return str(request.getfixturevalue("url"))


def place(value: Any) -> str:
    return value.place if isinstance(value, Block) else ""


@pytest.mark.parametrize(("block", "arguments"), REQUESTS, ids=place)
def test_a_request_is_answered(block: Block, arguments: list[str], address: str) -> None:
    """One that needs another model is refused for that, and for nothing in its body."""
    (target,) = (each for each in arguments if "localhost:8000" in each or ADDRESS in each)
    path = urlsplit(target if "//" in target else f"//{target}").path
    body = json.loads(arguments[arguments.index("-d") + 1])
    reply = httpx.post(f"{address}{path}", json=body, timeout=60)
    if block.why_not is None:
        assert reply.status_code == 200, reply.text
        assert '"error"' not in reply.text
    else:
        assert reply.status_code == 404, reply.text


@pytest.mark.parametrize("block", SNIPPETS, ids=place)
def test_a_snippet_prints_something(
    block: Block, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = ast.parse(block.code)
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                pytest.skip(f"{name} is not installed; tests/clients has that client")
    code = block.code.replace(ADDRESS, address)
    code = code.replace(ADDRESS.removeprefix("http://"), urlsplit(address).netloc)
    exec(compile(code, block.place, "exec"), {})
    assert capsys.readouterr().out.strip()
