"""MaskedModel: a loaded masked model, with its engine."""

from dataclasses import dataclass, field

from maskdial.engine.model import Model
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.label_encoder import LabelEncoder
from maskdial.masked.tasks.task import Queries


@dataclass(frozen=True, slots=True)
class MaskedModel(Model):
    """A masked model being served.

    ``label_encoder`` is the second model of one that finds entities of labels by their vectors,
    ``queries`` what makes queries of fields in one that finds what a schema names.
    """

    engine: MaskedEngine
    label_encoder: LabelEncoder | None = field(default=None, kw_only=True)
    queries: Queries | None = field(default=None, kw_only=True)

    @property
    def max_length(self) -> int:
        """Maximum length of an input in tokens."""
        return self.manifest.max_length

    @property
    def max_queue(self) -> int:
        """Inputs that may wait."""
        return self.engine.max_queue

    def stop(self) -> None:
        """Stops the engines at once, and the process of its decision template."""
        self.engine.stop(0)
        if self.label_encoder is not None:
            self.label_encoder.stop()
        if self.prompts is not None:
            self.prompts.close()
