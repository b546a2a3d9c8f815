"""Memory that a request causes ends with the request: 40 more of each kind leave nothing behind.

The resident memory of a server process, from a collection of its garbage to the moment before the
next one, with free memory given back both times: reference cycles count as kept. Most kinds keep
0 to 0.1 MB, none more than 1.1 MB, an arena of Python's allocator. Some keep 5 MB
once, when an arena of a session grows, so the best of several rounds counts: what each request
keeps is kept in every round. 40 KB a request are 1.6 MB.
"""

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from loadtests.kinds import KEY, KINDS, SETTINGS, Kind, ask_kind
from loadtests.server import ServerProcess, running_server
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.every_route import NEED_TORCH, TASKS, make_models

pytestmark = pytest.mark.slow

_REQUESTS = 40
_LOADS = 6
_ROUNDS = 6
_MAX_BYTES = 1_200_000
_SETTLE_SECONDS = 0.05
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A process with a model for each route, and one to load."""
    folder = tmp_path_factory.mktemp("models")
    shelf = folder / "shelf"
    shutil.copytree(STARTER_FOLDER / "sentiment", shelf / "spare")
    with running_server(
        make_models(folder),
        collecting=True,
        threads=1,
        model_dir=shelf,
        models_autoload="off",
        **SETTINGS,
    ) as process:
        yield process


@pytest.mark.parametrize("kind", [*KINDS, *TASKS], ids=lambda kind: kind.name.replace("/", " "))
def test_memory_ends_with_the_request(server: ServerProcess, kind: Kind) -> None:
    assert _kept(server, kind) <= _MAX_BYTES


def test_every_route_is_asked(server: ServerProcess) -> None:
    steps = [*KINDS, *TASKS, *(kind.then for kind in TASKS if kind.then is not None)]
    document = httpx.get(f"{server.url}/openapi.json", headers=BEARER).json()
    assert set(document["paths"]) - {step.path for step in steps} == NEED_TORCH


def test_requests_that_keep_40_kb_each_are_found(server: ServerProcess) -> None:
    """Those whose headers are not complete: the server keeps what has come of them."""
    head = "GET /info HTTP/1.1\r\n" + "".join(f"x-{n}: {'x' * 1000}\r\n" for n in range(40))
    with contextlib.ExitStack() as stack:

        def ask(numbers: range) -> None:
            for _ in numbers:
                client = socket.create_connection(("127.0.0.1", server.port))
                stack.enter_context(client).sendall(head.encode())

        assert _kept_of(server, ask, _REQUESTS) > _MAX_BYTES


def _kept(server: ServerProcess, kind: Kind) -> int:
    """See `_kept_of`."""
    # Loading a model takes as long as a hundred requests to it.
    number = _LOADS if kind.then is not None else _REQUESTS
    return _kept_of(
        server, lambda numbers: asyncio.run(ask_kind(server.port, kind, numbers)), number
    )


def _kept_of(server: ServerProcess, ask: Callable[[range], None], num_requests: int) -> int:
    """The bytes that so many requests leave, garbage included, in the best of several rounds."""
    ask(range(num_requests // 4))
    _, held = _collect(server)
    kept: list[int] = []
    while len(kept) < _ROUNDS and min(kept, default=_MAX_BYTES + 1) > _MAX_BYTES:
        ask(range(num_requests * (1 + len(kept)), num_requests * (2 + len(kept))))
        with_garbage, now = _collect(server)
        kept.append(with_garbage - held)
        held = now
    return min(kept)


def _collect(server: ServerProcess) -> tuple[int, int]:
    time.sleep(_SETTLE_SECONDS)  # the last reply was read before its request ended
    return server.collect()
