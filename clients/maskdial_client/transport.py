"""What both clients share of httpx: the options they pass to it, and its errors as ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from maskdial_client.errors import ConnectionFailedError, ResponseTimeoutError

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_TIMEOUT = 5.0


def http_options(
    base_url: str,
    api_key: str | None,
    timeout: float | None,
    max_connections: int | None,
    policy: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments for httpx.Client and httpx.AsyncClient."""
    headers = {"accept": "application/json, text/event-stream", "user-agent": "maskdial-client"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    if policy is not None:
        headers["x-policy"] = policy
    return {
        "base_url": base_url,
        "headers": headers,
        "timeout": http_timeout(timeout),
        "limits": httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        ),
    }


def http_timeout(timeout: float | None) -> httpx.Timeout:
    """``timeout`` seconds for each read or write, and at most five to connect."""
    connect = _CONNECT_TIMEOUT if timeout is None else min(timeout, _CONNECT_TIMEOUT)
    return httpx.Timeout(timeout, connect=connect)


def http_body_headers(content: bytes | None) -> dict[str, str]:
    """The headers that describe a request's body."""
    return {} if content is None else {"content-type": "application/json"}


@contextmanager
def transport_errors(base_url: str) -> Iterator[None]:
    """Raises httpx's exceptions as the client's own."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ConnectionFailedError(f"could not connect to {base_url} in time") from error
    except httpx.TimeoutException as error:
        raise ResponseTimeoutError(
            f"no data from {base_url} within the timeout; allow a longer one"
        ) from error
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConnectionFailedError(f"{base_url!r} is not an http:// or https:// URL") from error
    except httpx.ConnectError as error:
        raise ConnectionFailedError(
            f"could not connect to {base_url} ({error}); `maskdial serve` starts a server"
        ) from error
    except httpx.RequestError as error:
        raise ConnectionFailedError(
            f"lost the connection to {base_url} ({str(error) or type(error).__name__})"
        ) from error
