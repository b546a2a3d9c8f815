"""Choice: which model a request means, by what the manifests say, whether it is loaded or not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

from maskdial.bundle.manifest import Manifest, Mask
from maskdial.errors import NotFoundError, ValidationError, shortened
from maskdial.model_cache import HubSource
from maskdial.registry.entry import Entry
from maskdial.registry.served import ServedModel, Task

WrittenMask = Literal["full", "causal", "prefix", "block"]
"""The masks that a request can name: those of graphs, and two that a causal graph writes under.
``prefix``: the prompt's tokens see each other in both directions, those behind it what comes before
them. ``block``: tokens are unmasked block by block, and see what comes before the block's end."""

LATEST = ":latest"
"""The tag that Ollama's clients add to a name, also where they speak another dialect."""

_MASKS: tuple[WrittenMask, ...] = get_args(WrittenMask)
_OF_WRITING = ("prefix", "block")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model a request means: by its name, or as the only one that does the task; and under
    which mask, where it has both.
    """

    name: str | None = None
    mask: WrittenMask | None = None

    @classmethod
    def of(cls, name: str | None, mask: WrittenMask | None = None) -> "ModelChoice":
        """A choice by a name that may end in the mask, as in ``NAME:full``, or in Ollama's tag.

        Raises:
            ValidationError: the name says one mask and ``mask`` the other.
        """
        name = name if name is None else name.removesuffix(LATEST)
        stem, _, suffix = (name or "").rpartition(":")
        named = next((each for each in _MASKS if stem and each == suffix), None)
        if named is None:
            return cls(name, mask)
        if mask not in (None, named):
            raise ValidationError(
                f"model {shortened(stem)!r} contradicts the mask {mask!r}; give one of them"
            )
        return cls(stem, named)

    @property
    def _graph(self) -> Mask | None:
        """The mask of the graph that is wanted."""
        return "causal" if self.mask == "prefix" or self.mask == "block" else self.mask

    def allows(self, manifest: Manifest) -> bool:
        """Whether a graph runs under the mask that is wanted."""
        return self._graph in (None, manifest.mask)

    def serves(self, manifest: Manifest, task: Task) -> bool:
        """Whether a graph does a task under the mask that is wanted."""
        writes = task.name == "generate" or self.mask not in _OF_WRITING
        return writes and self.allows(manifest) and task.serves(manifest)


class Chooser:
    """Finds the model for a choice and a task, and says why there is none.

    Args:
        tasks: everything that a model can be asked for, in the order of listings.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def tasks_of(self, manifest: Manifest) -> tuple[str, ...]:
        """The names of the tasks that a model can do."""
        return tuple(task.name for task in self._tasks if task.serves(manifest))

    def named(self, entries: Mapping[str, Entry], name: str) -> Entry:
        """The entry of a name.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        source = None if name in entries else HubSource.parse(name)
        if source is not None:  # as Ollama calls it, hf.co/ORG/NAME:Q4_K_M
            name = source.served_name
        if name not in entries:
            raise NotFoundError(
                f"no model {shortened(name)!r} here; served models: {_names(entries)}"
            )
        return entries[name]

    def find(self, entries: Mapping[str, Entry], choice: ModelChoice, task: Task | None) -> Entry:
        """The entry that is meant; without a task, the named one.

        Raises:
            NotFoundError: no such model, or none for the task.
            ValidationError: the model cannot do the task, or several can.
        """

        def serves(manifest: Manifest) -> bool:
            return choice.allows(manifest) if task is None else choice.serves(manifest, task)

        if choice.name is not None:
            entry = self.named(entries, choice.name)
            if entry.manifests and not any(map(serves, entry.manifests)):
                raise self._unable(entry.name, entry.manifests, choice, task)
            return entry
        assert task is not None, "a request without a task names its model"
        bases = (entry for entry in entries.values() if entry.base is None)
        fitting = [entry for entry in bases if any(map(serves, entry.manifests))]
        if not fitting:
            raise NotFoundError(f"no model here does {task.name}; served models: {_names(entries)}")
        if len(fitting) > 1:
            names = ", ".join(entry.name for entry in fitting)
            raise ValidationError(f'several models do {task.name}; name one with "model": {names}')
        return fitting[0]

    def pick(
        self, name: str, models: Sequence[ServedModel], choice: ModelChoice, task: Task
    ) -> ServedModel:
        """The model that does the task, of those with a name; if it does so under both masks, the
        causal one.

        Raises:
            ValidationError: none can do the task.
        """
        for model in models:
            if choice.serves(model.manifest, task):
                return model
        raise self._unable(name, [each.manifest for each in models], choice, task)

    def _unable(
        self, name: str, manifests: Sequence[Manifest], choice: ModelChoice, task: Task | None
    ) -> ValidationError:
        allowed = [manifest for manifest in manifests if choice.allows(manifest)]
        if not allowed:
            masks = " and ".join(dict.fromkeys(manifest.mask for manifest in manifests))
            return ValidationError(
                f"model {name!r} does not run under the {choice.mask} mask; it has the {masks} one"
            )
        assert task is not None, "every model can be named"
        if choice.mask in _OF_WRITING:
            return ValidationError(f"the {choice.mask} mask is for writing texts, not {task.name}")
        tasks = dict.fromkeys(chain.from_iterable(map(self.tasks_of, allowed)))
        label = name if choice.mask is None else f"{name}:{choice.mask}"
        return ValidationError(f"model {label!r} cannot do {task.name}; it does {', '.join(tasks)}")


def _names(entries: Mapping[str, Entry]) -> str:
    return ", ".join(entries) or "none"
