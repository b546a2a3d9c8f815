"""The page's files as they are served, without a browser."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

import maskdial
from maskdial.registry.catalog import STARTER_FOLDER

FOLDER = Path(maskdial.__file__).parent / "page"
CHATS = (
    *("/generate", "/v1/chat", "/v1/responses", "/v1/messages"),
    *("/apply-template", "/chat/completions", "/v2/chat"),
    *("/api/chat", "/api/generate", "/api/show", "/api/pull"),
)
FILES = sorted(file for file in FOLDER.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def http(page_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page_server.url, timeout=60) as client:
        yield client


def test_all_files_together_are_small() -> None:
    assert sum(file.stat().st_size for file in FILES) < 220_000


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_is_served_and_kept_until_it_changes(http: httpx.Client, file: Path) -> None:
    path = f"/page/{file.relative_to(FOLDER).as_posix()}"
    reply = http.get(path)
    assert (reply.status_code, reply.content) == (200, file.read_bytes())
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-content-type-options"] == "nosniff"
    head = http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(file.stat().st_size)
    again = http.get(path, headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(("path", "name"), [("/", "index.html"), ("/docs", "docs.html")])
def test_pages_allow_nothing_from_elsewhere(http: httpx.Client, path: str, name: str) -> None:
    reply = http.get(path)
    assert reply.content == (FOLDER / name).read_bytes()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "http" not in policy
    assert ("require-trusted-types-for 'script'" in policy) == (path == "/")
    assert http.head(path).status_code == 200
    etag = {"if-none-match": reply.headers["etag"]}
    assert http.get(path, headers=etag).status_code == 304


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../config.py", "/page/%2e%2e/config.py"]
)
def test_there_is_nothing_else(http: httpx.Client, path: str) -> None:
    reply = http.get(path)
    assert reply.status_code == 404
    assert reply.json()["error_type"] == "not_found"


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.suffix in (".js", ".html", ".css")], ids=str
)
def test_sources_name_no_other_host_and_write_no_markup(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|[\"'(]//", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.search(r"<style|\sstyle=|\son\w+=\"", text)


def examples(http: httpx.Client) -> dict[str, Any]:
    """The bodies that `/docs` offers to send, by path."""
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    found = {}
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None and "application/json" in body["content"]:  # not a form with a file
            schema = body["content"]["application/json"]["schema"]
            # Where two dialects share a path, its own comes first.
            reference = schema.get("anyOf", [schema])[0].get("$ref", "")
            found[path] = schemas.get(reference.rpartition("/")[2], {}).get("examples", [None])[0]
    return found


# No model here does that.
NOT_SERVED = (
    "/embed-all",
    "/embed-chunks",
    "/embed-hybrid",
    "/embed-sparse",
    "/summarize",
    "/translate",
)
# Where several models here do it
SEVERAL = {
    **dict.fromkeys(("/classify", "/predict", "/vertex"), "sentiment"),
    **dict.fromkeys(("/token-classify", "/redact"), "tagger"),
    "/zero-shot-classify": "nli",
    "/pooling": "embedder",
    "/v1/moderations": "sentiment",
    "/v1/score": "ranker",
}


def test_the_examples_of_the_documentation_can_be_run(http: httpx.Client) -> None:
    without = {path for path, body in examples(http).items() if body is None}
    adapters = ("/v1/load_lora", "/v1/unload_lora")
    changing = ("/models/load", "/models/unload", "/v1/responses/", "/v2/re", "/api/", *adapters)
    assert all(path.startswith(changing) for path in without)
    tried = {path: body for path, body in examples(http).items() if path not in without}
    assert len(tried) > 20
    for path, body in tried.items():
        chats = path.startswith(CHATS) or path in ("/invocations", "/")
        name = "chat" if chats else SEVERAL.get(path)
        named = body if name is None else body | {"model": name}
        reply = http.post(path.replace("{name}", "chat").replace("{version}", "1"), json=named)
        if path in NOT_SERVED:
            assert reply.status_code == 404
        elif path == "/v1/fim/completions":
            assert "no fill-in-the-middle tokens" in reply.text  # nor has any other model here
        elif path in ("/v1/batches", "/v1/messages/batches"):
            assert reply.status_code == 403  # needs --batch-dir
        elif path == "/v1/prefill":
            assert reply.status_code == 403  # needs the admin key
        else:
            assert reply.status_code == 200, (path, reply.text)


def test_below_a_prefix_everything_is_where_the_page_looks_for_it(
    start_server: Callable[..., Any],
) -> None:
    models = {"sentiment": STARTER_FOLDER / "sentiment"}
    server = start_server(models=models, root_path="/models-of/mine")
    for base in (f"{server.url}/models-of/mine/", f"{server.url}/"):
        html = httpx.get(base).text
        for reference in re.findall(r'(?:src|href)="([^"#]+)"', html):
            assert httpx.get(urljoin(base, reference)).status_code == 200, reference
    server.stop()
