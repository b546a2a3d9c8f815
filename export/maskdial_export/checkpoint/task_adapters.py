"""Tasks: what a checkpoint of embeddings was trained for, with an adapter for each (Jina's)."""

from dataclasses import dataclass, field
from pathlib import Path

from maskdial.bundle.manifest import EmbeddingTask
from maskdial_export.checkpoint.embedding import read_prompts
from maskdial_export.checkpoint.source import Source

_JINA_V3 = "jina_embeddings_v3"
# Folders of the layout that transformers reads, where Jina's own name is another one
_NAMES_V3 = {
    "retrieval_query": "retrieval.query",
    "retrieval_passage": "retrieval.passage",
    "text_matching": "text-matching",
}


@dataclass(frozen=True, slots=True)
class TaskAdapters:
    """The tasks of a checkpoint, and the folders of their adapters, as PEFT saves them.

    ``needed``: whether the checkpoint's own code embeds nothing without a task.
    """

    tasks: dict[str, EmbeddingTask] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    needed: bool = False


def read_tasks(source: Source) -> TaskAdapters:
    """What a checkpoint brings beside the weights that it embeds with.

    Raises:
        ExportError: a prompt is none, or a folder has a name that no bundle can have.
    """
    config = source.read_json("config.json")
    if source.task != "embed" or source.adapter is not None:
        return TaskAdapters()
    if config.get("model_type") != _JINA_V3:
        return TaskAdapters()
    folders = {each.parent.name: each.parent for each in source.path.glob("*/adapter_config.json")}
    prompts, _ = read_prompts(source)
    tasks = {}
    for name in sorted(folders):
        task = _NAMES_V3.get(name, name)
        tasks[task] = EmbeddingTask(adapter=name, prompt=task if task in prompts else None)
    return TaskAdapters(tasks, dict(sorted(folders.items())))
