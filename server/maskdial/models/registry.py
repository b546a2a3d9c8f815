"""The models that a server serves, and which of them a request means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import maskdial
from maskdial.causal.chat import ChatTemplate
from maskdial.causal.engine import CausalEngine
from maskdial.causal.grammar.compiler import GrammarCompiler
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.config import Config
from maskdial.errors import BundleError, NotFoundError, ValidationError
from maskdial.masked.engine import MaskedEngine
from maskdial.metrics import ModelMetrics
from maskdial.models.bundle import MANIFEST, Bundle, Manifest
from maskdial.models.tokenizer import Tokenizer
from maskdial.runtime.providers import find_provider

STARTER_FOLDER = Path(maskdial.__file__).parent / "starter"


class Task(Protocol):
    """Something that models can be asked for."""

    @property
    def name(self) -> str: ...
    def serves(self, manifest: Manifest) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Model:
    """What served models of both families have."""

    bundle: Bundle
    tokenizer: Tokenizer
    metrics: ModelMetrics
    provider: str

    @property
    def name(self) -> str:
        return self.bundle.name

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def batch_invariant(self) -> bool:
        """Whether answers are the same to the last bit in any batch: as measured at export, and
        only with a provider whose kernels are batch-invariant.
        """
        return self.manifest.batch_invariant and find_provider(self.provider).batch_invariant


@dataclass(frozen=True, slots=True)
class MaskedModel(_Model):
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
        """Stops the engine at once."""
        self.engine.stop(0)


@dataclass(frozen=True, slots=True)
class CausalModel(_Model):
    """A causal model being served.

    ``slots`` sequences run at once. ``max_length`` is the context in tokens, as configured.
    ``reply_format`` says how its tool calls and its reasoning are told from its text.
    """

    engine: CausalEngine
    slots: int
    max_length: int
    chat_template: ChatTemplate
    reply_format: ReplyFormat
    grammars: GrammarCompiler

    def stop(self) -> None:
        """Stops the engine at once, and the grammar compiler with it."""
        self.engine.stop(0)
        self.grammars.close()


ServedModel = MaskedModel | CausalModel


class Models:
    """The served models by name; one name may stand for two, one for each attention mask.

    Args:
        tasks: everything that a model can be asked for, in the order of listings.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._models: dict[str, list[ServedModel]] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return chain.from_iterable(self._models.values())

    def add(self, model: ServedModel) -> None:
        """Serves one more model, or a model under one more mask."""
        self._models.setdefault(model.name, []).append(model)

    def tasks_of(self, model: ServedModel) -> tuple[str, ...]:
        """The names of the tasks that a model can do."""
        return tuple(task.name for task in self._tasks if task.serves(model.manifest))

    def named(self, name: str) -> Sequence[ServedModel]:
        """All models of a name.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        if name not in self._models:
            raise NotFoundError(f"no model {name!r} here; served models: {', '.join(self._models)}")
        return self._models[name]

    def masked_for(self, task: Task, name: str | None) -> MaskedModel:
        """The masked model for a task that only masked models do."""
        model = self.model_for(task, name)
        assert isinstance(model, MaskedModel)
        return model

    def causal_for(self, task: Task, name: str | None) -> CausalModel:
        """The causal model for a task that only causal models do."""
        model = self.model_for(task, name)
        assert isinstance(model, CausalModel)
        return model

    def model_for(self, task: Task, name: str | None) -> ServedModel:
        """The named model; without a name, the only one that does the task.

        Where a model does the task under both masks, it is the causal one.

        Raises:
            NotFoundError: no such model, or none for the task.
            ValidationError: the model cannot do the task, or several can.
        """
        if name is not None:
            models = self.named(name)
            able = [model for model in models if task.serves(model.manifest)]
            if not able:
                tasks = dict.fromkeys(chain.from_iterable(map(self.tasks_of, models)))
                raise ValidationError(
                    f"model {name!r} cannot do {task.name}; it does {', '.join(tasks)}"
                )
            return able[0]
        fitting: dict[str, ServedModel] = {}
        for model in self:
            if task.serves(model.manifest):
                fitting.setdefault(model.name, model)
        if not fitting:
            raise NotFoundError(
                f"no model here does {task.name}; served models: {', '.join(self._models)}"
            )
        if len(fitting) > 1:
            raise ValidationError(
                f'several models do {task.name}; name one with "model": {", ".join(fitting)}'
            )
        return next(iter(fitting.values()))


def find_bundles(config: Config) -> dict[str, Path]:
    """The bundle folders to serve, by name: those configured, otherwise the starter models.

    Raises:
        BundleError: there are neither.
    """
    if config.models:
        return dict(config.models)
    starters = {
        path.parent.name: path.parent for path in sorted(STARTER_FOLDER.glob(f"*/{MANIFEST}"))
    }
    if not starters:
        raise BundleError("no --model was given, and this installation has no starter models")
    return starters
