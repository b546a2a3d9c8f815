"""UnixSocket: a listening socket in the file system, which belongs to one server."""

import os
import socket
import stat
from pathlib import Path

from maskdial.errors import ConfigError

_BACKLOG = 2048


class UnixSocket:
    """Listens at a path until it is closed. Its mode is what the umask leaves of 0777.

    A socket that a server has left behind is replaced.

    Args:
        path: of the socket.

    Raises:
        ConfigError: another server listens there, something else is there, or none can be made.
    """

    def __init__(self, path: Path) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError("--uds: this system has no Unix sockets")
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_left_behind(path)
            self.socket.bind(os.fspath(path))
            self.socket.listen(_BACKLOG)
            self._identity = _identity(path)
        except (OSError, ConfigError) as error:
            self.socket.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"--uds {path}: no socket can be made there: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Ends it, and removes its file unless another one has taken its place."""
        self.socket.close()
        try:
            if _identity(self._path) == self._identity:
                self._path.unlink()
        except OSError:  # it is gone, or its folder is another's by now
            pass


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_left_behind(path: Path) -> None:
    try:
        found = path.lstat()  # a link is not a server's
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"--uds {path}: it exists, and is no socket; remove it, or use another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its queue is full
            pass
    raise ConfigError(f"--uds {path}: another server listens there; stop it, or use another path")
