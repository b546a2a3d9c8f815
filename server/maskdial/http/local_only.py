"""LocalOnly: who may use a server without keys that listens on this machine alone, or that says by
which names it is called.

Its address is all that protects it, and browsers on the machine reach that as well. So a web page
of anywhere could send it requests: to its address (a page of another origin), or to a name of the
page's own that leads here by now (DNS rebinding), where the page may read the replies, too.
"""

import contextlib
import ipaddress
import re
import socket
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import Scope

from maskdial.config import Config
from maskdial.errors import ForbiddenError, shortened

# No page of the web has such a name. Containers call the machine host.docker.internal.
_LOCAL_NAME = re.compile(r"[\w-]+|[\w.-]+\.(localhost|internal)", re.ASCII)
_WEB = ("http", "https", "")  # applications and extensions have schemes of their own


class LocalOnly:
    """Refuses requests that web pages of elsewhere have a browser send.

    Args:
        config: says where the server listens, and who is allowed beside this machine.
    """

    def __init__(self, config: Config) -> None:
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.cors_allow_origins)

    @classmethod
    def of(cls, config: Config) -> "LocalOnly | None":
        """That of a server; None for one that has keys, or that others may reach by any name."""
        has_keys = bool(config.api_keys) or config.api_key_file is not None
        if has_keys or config.uds is not None:
            return None
        is_for_its_machine = _is_loopback(config.host.lower())
        return cls(config) if is_for_its_machine or config.allowed_hosts else None

    def check(self, scope: Scope) -> None:
        """Whether a request may be answered.

        Raises:
            ForbiddenError: it may not.
        """
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
        if host and not self._is_known(host):
            raise ForbiddenError(
                f"{shortened(host)!r} is no name of this server, which has no keys; call it by its "
                "address, allow the name with --allowed-host, or set keys"
            )
        if origin and not self._may_ask(origin, host):
            raise ForbiddenError(
                f"web pages of {shortened(origin)!r} may not use this server, which has no keys; "
                "allow them with --cors-allow-origin, or set keys"
            )

    def _is_known(self, host: str) -> bool:
        name = _name_of(f"//{host}")
        return bool(name) and (
            "*" in self._hosts
            or name in self._hosts
            or _LOCAL_NAME.fullmatch(name) is not None
            or _is_address(name)
        )

    def _may_ask(self, origin: str, host: str | None) -> bool:
        """Whether a page of an origin may send requests to a host, which is a known one."""
        if "*" in self._origins or origin in self._origins:
            return True
        scheme = origin.partition("://")[0].lower() if "://" in origin else ""
        if scheme not in _WEB:
            return True
        if host and origin.partition("://")[2].lower() == host.lower():
            return True  # the server's own page
        name = _name_of(origin)
        # Pages of this machine. Others may have a name without a dot, too.
        return name in self._hosts or name.endswith(".localhost") or _is_loopback(name)


@lru_cache(1024)
def _name_of(url: str) -> str:
    """The host of a URL in lower case, without a final dot; empty if it has none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


@lru_cache(1024)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    with contextlib.suppress(OSError):  # 127.1
        return ipaddress.ip_address(socket.inet_aton(name)).is_loopback
    return False
