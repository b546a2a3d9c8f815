"""Prometheus itself reads the server's metrics and answers every query of the dashboard."""

import math
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.deploy import queries

PROMETHEUS = shutil.which("prometheus")
# These texts may have no drafts, and nothing divided by nothing is not a number.
EMPTY = {"Draft tokens accepted"}
SCRAPES = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian's package) is not installed"),
]


@pytest.fixture(scope="module")
def prometheus(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Prometheus with our rules, and a server that it has scraped between some requests."""
    server = start_server()
    folder = tmp_path_factory.mktemp("prometheus")
    target = server.url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms}\n"
        f"rule_files: [{queries.RULES}]\n"
        "scrape_configs:\n"
        f"  - {{job_name: maskdial, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert PROMETHEUS is not None
    process = subprocess.Popen(
        [
            PROMETHEUS,
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ],
        cwd=folder,
    )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            _wait_for_scrapes(client, 1)
            _send_requests(server.url)
            _wait_for_scrapes(client, SCRAPES)
            yield client
    finally:
        process.terminate()
        process.wait(30)
        server.stop()


def _send_requests(url: str) -> None:
    replies = [
        httpx.post(f"{url}/fill-mask", json={"inputs": "The [MASK] barked."}, timeout=60),
        httpx.post(f"{url}/classify", json={"inputs": ["A fine film.", "Dull."]}, timeout=60),
        httpx.post(f"{url}/generate", json={"inputs": "Once upon a time"}, timeout=60),
    ]
    assert [reply.status_code for reply in replies] == [200] * 3


def _wait_for_scrapes(prometheus: httpx.Client, number: int) -> None:
    until = time.monotonic() + 60
    while True:
        assert time.monotonic() < until, "Prometheus did not scrape the server"
        time.sleep(0.2)
        try:
            result = _ask(prometheus, 'count_over_time(up{job="maskdial"}[1m])')
        except httpx.TransportError:
            continue  # it has not started yet
        if result and int(result[0]["value"][1]) >= number:
            return


def _ask(prometheus: httpx.Client, query: str) -> list[dict[str, Any]]:
    reply = prometheus.get("/api/v1/query", params={"query": query})
    if reply.status_code == 503:
        return []  # it is still opening its storage
    content = reply.json()
    assert content["status"] == "success", content
    result: list[dict[str, Any]] = content["data"]["result"]
    return result


def test_every_panel_shows_something(prometheus: httpx.Client) -> None:
    empty = set()
    for query in queries.dashboard_queries():
        text = query.text.replace("$job", "maskdial")
        for variable in ("$instance", "$model"):
            text = text.replace(variable, ".*")
        values = [float(series["value"][1]) for series in _ask(prometheus, text)]
        if all(math.isnan(value) for value in values):
            empty.add(query.where)
    assert empty <= EMPTY
