"""Keys: authentication, and the name under which a request is counted."""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import Scope

from maskdial.config import Config, key_fault
from maskdial.errors import ConfigError, ForbiddenError, UnauthorizedError, io_reason

ADMIN = "admin"
"""The name of the admin key."""

_METRICS = "metrics"
# The last are those of --api-key, by `key_name`. Shorter ones are free: such keys were called key-1
# and so on before, and what they own is reached by a key of that name.
_RESERVED = re.compile(rf"{ADMIN}|{_METRICS}|key-[0-9a-f]{{12}}", re.ASCII)
_NAME_ROUNDS = 100_000  # about 25 ms: a name is in logs, and must not tell a short key
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
# The page at / and /docs with their assets, and health checks, to be read. All else asks for a key.
_OPEN_PATHS = re.compile(r"/|/docs|/page/.*|/health|/health/(live|ready)|/ping")
_METRICS_PATH = "/metrics"
# Keys are looked up by a hash that depends on this: how long that takes says nothing about any key,
# because nobody outside knows which hash a guess has.
_SECRET = secrets.token_bytes(32)
# Of IPv6 with a zone (RFC 4007) that is as long as the name of an interface. A proxy may pass on
# anything, which is not to be kept.
_MAX_ADDRESS = 64
_NO_ADDRESS = "local"  # as a Unix socket has none
_HOW = "send it as 'Authorization: Bearer KEY' or as 'x-api-key'"


class Keys:
    """The keys of one server, held as hashes, each with a name for logs and metrics.

    Without ``--api-key`` and ``--api-key-file``, everyone may use the routes that change nothing.

    Raises:
        ConfigError: the key file cannot be used, or a key has two names.
    """

    def __init__(self, config: Config) -> None:
        self._file = config.api_key_file
        self._given = _joined(
            *(_hashes(key_name(key.get_secret_value()), key) for key in config.api_keys)
        )
        self._admin = _hashes(ADMIN, config.admin_key)
        self._metrics = _hashes(_METRICS, config.metrics_key)
        self._closed = bool(self._given) or self._file is not None
        self._clients = self._given
        _joined(self._given, self._admin, self._metrics)
        if self._file is not None:
            self._use(_read_text(self._file), self._file)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys that open the server, each once; none if no keys are needed."""
        if not self._closed:
            return ()
        return tuple(dict.fromkeys((*self._clients.values(), *self._admin.values())))

    @property
    def counts(self) -> bool:
        """Whether requests are counted by name: not while anyone may read the counts."""
        return bool(self._metrics)

    def reload(self) -> None:
        """Reads the key file again. If it cannot be used, the keys remain as they were.

        Raises:
            ConfigError: it cannot be used, a key in it has two names, or it is a pipe or a device,
                which could be waited for.
        """
        if self._file is not None:
            self._use(_read_text(self._file, opener=_open_regular), self._file)

    def _use(self, text: str, file: Path) -> None:
        clients = _joined(*_read_keys(text, file), self._given)
        # The admin key would otherwise open to a client what only its owner may do, and so on.
        _joined(clients, self._admin, self._metrics)
        self._clients = clients

    def check(self, scope: Scope, path: str) -> str | None:
        """Whether a request may use a path.

        Returns:
            The name of its key; None if it needs none.

        Raises:
            UnauthorizedError: its key is missing or wrong.
        """
        if not self._closed and not self._metrics:
            return None
        if path == _METRICS_PATH:
            return _name(scope, self._metrics, self._admin) if self._metrics else None
        if not self._closed or (scope["method"] != "POST" and _OPEN_PATHS.fullmatch(path)):
            return None
        return _name(scope, self._clients, self._admin)

    def check_admin(self, scope: Scope) -> None:
        """Whether a request may change the server.

        Raises:
            ForbiddenError: the server has no admin key, so nobody may.
            UnauthorizedError: the request's key is missing or another one.
        """
        if not self._admin:
            raise ForbiddenError(
                "this server was started without an admin key, so nobody may change it; start it "
                "with --admin-key or MASKDIAL_ADMIN_KEY"
            )
        _name(scope, self._admin, kind="admin key")


def key_name(key: str) -> str:
    """The name of a key that was given without one.

    Files, batches and stored responses belong to names, and outlive the server. So a name is of the
    key itself, by PBKDF2 (RFC 8018), and another key never has it, as its place in a list would.
    """
    digest = hashlib.pbkdf2_hmac("sha256", key.encode(), b"maskdial key name", _NAME_ROUNDS, 6)
    return f"key-{digest.hex()}"


def sent_hashes(scope: Scope) -> tuple[bytes, ...]:
    """What stands for the keys that a request sends, in this process alone."""
    return tuple(_hash(key) for key in _sent_keys(scope))


def address_of(scope: Scope) -> str:
    """The address of a request's sender: its name where there are no keys.

    Addresses of IPv6 are those of their networks (/64), which one subscriber has whole.
    """
    host = (scope.get("client") or ("",))[0]
    return _network(host) if len(host) <= _MAX_ADDRESS else _NO_ADDRESS


@lru_cache(4096)
def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _NO_ADDRESS
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address.packed, 64), strict=False))
    return str(address)


def _name(scope: Scope, *tables: Mapping[bytes, str], kind: str = "key") -> str:
    """The name of the key that was sent, if it is in one of these tables."""
    sent = sent_hashes(scope)
    names = [table[digest] for table in tables for digest in sent if digest in table]
    if not names:
        raise UnauthorizedError(f"the {kind} {'is wrong' if sent else 'is missing'}; {_HOW}")
    return names[0]


def _sent_keys(scope: Scope) -> Iterator[bytes]:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip().encode("latin-1")
    if key := headers.get("x-api-key"):
        yield key.encode("latin-1")


def _read_text(path: Path, opener: Callable[[str, int], int] | None = None) -> str:
    try:
        with open(path, encoding="utf-8", opener=opener) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {io_reason(error)}") from error


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file, so it is read at the start only")
    return descriptor


def _read_keys(text: str, path: Path) -> list[dict[bytes, str]]:
    """The keys of a file by their hashes, one a line."""
    keys = []
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        # The line itself is not repeated: it may be a key.
        where = f"line {number} of the key file {path}"
        if not (colon and _NAME.fullmatch(name)):
            raise ConfigError(f"{where} is not NAME:KEY")
        if (fault := key_fault(key)) is not None:
            raise ConfigError(f"{where} is not NAME:KEY: {fault}")
        if _RESERVED.fullmatch(name):
            raise ConfigError(f"{where}: {name!r} is a reserved name")
        keys.append({_hash(key.encode()): name})
    if not keys:
        raise ConfigError(f"the key file {path} has no keys; write one NAME:KEY a line")
    return keys


def _joined(*tables: Mapping[bytes, str]) -> dict[bytes, str]:
    """One table of several.

    Raises:
        ConfigError: a key is in two of them, under two names.
    """
    keys: dict[bytes, str] = {}
    for table in tables:
        for digest, name in table.items():
            other = keys.setdefault(digest, name)
            if other != name:
                raise ConfigError(
                    f"{other!r} and {name!r} have the same key; give each a key of its own"
                )
    return keys


def _hashes(name: str, key: SecretStr | None) -> dict[bytes, str]:
    return {} if key is None else {_hash(key.get_secret_value().encode()): name}


def _hash(key: bytes) -> bytes:
    return hmac.digest(_SECRET, key, "sha256")
