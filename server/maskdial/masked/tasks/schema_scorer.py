"""What scores a schema in a text's rows, by the kind of model."""

from collections.abc import Callable, Sequence

from maskdial.errors import ValidationError
from maskdial.masked.tasks.boundary_scores import BoundaryScorer
from maskdial.masked.tasks.extraction_prompt import SchemaPrompt
from maskdial.masked.tasks.extraction_scores import Floats, Scorer
from maskdial.masked.tasks.task import TaskModel


def make_scorer(
    prompt: SchemaPrompt,
    thresholds: Sequence[Sequence[float]],
    model: TaskModel,
    *,
    flat: bool = True,
) -> Callable[[Floats], Floats]:
    """From rows to a table of `maskdial.masked.tasks.extraction_scores.Findings`.

    Args:
        prompt: the schema, as the model reads it.
        thresholds: for each task, those of its names.
        model: one that finds what a schema names.
        flat: whether spans of one field may not overlap, where the scorer chooses among them.

    Raises:
        ValidationError: the model does not find what the schema names.
    """
    extraction = model.manifest.extraction
    assert extraction is not None, "models for this task have it"
    tasks, num_before = prompt.tasks, len(prompt.words)
    if model.spans is None:
        assert model.queries is not None, "such a model has the one or the other"
        return Scorer(tasks, thresholds, len(prompt.rows), num_before, extraction, model.queries)
    if any(each.kind == "relation" for each in tasks):
        raise ValidationError(
            f"model {model.name!r} finds no relations; leave them out", field="schema"
        )
    return BoundaryScorer(tasks, thresholds, len(prompt.rows), num_before, model.spans, flat)
