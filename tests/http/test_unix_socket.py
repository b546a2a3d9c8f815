"""A Unix socket belongs to one server: who may have it, what it replaces, what it leaves."""

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.errors import ConfigError
from maskdial.http.unix_socket import UnixSocket
from maskdial.registry.catalog import STARTER_FOLDER

MODELS = {"sentiment": STARTER_FOLDER / "sentiment"}

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # pytest's own are too long for a socket
        yield Path(name)


def test_a_second_server_is_refused_and_changes_nothing(folder: Path) -> None:
    path = folder / "s"
    first = UnixSocket(path)
    with pytest.raises(ConfigError, match="another server listens there"):
        UnixSocket(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
    first.close()
    assert not path.exists()


def test_a_server_whose_queue_is_full_is_not_replaced(folder: Path) -> None:
    path = folder / "s"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(os.fspath(path))
        with pytest.raises(ConfigError, match="another server listens there"):
            UnixSocket(path)


def test_a_link_is_not_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(folder / "theirs"))
    (folder / "s").symlink_to(folder / "theirs")
    with pytest.raises(ConfigError, match="is no socket; remove it, or use another"):
        UnixSocket(folder / "s")
    assert (folder / "s").is_symlink()


def test_what_a_dead_server_has_left_is_replaced(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    UnixSocket(path).close()
    assert not path.exists()


def test_the_socket_of_another_server_is_not_removed(folder: Path) -> None:
    path = folder / "s"
    first = UnixSocket(path)
    path.unlink()  # by somebody who thought that the server was gone
    second = UnixSocket(path)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()
    second.close()  # nothing is left to be removed


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o007, 0o770), (0, 0o777)])
def test_the_mode_follows_the_umask(folder: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        listener = UnixSocket(folder / "s")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "s").stat().st_mode) == mode
    listener.close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing/s", "No such file"),
        ("file", "is no socket"),
        ("file/s", "Not a directory"),
        ("", "is no socket"),
        ("x" * 200, "too long"),
    ],
)
def test_a_path_that_cannot_be_used_is_told(folder: Path, path: str, words: str) -> None:
    (folder / "file").write_text("content")
    with pytest.raises(ConfigError, match=words):
        UnixSocket(folder / path if path else Path(path))
    assert (folder / "file").read_text() == "content"


@pytest.mark.parametrize(
    ("trusted", "client"),
    [(None, "192.0.2.7"), ("unix", "192.0.2.7"), ("127.0.0.1", "local"), ("", "local")],
)
def test_clients_behind_a_proxy_at_the_socket_are_told_apart(
    start_server: Callable[..., Any],
    folder: Path,
    trusted: str | None,
    client: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {} if trusted is None else {"forwarded_allow_ips": trusted}
    path = folder / "s"
    server = start_server(models=MODELS, uds=path, **settings)
    try:
        with (
            caplog.at_level("INFO", "maskdial.access"),
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http,
        ):
            http.get("http://x/info", headers={"x-forwarded-for": "192.0.2.7"})
            http.get("http://x/health")  # the record of the first one is written by now
    finally:
        server.stop()
    records = (getattr(each, "access", {}) for each in caplog.records)
    assert {each["client"] for each in records if each.get("route") == "/info"} == {client}
    assert not path.exists()
