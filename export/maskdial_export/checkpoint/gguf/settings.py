"""Typed access to the metadata of a GGUF file."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maskdial_export.checkpoint.gguf.file import GGUFFile
from maskdial_export.errors import ExportError

_MAX_NUMBER = 2**31


@dataclass(frozen=True, slots=True)
class Settings:
    """Entries by key; a key that starts with a dot is one of the architecture's.

    ``asked``: the keys that were looked for.
    """

    file: GGUFFile
    architecture: str
    asked: set[str] = field(default_factory=set)

    def _key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def find(self, key: str) -> Any:
        """The value; None if there is none."""
        self.asked.add(self._key(key))
        return self.file.metadata.get(self._key(key))

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The architecture's keys that nobody has looked for, from the dot on, and their values."""
        for key, value in self.file.metadata.items():
            if key.startswith(f"{self.architecture}.") and key not in self.asked:
                yield key.removeprefix(self.architecture), value

    def number(self, key: str, default: int | None = None) -> int:
        """A count. One per layer must be the same for all.

        Raises:
            ExportError: it is missing or is none.
        """
        value = self.find(key)
        if isinstance(value, np.ndarray):
            different = set(value.tolist())
            if len(different) != 1:
                raise ExportError(
                    f"{self._key(key)} of {self.file.path} differs between layers, which is not "
                    "supported"
                )
            value = different.pop()
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 <= value < _MAX_NUMBER:
            raise ExportError(self._wrong(key, value, "a number"))
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises: ExportError: it is missing or is none."""
        value = self.find(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ExportError(self._wrong(key, value, "a number"))
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A text. Raises: ExportError: it is missing or is none."""
        value = self.find(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise ExportError(self._wrong(key, value, "a text"))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Raises: ExportError: it is not true or false."""
        value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ExportError(self._wrong(key, value, "true or false"))
        return value

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts. Raises: ExportError: it is missing or is none."""
        value = self.find(key)
        if not isinstance(value, list):
            raise ExportError(self._wrong(key, value, "a list of texts"))
        return value

    def numbers(self, key: str, count: int) -> Sequence[float] | None:
        """So many numbers; None if there are none.

        Raises:
            ExportError: it is something else, or there are others than ``count``.
        """
        value = self.find(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise ExportError(self._wrong(key, value, f"a list of {count:,} numbers"))
        return value.tolist()  # type: ignore[no-any-return]

    def _wrong(self, key: str, value: Any, expected: str) -> str:
        if value is None:
            return f"{self.file.path} has no {self._key(key)}"
        shown = repr(value)
        shown = f"{type(value).__name__} of {len(value):,}" if len(shown) > 50 else shown
        return f"{self._key(key)} of {self.file.path} is {shown}; it must be {expected}"
