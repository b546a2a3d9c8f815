"""Decisions: questions about a text, answered with probabilities by the served model.

method       model                                   an option's probability
entailment   NLI                                     that the text entails it
labels       any other classifier, by its labels     the label's
mask         fill-mask, by single tokens             the token's in place of a mask
likelihood   causal                                  that the model answers with it

Those of one question are normalized over its options. They are the model's own, and as well
calibrated as the model is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from maskdial.bundle.manifest import Manifest
from maskdial.causal.decide import likelihoods
from maskdial.causal.model import CausalModel
from maskdial.config import Config
from maskdial.engine.questions import DecisionMethod, Probabilities, Question
from maskdial.engine.timing import Deadline, Timings
from maskdial.errors import ValidationError
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.decide import (
    EntailmentDecision,
    LabelDecision,
    MaskDecision,
    MaskedDecision,
)
from maskdial.masked.tasks.task import REFUSE, Truncation
from maskdial.registry.served import ServedModel

_MASKED: Mapping[
    DecisionMethod, Callable[[str, Sequence[Question], Truncation], MaskedDecision]
] = {
    "entailment": EntailmentDecision,
    "labels": LabelDecision,
    "mask": MaskDecision,
}


@dataclass(frozen=True, slots=True)
class Decisions:
    """The answers to all questions in order, and ``num_cached`` tokens from the prefix cache."""

    method: DecisionMethod
    probabilities: list[Probabilities]
    timings: Timings
    num_cached: int = 0


def method_of(manifest: Manifest) -> DecisionMethod | None:
    """How a model answers questions; None if it cannot."""
    if manifest.task == "generate" and manifest.text_to_text is None:
        return "likelihood"
    methods: dict[DecisionMethod, bool] = {
        "entailment": EntailmentDecision.serves(manifest),
        "labels": LabelDecision.serves(manifest),
        "mask": MaskDecision.serves(manifest),
    }
    return next((method for method, serves in methods.items() if serves), None)


@dataclass(frozen=True, slots=True)
class DecisionTask:
    """Deciding, as something that models can be asked for."""

    name: str = "decide"

    def serves(self, manifest: Manifest) -> bool:
        return method_of(manifest) is not None


async def decide(
    text: str,
    questions: Sequence[Question],
    model: ServedModel,
    config: Config,
    deadline: Deadline,
    *,
    truncation: Truncation = REFUSE,
) -> Decisions:
    """Answers questions about a text with a model that serves `DecisionTask`.

    An answer does not depend on simultaneous requests, to the last bit, if the model is
    batch-invariant.

    Args:
        truncation: what to do with a text that is too long; causal models cannot cut it.

    Raises:
        ValidationError: a question does not fit the model, or the text is too long.
        OverloadedError: the queue has no room for them.
        DeadlineError: the time is up.
    """
    method = method_of(model.manifest)
    assert method is not None, "a model without it does not serve the task"
    if isinstance(model, MaskedModel):
        request = _MASKED[method](text, questions, truncation)
        answer = await run.answer(request, model, config, deadline)
        return Decisions(method, answer.content, answer.timings)
    assert isinstance(model, CausalModel)
    if truncation.enabled:
        raise ValidationError("causal models do not cut the input; shorten it", field="truncate")
    found = await likelihoods(text, questions, model, config, deadline)
    return Decisions(method, found.probabilities, found.timings, found.num_cached)
