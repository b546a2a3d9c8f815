"""Health: asks the server on this machine whether it is ready, at the address of its settings."""

import http.client
import ipaddress
import json
import os
import socket
import ssl
from pathlib import Path

from maskdial.config import Config
from maskdial.errors import ConfigError, UnavailableError, io_reason, shortened

_TIMEOUT_SECONDS = 5.0
_PATH = "/health/ready"


def check(config: Config) -> None:
    """Asks once.

    Raises:
        ConfigError: the settings do not say where the server listens.
        UnavailableError: it does not answer, or is not ready.
    """
    connection = _connection(config)
    where = f"the server at {connection.host}"
    try:
        connection.request("GET", _PATH)
        reply = connection.getresponse()
        content = reply.read(4096)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"{where} does not answer: {io_reason(error)}") from error
    finally:
        connection.close()
    if reply.status != http.client.OK:
        raise UnavailableError(f"{where} is not ready: {_status(content)}")


def arguments_of(pid: int) -> list[str]:
    """The arguments of ``maskdial serve`` as a process has them, or passes them on to it (``init``
    of a container); empty if it does neither.

    Raises:
        ConfigError: there is no such process, or the system does not tell.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError as error:
        raise ConfigError(f"--pid {pid}: {error.strerror}; it needs Linux's /proc") from error
    arguments = [os.fsdecode(word) for word in words[:-1]]
    return arguments[arguments.index("serve") + 1 :] if "serve" in arguments else []


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, whose path is the host."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


def _connection(config: Config) -> http.client.HTTPConnection:
    if config.uds is not None:
        connection = _UnixConnection("localhost", timeout=_TIMEOUT_SECONDS)
        connection.host = str(config.uds)
        return connection
    if config.port == 0:
        raise ConfigError("--port 0 is any free port; name the one that the server's log has")
    host = _reachable(config.host)
    if config.ssl_certfile is None:
        return http.client.HTTPConnection(host, config.port, timeout=_TIMEOUT_SECONDS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate names the host as others know it
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, config.port, timeout=_TIMEOUT_SECONDS, context=context)


def _reachable(host: str) -> str:
    """The address for one to listen on: this machine's own for that of all interfaces."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _status(content: bytes) -> str:
    try:
        return str(json.loads(content)["status"])
    except (ValueError, KeyError, TypeError):
        return f"it says {shortened(repr(content))}"
