"""The models that a server serves, and which of them a request means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import maskdial
from maskdial.causal.chat import ChatTemplate
from maskdial.causal.engine import CausalEngine
from maskdial.causal.grammar.compiler import GrammarCompiler
from maskdial.config import Config
from maskdial.errors import BundleError, NotFoundError, ValidationError
from maskdial.masked.engine import MaskedEngine
from maskdial.metrics import ModelMetrics
from maskdial.models.bundle import (
    MANIFEST,
    Bundle,
    Manifest,
    Task,
)
from maskdial.models.tokenizer import Tokenizer

STARTER_FOLDER = Path(maskdial.__file__).parent / "starter"


ServedTask = Task | Literal["zero-shot-classify", "similarity", "rerank", "score", "tokenize"]


def served_tasks(manifest: Manifest) -> tuple[ServedTask, ...]:
    """What a model can be asked for; its own task first."""
    tasks: list[ServedTask] = [manifest.task]
    if manifest.task == "classify":
        if manifest.entailment is not None:
            tasks.append("zero-shot-classify")
        if len(manifest.labels) == 1:
            tasks.append("rerank")
    elif manifest.task == "embed":
        tasks.append("similarity")
    elif manifest.task in ("fill-mask", "generate"):
        tasks.append("score")
    return (*tasks, "tokenize")


@dataclass(frozen=True, slots=True)
class MaskedModel:
    """A masked model being served."""

    bundle: Bundle
    tokenizer: Tokenizer
    engine: MaskedEngine
    metrics: ModelMetrics
    provider: str

    @property
    def tasks(self) -> tuple[ServedTask, ...]:
        return served_tasks(self.bundle.manifest)

    def stop(self) -> None:
        """Ends the engine at once."""
        self.engine.stop(0)


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A causal model being served.

    ``slots`` sequences run at once. ``max_length`` is the context in tokens, as configured.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    engine: CausalEngine
    metrics: ModelMetrics
    provider: str
    slots: int
    max_length: int
    chat_template: ChatTemplate
    grammars: GrammarCompiler

    @property
    def tasks(self) -> tuple[ServedTask, ...]:
        return served_tasks(self.bundle.manifest)

    def stop(self) -> None:
        """Ends the engine at once, and the grammars with it."""
        self.engine.stop(0)
        self.grammars.close()


ServedModel = MaskedModel | CausalModel


class Models:
    """The served models by name; under one name there may be one for each mask."""

    def __init__(self) -> None:
        self._models: dict[str, list[ServedModel]] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return chain.from_iterable(self._models.values())

    def add(self, model: ServedModel) -> None:
        """Serves one more model, or one more mask of a model."""
        self._models.setdefault(model.bundle.name, []).append(model)

    def get(self, name: str) -> ServedModel:
        """A model by name; of one with both masks, the causal one.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        return self.named(name)[0]

    def named(self, name: str) -> Sequence[ServedModel]:
        """All models of a name.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        if name not in self._models:
            raise NotFoundError(f"no model {name!r} here; served models: {', '.join(self._models)}")
        return self._models[name]

    def for_masked_task(self, task: ServedTask, name: str | None) -> MaskedModel:
        """The masked model that a request for a task means."""
        model = self.for_task(task, name)
        assert isinstance(model, MaskedModel)
        return model

    def for_generation(self, name: str | None) -> CausalModel:
        """The causal model that a request to generate means."""
        model = self.for_task("generate", name)
        assert isinstance(model, CausalModel)
        return model

    def for_task(self, task: ServedTask, name: str | None) -> ServedModel:
        """The named model, or without a name the only one that fits.

        Where both masks of a model do the task, it is the causal one.

        Raises:
            NotFoundError: no such model, or none for the task.
            ValidationError: the model cannot do the task, or several could.
        """
        if name is not None:
            models = self.named(name)
            tasks = dict.fromkeys(each for model in models for each in model.tasks)
            if task not in tasks:
                raise ValidationError(
                    f"model {name!r} cannot do {task}; it does {', '.join(tasks)}"
                )
            return next(model for model in models if task in model.tasks)
        fitting: dict[str, ServedModel] = {}
        for model in self:
            if task in model.tasks:
                fitting.setdefault(model.bundle.name, model)
        if not fitting:
            raise NotFoundError(
                f"no model here does {task}; served models: {', '.join(self._models)}"
            )
        if len(fitting) > 1:
            raise ValidationError(
                f'several models do {task}; name one with "model": {", ".join(fitting)}'
            )
        return next(iter(fitting.values()))


def find_bundles(config: Config) -> dict[str, Path]:
    """The bundle folders to serve by name: the configured ones, or else the starter models.

    Raises:
        BundleError: neither exist.
    """
    if config.models:
        return dict(config.models)
    starters = {
        path.parent.name: path.parent for path in sorted(STARTER_FOLDER.glob(f"*/{MANIFEST}"))
    }
    if not starters:
        raise BundleError("no --model was given, and this installation has no starter models")
    return starters
