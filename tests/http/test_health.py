"""`maskdial health`: it asks where the settings have the server listen, and says what it heard."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maskdial import cli, health
from maskdial.errors import ConfigError
from maskdial.http.lifecycle import Phase
from maskdial.registry.catalog import STARTER_FOLDER

ROOT = Path(__file__).resolve().parents[2]
TLS = ROOT / "tests" / "data" / "tls"
MODELS = {"sentiment": STARTER_FOLDER / "sentiment"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MASKDIAL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(
    params=[
        {},
        {"api_keys": ["one"], "root_path": "/llm"},
        {"host": "0.0.0.0"},
        {"ssl_certfile": TLS / "first.crt", "ssl_keyfile": TLS / "first.key"},
        {"uds": "socket"},
    ],
    ids=["plain", "keys", "all interfaces", "TLS", "Unix socket"],
)
def server(
    request: pytest.FixtureRequest, start_server: Callable[..., Any], tmp_path: Path
) -> Iterator[tuple[Any, list[str]]]:
    """A server, and the flags with which it was started."""
    settings = dict(request.param)
    if "uds" in settings:
        settings["uds"] = tmp_path / settings["uds"]
    running = start_server(models=MODELS, **settings)
    flags = [
        "--api-key" if name == "api_keys" else f"--{name.replace('_', '-')}" for name in settings
    ]
    values = [value[0] if isinstance(value, list) else str(value) for value in settings.values()]
    address = running.server.servers[0].sockets[0].getsockname()
    port = [] if "uds" in settings else ["--port", str(address[1])]
    pairs = [part for pair in zip(flags, values, strict=True) for part in pair]
    yield running, [*pairs, *port]
    running.stop()


def test_a_ready_server_and_one_that_drains(
    server: tuple[Any, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    running, flags = server
    assert cli.main(["health", *flags]) == 0
    assert capsys.readouterr().out == "ready\n"
    lifecycle = running.server._context.lifecycle
    lifecycle.phase = Phase.DRAINING
    assert cli.main(["health", *flags]) == 1
    assert "is not ready: draining" in capsys.readouterr().err
    lifecycle.phase = Phase.SERVING


def test_it_reads_the_same_variables_and_the_same_file(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_server(models=MODELS)
    file = tmp_path / "maskdial.toml"
    file.write_text(f"port = {running.url.rpartition(':')[2]}\n")
    assert cli.main(["health", "--config", str(file)]) == 0
    monkeypatch.setenv("MASKDIAL_CONFIG", str(file))
    assert cli.main(["health"]) == 0
    monkeypatch.setenv("MASKDIAL_PORTS", "1")
    assert cli.main(["health"]) == 1
    running.stop()


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    for flags in (["--port", port], ["--uds", str(tmp_path / "no socket")]):
        assert cli.main(["health", *flags]) == 1
        assert "does not answer" in capsys.readouterr().err
    assert cli.main(["health", "--port", "0"]) == 1
    assert "name the one that the server's log has" in capsys.readouterr().err


def test_what_answers_and_is_no_server_of_ours(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """TLS where the settings have none: the reply is no HTTP."""
    running = start_server(
        models=MODELS, ssl_certfile=TLS / "first.crt", ssl_keyfile=TLS / "first.key"
    )
    assert cli.main(["health", "--port", running.url.rpartition(":")[2]]) == 1
    assert "does not answer" in capsys.readouterr().err
    running.stop()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="it needs /proc")
@pytest.mark.parametrize("init", [[], ["/sbin/docker-init", "--"]], ids=["process 1", "init"])
def test_the_flags_of_the_servers_process(
    init: list[str], server: tuple[Any, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in has the command line that a container's first process has."""
    _, flags = server
    sleeper = [sys.executable, "-c", "input()", *init, "python3", "maskdial", "serve", *flags]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as process:
        try:
            assert cli.main(["health", "--pid", str(process.pid)]) == 0
            assert capsys.readouterr().out == "ready\n"
            # Its own flags come before those.
            assert cli.main(["health", "--pid", str(process.pid), "--port", "0", "--uds", "none"])
        finally:
            process.communicate(b"\n")


def test_a_process_that_serves_nothing() -> None:
    if Path("/proc/self/cmdline").exists():
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            assert health.arguments_of(process.pid) == []
            process.communicate(b"\n")
    with pytest.raises(ConfigError, match="--pid 0"):
        health.arguments_of(0)


def test_the_image_asks_in_this_way() -> None:
    """Not by an address of its own, which TLS, --port and --uds would make wrong."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
    assert json.loads(command) == ["maskdial", "health", "--pid", "1"]
