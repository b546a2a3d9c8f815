"""MaskedModel: a loaded masked model, with its engine."""

from dataclasses import dataclass

from maskdial.engine.model import Model
from maskdial.masked.engine import MaskedEngine


@dataclass(frozen=True, slots=True)
class MaskedModel(Model):
    """A masked model being served."""

    engine: MaskedEngine

    @property
    def max_length(self) -> int:
        """Maximum length of an input in tokens."""
        return self.manifest.max_length

    @property
    def max_queue(self) -> int:
        """Inputs that may wait."""
        return self.engine.max_queue

    def stop(self) -> None:
        """Stops the engine at once, and the process of its decision template."""
        self.engine.stop(0)
        if self.prompts is not None:
            self.prompts.close()
