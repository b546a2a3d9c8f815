"""Provenance: what a request was answered with, which its receipt tells."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from maskdial.engine.model import Model

_SEED = "seed"
_is_noted: ContextVar[bool] = ContextVar("_is_noted", default=False)


class Provenance:
    """What one request was answered with, as far as it has come.

    Attributes:
        seed: of its random numbers; None as long as it needs none. All prompts that are sent
            without a seed have the same one, as those have that are sent with one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._models: dict[str, str] = {}
        self._asked: set[str] = set()

    def note(self, model: "Model", *asked: object) -> None:
        """Notes that a model was asked.

        Args:
            model: with its adapter.
            asked: all that decides the answer beside bundle and seed, with every default settled:
                dataclasses, mappings, sequences, arrays, sets and scalars. Fields called ``seed``
                are left out.
        """
        if _is_noted.get():
            return
        bundle = model.bundle.sha256
        if model.adapter is not None:
            bundle += f"/{model.adapter.digest}"
        self._models[bundle] = model.numerics
        self._asked.add(hashlib.sha256(json.dumps(_plain(asked)).encode()).hexdigest())

    @property
    def bundle(self) -> str:
        """The SHA-256 of the manifest, which has those of all files; of several models (a guard's
        is another one) joined by a plus. Empty if none was asked.
        """
        return "+".join(sorted(self._models))

    @property
    def numerics(self) -> str:
        """Their numerics version; empty if one of them has none, or another one."""
        found = set(self._models.values())
        return found.pop() if len(found) == 1 else ""

    @property
    def asked(self) -> str:
        """The SHA-256 of all that they were asked, in any order."""
        return hashlib.sha256(" ".join(sorted(self._asked)).encode()).hexdigest()


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Models that are asked within were noted before: whether they are asked depends on what the
    server remembers, and a receipt may not.
    """
    token = _is_noted.set(True)
    try:
        yield
    finally:
        _is_noted.reset(token)


def _plain(value: object) -> Any:
    """A value as JSON; of an object of another kind, such as a function, the name of its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name != _SEED]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return sorted([str(key), _plain(each)] for key, each in value.items())
    if isinstance(value, Set):
        return sorted(map(_plain, value), key=json.dumps)
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value  # tokens, of which there may be a hundred thousand
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return type(value).__qualname__
