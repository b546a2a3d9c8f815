"""Listener: the sockets of an address, taken before models are loaded for it."""

import errno
import os
import socket
from itertools import chain

from maskdial.errors import ConfigError, io_reason

_Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]

_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listens at all addresses that a host's name has, as asyncio's ``create_server`` does.

    Those of a family that the system does without are left out, as IPv6 may be switched off where
    ``localhost`` still has an address of it.

    Args:
        host: an address, or a name.
        port: 0 for any free one.
        backlog: connections that may wait to be accepted.

    Raises:
        ConfigError: the address is another's, or not of this machine, or none is left.
    """
    sockets: list[socket.socket] = []
    left_out: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sockets.append(_listener(family, kind, protocol, address, backlog))
            except OSError as error:
                if not _is_off(family, error):
                    raise
                left_out = error
        if left_out is not None and not sockets:
            raise left_out
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    return sockets


def listen_in_groups(host: str, port: int, backlog: int, number: int) -> list[list[socket.socket]]:
    """As `listen`, so many times at the same addresses: the system distributes connections among
    the groups of sockets.

    Raises:
        ConfigError: as `listen`, or the system has no such sockets.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("--front-ends: this system lets no two processes listen at one address")
    # Sockets that share an address take it from no other server, but from one that does so, too.
    first = listen(host, port, backlog)
    taken = [(each.family, each.type, each.proto, each.getsockname()) for each in first]
    for each in first:
        each.close()
    groups: list[list[socket.socket]] = []
    try:
        for _ in range(number):
            groups.append([])
            for where in taken:
                groups[-1].append(_listener(*where, backlog, is_shared=True))
    except OSError as error:
        for listener in chain.from_iterable(groups):
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    return groups


def _listener(
    family: int,
    kind: int,
    protocol: int,
    address: _Address,
    backlog: int,
    *,
    is_shared: bool = False,
) -> socket.socket:
    """Raises: OSError: the system has no such sockets, or not this address."""
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows it would take ports of others
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _is_off(family: int, error: OSError) -> bool:
    """Whether the system does without a family of addresses."""
    if error.errno in _NO_FAMILY:
        return True
    # Linux with net.ipv6.conf.all.disable_ipv6 makes such sockets, and has no address for them.
    return family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or choose another one with --port"
    if error.errno == errno.EACCES:
        return "the system does not allow it; choose a --port from 1024 on"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host is no address of this machine ({io_reason(error)})"
    return io_reason(error)
