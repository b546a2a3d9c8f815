"""Listener: the sockets of an address, taken before models are loaded for it."""

import errno
import os
import socket

from maskdial.errors import ConfigError, io_reason


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listens at all addresses that a host's name has, as asyncio's ``create_server`` does.

    Args:
        host: an address, or a name.
        port: 0 for any free one.
        backlog: connections that may wait to be accepted.

    Raises:
        ConfigError: the address is another's, or not of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            if os.name == "posix":  # on Windows it would take ports of others
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(backlog)
            listener.setblocking(False)
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    return sockets


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or choose another one with --port"
    if error.errno == errno.EACCES:
        return "the system does not allow it; choose a --port from 1024 on"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host is no address of this machine ({io_reason(error)})"
    return io_reason(error)
