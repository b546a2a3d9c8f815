"""Placeholders: what stands in a text in place of what a policy redacts."""

import re
from collections.abc import Iterable

_OTHER = re.compile(r"[^A-Z0-9]+")


class Placeholders:
    """Placeholders of one request, such as ``[EMAIL_1]``: equal values have the same one.

    Args:
        texts: all of the request, in which none of them may occur already.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = tuple(texts)
        self._by_value: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._values: dict[str, str] = {}
        self.restored: dict[str, str] = {}
        """What placeholders stand for that a reply gets the values of."""

    def copy(self) -> "Placeholders":
        """Those so far, for a text that has further ones."""
        other = Placeholders(self._texts)
        other._by_value = dict(self._by_value)
        other._counts = dict(self._counts)
        other._values = dict(self._values)
        other.restored = self.restored
        return other

    def of(self, label: str, value: str, *, restore: bool = False) -> str:
        """The placeholder of a value.

        Args:
            label: what the value is.
            value: is not to be seen.
            restore: whether the reply gets it back.
        """
        name = _OTHER.sub("_", label.upper()).strip("_") or "REDACTED"
        known = self._by_value.get((name, value))
        if known is None:
            known = self._new(name)
            self._by_value[name, value] = known
            self._values[known] = value
        if restore:
            self.restored[known] = value
        return known

    @property
    def known(self) -> Iterable[str]:
        """All of them."""
        return self._values.keys()

    def _new(self, name: str) -> str:
        while True:
            self._counts[name] = number = self._counts.get(name, 0) + 1
            placeholder = f"[{name}_{number}]"
            if not any(placeholder in text for text in self._texts):
                return placeholder
