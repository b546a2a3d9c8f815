"""Served models: a bundle with its engine, of either family."""

from typing import Protocol

from maskdial.bundle.manifest import Manifest
from maskdial.causal.model import CausalModel
from maskdial.masked.model import MaskedModel


class Task(Protocol):
    """Something that models can be asked for."""

    @property
    def name(self) -> str: ...
    def serves(self, manifest: Manifest) -> bool: ...


ServedModel = MaskedModel | CausalModel
