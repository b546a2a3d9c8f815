"""Call: a request to one route, and how the reply becomes a result.

Nothing here does input or output. Where a route takes one input or a list of them, the result of
its call is always a list with one entry per input; the client's method unwraps a single one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

from maskdial_client.errors import ProtocolError

T = TypeVar("T")


class Grammar(TypedDict):
    """What the text must match: a JSON schema, a regular expression or a Lark grammar."""

    type: Literal["json", "json_schema", "regex", "lark"]
    value: Any


class TaskOptions(TypedDict, total=False):
    """Options of every task. None means the server's default.

    ``deadline`` is the request's timeout on the server, in seconds: past it the server gives up and
    the client raises DeadlineError. Keep the client's own ``timeout`` longer than that. ``mask`` is
    the attention mask, for models that have both; to generate also ``prefix`` and ``block``.
    """

    deadline: float | None
    mask: Literal["full", "causal", "prefix", "block"] | None


class TextOptions(TaskOptions, total=False):
    """Options of tasks that can truncate. None means the server's default.

    A text longer than the model's maximum length is refused unless ``truncate`` is true, which cuts
    it on the side named by ``truncation_direction``.
    """

    truncate: bool | None
    truncation_direction: Literal["left", "right"] | None


# The wire's names for options that are fields of the request rather than task parameters.
_REQUEST_FIELDS = {
    "deadline": "timeout",
    "mask": "mask",
    "priority": "priority",
    "cache_salt": "cache_salt",
}


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request, and the statuses that do not count as errors."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    accepts: frozenset[int] = frozenset({200})

    @property
    def content(self) -> bytes | None:
        """The JSON body. Raises ValueError for NaN and infinity, which JSON cannot express."""
        if self.body is None:
            return None
        return json.dumps(self.body, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and the function that parses the JSON document of its reply.

    ``parse`` may raise KeyError, TypeError and the like; ``read`` turns them into ProtocolError.
    """

    request: Request
    parse: Callable[[Any], T]

    def read(self, body: bytes) -> T:
        """Parses the body of a successful reply. Raises ProtocolError."""
        try:
            return self.parse(json.loads(body))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise unexpected_reply(f"{self.request.method} {self.request.path}", error) from error


def task_call(
    path: str,
    inputs: object,
    body: Mapping[str, Any],
    parse_one: Callable[[Any], T],
    *,
    always_list: bool = False,
) -> Call[list[T]]:
    """A POST to a route that replies to a list of ``inputs`` with a list of the same length.

    To a single input it replies with the bare entry, or if ``always_list`` with a list of one.
    """
    batch = isinstance(inputs, list)
    count = len(inputs) if isinstance(inputs, list) else 1

    def parse(document: Any) -> list[T]:
        entries = document if batch or always_list else [document]
        if not isinstance(entries, list):
            raise TypeError("expected a list")
        if len(entries) != count:
            raise ValueError(f"{len(entries)} results for {count} inputs")
        return [parse_one(entry) for entry in entries]

    return Call(Request("POST", path, body), parse)


def task_body(
    inputs: Mapping[str, Any], model: str | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a route that takes its parameters in a ``parameters`` object."""
    given = {name: value for name, value in parameters.items() if value is not None}
    fields = {_REQUEST_FIELDS[name]: given.pop(name) for name in _REQUEST_FIELDS if name in given}
    body = dict(inputs)
    if given:
        body["parameters"] = given
    if model is not None:
        body["model"] = model
    return {**body, **fields}


def flat_body(
    inputs: Mapping[str, Any], model: str | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a route that takes its parameters beside the inputs."""
    given = {**parameters, "model": model}
    fields = {_REQUEST_FIELDS.get(name, name): value for name, value in given.items()}
    return {**inputs, **{name: value for name, value in fields.items() if value is not None}}


def unexpected_reply(what: str, error: Exception) -> ProtocolError:
    """The exception for a reply to ``what`` that could not be parsed because of ``error``."""
    return ProtocolError(
        f"unexpected reply to {what} ({type(error).__name__}: {error}); is this a maskdial server?"
    )
