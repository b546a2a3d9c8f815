"""Entries: the requests of a log, each with the reply that it got."""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskdial.batches.lines import Line
from maskdial.errors import ConfigError, ValidationError, io_reason
from maskdial.receipts.receipt import HEADER

_Key = str | int
_LAST_COMMENT = re.compile(rf"^: {HEADER} (\S*)\s*\Z", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """A request with its reply, as a log has them.

    Attributes:
        path: of the request.
        body: its JSON.
        reply: the body of the reply: JSON, or the text of a stream as it came.
        receipt: of the reply; empty if it has none.
    """

    path: str
    body: bytes
    reply: bytes
    receipt: str

    @classmethod
    def of(cls, content: Mapping[str, Any], answer: Mapping[str, Any]) -> "Entry":
        """An entry of a request and of its answer, as batches have them.

        Raises:
            ValidationError: one of them has not what it takes.
        """
        path, body, response = content.get("url"), content.get("body"), answer.get("response")
        if not isinstance(path, str) or not path.startswith("/"):
            raise ValidationError("the request has no url, such as /v1/completions")
        if not isinstance(body, dict):
            raise ValidationError("the request has no body, an object")
        if not isinstance(response, dict) or "body" not in response:
            raise ValidationError("the answer has no response with a body")
        reply, receipt = response["body"], response.get("receipt") or ""
        if isinstance(reply, str) and not receipt:
            receipt = receipt_of_stream(reply)
        if not isinstance(receipt, str):
            raise ValidationError("the receipt is no text")
        written = reply if isinstance(reply, str) else json.dumps(reply)
        return cls(path, json.dumps(body).encode(), written.encode(errors="replace"), receipt)


def receipt_of_stream(stream: str) -> str:
    """The receipt in the comment that ends a stream; empty if there is none."""
    found = _LAST_COMMENT.search(stream)
    return "" if found is None else found[1]


class AnswerFile:
    """The answers of a batch, found by the ``custom_id`` or the number of their line.

    Args:
        path: of the file; 100 bytes of memory are kept of each line.

    Raises:
        ConfigError: it cannot be read, or a line of it is no answer.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[_Key, int] = {}
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(path.open("rb"))
                self._index(path)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {io_reason(error)}") from error
            stack.pop_all()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def find(self, line: Line) -> Mapping[str, Any] | None:
        """The answer to a line; None if there is none."""
        place = self._places.get(line.content.get("custom_id", line.number))
        if place is None:
            return None
        self._file.seek(place)
        found = json.loads(self._file.readline())
        assert isinstance(found, dict), "it was one when it was indexed"
        return found

    def _index(self, path: Path) -> None:
        place = 0
        for number, raw in enumerate(self._file, 1):
            if raw.strip():
                try:
                    content = json.loads(raw)
                    key = content["custom_id"] if "custom_id" in content else content["line"]
                except (ValueError, RecursionError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{path}, line {number} is no answer of a batch: a JSON object with "
                        "custom_id or line"
                    ) from error
                if not isinstance(key, str | int) or self._places.setdefault(key, place) != place:
                    raise ConfigError(
                        f"{path}, line {number}: {key!r} is not the name of one request alone"
                    )
            place += len(raw)
