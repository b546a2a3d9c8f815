"""A call without any input or output: what its request looks like, and how its reply is read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from maskdial_client import replies

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, and the statuses of the replies that are no errors."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    accepts: frozenset[int] = frozenset({200})

    @property
    def content(self) -> bytes | None:
        """The JSON body. Raises ValueError for NaN and infinity, which JSON does not have."""
        if self.body is None:
            return None
        return json.dumps(self.body, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how the document in its successful reply becomes a result."""

    request: Request
    parse: Callable[[Any], T]

    def read(self, body: bytes) -> T:
        """The result in a successful reply's body. Raises ProtocolError."""
        try:
            return self.parse(json.loads(body))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            what = f"{self.request.method} {self.request.path}"
            raise replies.not_understood(what, error) from error
