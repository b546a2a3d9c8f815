"""Tasks: what a checkpoint of embeddings was trained for, with an adapter for each (Jina's)."""

from dataclasses import dataclass, field
from pathlib import Path

from maskdial.bundle.manifest import EmbeddingTask
from maskdial_export.checkpoint.sentence import read_prompts
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
    """The tasks of a checkpoint, and the folders of their adapters, as PEFT saves them."""

    tasks: dict[str, EmbeddingTask] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)


def read_tasks(source: Source) -> TaskAdapters:
    """What a checkpoint brings beside the weights that it embeds with.

    Raises:
        ExportError: a prompt is none, or a folder has a name that no bundle can have.
    """
    if source.task != "embed" or source.adapter is not None:
        return TaskAdapters()
    if source.read_json("config.json").get("model_type") != _JINA_V3:
        return TaskAdapters()
    configs = sorted(source.path.glob("*/adapter_config.json"))
    folders = {each.parent.name: each.parent for each in configs}
    prompts, _ = read_prompts(source)
    tasks = {}
    for name in folders:
        task = _NAMES_V3.get(name, name)
        tasks[task] = EmbeddingTask(adapter=name, prompt=task if task in prompts else None)
    return TaskAdapters(tasks, folders)
