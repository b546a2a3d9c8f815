"""Served models: a bundle with its engine, of either family; and what they can be asked for."""

from collections.abc import Callable
from dataclasses import dataclass

from maskdial.bundle.manifest import Manifest
from maskdial.causal.model import CausalModel
from maskdial.masked.model import MaskedModel


@dataclass(frozen=True, slots=True)
class Task:
    """Something that models can be asked for; `maskdial.ask.catalogue` has all of them.

    Attributes:
        name: in listings and errors.
        serves: whether a model can do it.
    """

    name: str
    serves: Callable[[Manifest], bool]


ServedModel = MaskedModel | CausalModel
