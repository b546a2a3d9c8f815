"""A server with the models that ship."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def url(server: Any) -> str:
    return str(server.url)


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
