"""What a model that reads makes of a task's questions: a text's label, or how alike two are."""

import numpy as np

from maskdial.ask.catalogue import task_of
from maskdial.errors import ConfigError, ValidationError
from maskdial.local.model import AsyncModel
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.offline.evaluate.answers import Outcome
from maskdial.offline.evaluate.form import OutputType
from maskdial.offline.evaluate.task import EvalTask, Item

READING: frozenset[OutputType] = frozenset({"classification", "similarity"})
"""The kinds of tasks for it."""


_ONE_LABEL = "single_label_classification"


class Reader:
    """Asks one model.

    Args:
        model: classifies texts, or makes vectors of them.
        kind: of the task.

    Attributes:
        served: the model itself.

    Raises:
        ConfigError: it does neither.
    """

    def __init__(self, model: AsyncModel, kind: OutputType) -> None:
        request = ClassifyRequest if kind == "classification" else EmbedRequest
        try:
            self.served = model.pick(task_of(request))
        except ValidationError as error:
            raise ConfigError(f"{model.name}, tasks of {kind}: {error.message}") from error
        manifest = self.served.manifest
        self._labels = list(manifest.labels)
        self._model = model
        if kind == "classification" and manifest.problem_type not in (None, _ONE_LABEL):
            raise ConfigError(
                f"{model.name} gives a text any number of labels, or a number; tasks of "
                "classification are for models with one label of several"
            )

    async def outcomes(self, task: EvalTask) -> list[Outcome]:
        """What each question came to.

        Raises:
            ConfigError: a question does not fit the model.
        """
        ask = self._labelled if task.kind == "classification" else self._compared
        try:
            return await ask(task)
        except ValidationError as error:
            raise ConfigError(f"task {task.name!r}: {error.message}") from error

    async def _labelled(self, task: EvalTask) -> list[Outcome]:
        right = [self._index(task, number, item) for number, item in enumerate(task.items, 1)]
        texts = [
            (each.context, each.choices[0]) if each.choices else each.context for each in task.items
        ]
        found = [self._labels.index(row[0].label) for row in await self._model.classify(texts)]
        return [
            Outcome(
                {"acc": float(label == target), "f1_macro": label}, {"acc": 1.0, "f1_macro": target}
            )
            for label, target in zip(found, right, strict=True)
        ]

    def _index(self, task: EvalTask, number: int, item: Item) -> int:
        """The number of the right label."""
        if item.expected in self._labels:
            return self._labels.index(item.expected)
        if item.expected.isdecimal() and int(item.expected) < len(self._labels):
            return int(item.expected)
        known = ", ".join(self._labels)
        raise ConfigError(
            f"task {task.name!r}, question {number}: no label {item.expected!r}; there are: {known}"
        )

    async def _compared(self, task: EvalTask) -> list[Outcome]:
        texts = [text for item in task.items for text in (item.context, item.choices[0])]
        vectors = (
            (await self._model.embed(texts)).astype(np.float64).reshape(len(task.items), 2, -1)
        )
        lengths = np.linalg.norm(vectors, axis=-1).prod(axis=-1)
        cosines = (vectors[:, 0] * vectors[:, 1]).sum(axis=-1) / lengths
        metrics = ("spearman", "pearson")
        return [
            Outcome(dict.fromkeys(metrics, float(cosine)), dict.fromkeys(metrics, item.gold))
            for cosine, item in zip(cosines, task.items, strict=True)
        ]
