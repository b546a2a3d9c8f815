"""What a request brought that means nothing here: told in headers of the reply, and in the log."""

import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from maskdial.errors import printable, shortened

FIELDS, TOOLS, CLIPPED = "x-ignored-fields", "x-ignored-tools", "x-clipped-fields"

_MAX_TOLD = 16
_MAX_NAME = 64  # characters
_MAX_CLIENTS = 256
_MAX_LOGGED = 64  # names of a client

_log = logging.getLogger("maskdial.requests")


class Ignored:
    """What one request brought that is ignored.

    Attributes:
        fields: unknown fields, and known ones that mean nothing here, by the place where they stand
            and without indices, as in ``messages.cache_control``.
        tools: tools that were left out.
        clipped: fields whose value was more than the model has.
    """

    def __init__(self) -> None:
        self.fields: dict[str, None] = {}
        self.tools: dict[str, None] = {}
        self.clipped: dict[str, None] = {}

    def add_field(self, name: str, within: str = "") -> None:
        """Notes a field of the body, or of an object in it."""
        if len(self.fields) <= _MAX_TOLD:  # one more, so that the header says that there are more
            written = shortened(name, _MAX_NAME)
            self.fields[f"{within}.{written}" if within else written] = None

    def add_tool(self, name: str) -> None:
        """Notes a tool that the model is not told of, for the reply's headers."""
        if len(self.tools) <= _MAX_TOLD:
            self.tools[shortened(name, _MAX_NAME)] = None

    @property
    def headers(self) -> dict[str, str]:
        """As headers of the reply; none for what there is none of."""
        named = ((FIELDS, self.fields), (TOOLS, self.tools), (CLIPPED, self.clipped))
        return {header: _listed(names) for header, names in named if names}


def _listed(names: Iterable[str]) -> str:
    """Names on one line of ASCII; a comma within one is escaped."""
    written = [json.dumps(name)[1:-1].replace(",", r"\u002c") for name in names]
    told = [name.replace("\x7f", r"\u007f") for name in written[:_MAX_TOLD]]
    return ", ".join([*told, "..."] if len(written) > _MAX_TOLD else told)


class IgnoredLog:
    """Tells the log of each name once for each client; of so many that it stays small."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, set[str]] = OrderedDict()

    def note(self, client: str, ignored: Ignored) -> None:
        """Writes a line about what was not told before."""
        names = [*ignored.fields, *(f"tool {name}" for name in ignored.tools)]
        if not names:
            return
        told = self._told.setdefault(client, set())
        self._told.move_to_end(client)
        if len(self._told) > _MAX_CLIENTS:
            self._told.popitem(last=False)
        new = [name for name in names if name not in told][: _MAX_LOGGED - len(told)]
        if new:
            told.update(new)
            listed = ", ".join(map(printable, new))
            _log.info("ignored in requests of %s: %s", printable(client), listed)


_NOTED: ContextVar[Ignored | None] = ContextVar("ignored", default=None)


@contextlib.contextmanager
def noting(ignored: Ignored | None) -> Iterator[None]:
    """Has bodies that are read within it note what they ignore; with None, they refuse it."""
    token = _NOTED.set(ignored)
    try:
        yield
    finally:
        _NOTED.reset(token)


def noted() -> Ignored | None:
    """Where a body that is being read notes what it ignores; None: it refuses unknown fields."""
    return _NOTED.get()


def note_field(name: str, within: str = "") -> None:
    """Notes that a known field of the body that is being read means nothing here."""
    if (ignored := _NOTED.get()) is not None:
        ignored.add_field(name, within)


def note_tool(name: str) -> None:
    """Notes that a tool of the body that is being read is left out."""
    if (ignored := _NOTED.get()) is not None:
        ignored.add_tool(name)
