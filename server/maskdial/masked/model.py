"""MaskedModel: a loaded masked model, with its engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.engine.model import Model
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.kernels.logits import VocabularyKernels
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.label_encoder import LabelEncoder
from maskdial.masked.tasks.task import PairedSpans, Queries
from maskdial.runtime.adapter import Adapter


class Closing(Protocol):
    """What a model has beside its engine, and ends with it."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MaskedModel(Model):
    """A masked model being served.

    ``chat_form`` is how it is given conversations, if it may write texts
    (`maskdial.causal.model.ChatForm`). ``kernel_library`` is the file of
    the kernels, if it uses them. ``label_encoder`` is the second model of one that finds entities
    of labels by their vectors, ``queries`` or ``spans`` what reads a schema's fields in one that
    finds what it names; ``grammars`` compiles what its blanks have to match, if it fills masks.
    ``query_weights`` are those of a query's tokens, of a model that reads documents alone.
    ``task_adapters`` are those that its bundle brings, unless it takes none where it runs.
    """

    engine: MaskedEngine
    chat_form: Closing | None = field(default=None, kw_only=True)
    kernel_library: Path | None = field(default=None, kw_only=True)
    label_encoder: LabelEncoder | None = field(default=None, kw_only=True)
    queries: Queries | None = field(default=None, kw_only=True)
    spans: PairedSpans | None = field(default=None, kw_only=True)
    query_weights: NDArray[np.float32] | None = field(default=None, kw_only=True)
    grammars: GrammarCompiler | None = field(default=None, kw_only=True)
    task_adapters: Mapping[str, Adapter] = field(default_factory=dict, kw_only=True)

    @property
    def max_length(self) -> int:
        """Maximum length of an input in tokens."""
        return self.manifest.max_length

    @property
    def max_queue(self) -> int:
        """Inputs that may wait in the engine's queue before others are refused."""
        return self.engine.max_queue

    def vocabulary_kernels(self) -> VocabularyKernels | None:
        """Kernels for rows of its logits, for one thread at a time; None if it uses none."""
        if self.kernel_library is None:
            return None
        return VocabularyKernels(self.kernel_library, self.manifest.vocab_size)

    def stop(self) -> None:
        """Stops the engines at once, and the processes of its templates."""
        self.engine.stop(0)
        if self.label_encoder is not None:
            self.label_encoder.stop()
        for writer in (self.prompts, self.chat_form, self.grammars):
            if writer is not None:
                writer.close()
