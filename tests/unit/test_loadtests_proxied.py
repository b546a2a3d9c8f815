"""`loadtests.proxied`, with a server that stands for both sides."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.__main__ import main
from loadtests.server import ServerProcess, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server({}) as server:
        yield server


@pytest.mark.parametrize(("work", "clients"), [("generate", 3), ("classify", 2)])
def test_both_sides_are_measured(
    server: ServerProcess, work: str, clients: int, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    ports = ["--direct", f"{server.port},{server.port}", "--proxy", str(server.port)]
    options = ["--work", work, "--clients", str(clients), "--new-tokens", "4", "--seconds", "0.5"]
    assert main(["proxied", *ports, *options, "--output", str(output)]) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    (row,) = report["sections"]["proxied"]["rows"]
    assert (row["work"], row["clients"]) == (work, clients)
    assert 0 < row["least_ratio"] <= row["ratio"] <= row["greatest_ratio"]
    assert row["direct_one_ms"] > 0
    assert row["proxied_one_ms"] > 0


def test_each_server_has_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["proxied", "--direct", "1,2", "--proxy", "3", "--clients", "1"])
    assert caught.value.code == 2
    assert "as many clients as servers" in capsys.readouterr().err
