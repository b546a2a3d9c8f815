"""Decisions: questions about a text, answered with probabilities by the served model.

method       model                                   an option's probability
head         decision models, by their head          the head's, at a place of the prompt
letters      chat models, and any with a decision    the token's that stands for it in the prompt,
             template                                in place of the next one or of a mask
entailment   NLI                                     that the text entails it
labels       any other classifier, by its labels     the label's
mask         fill-mask, by single tokens             the token's in place of a mask
likelihood   causal                                  that the model answers with it

A chat model whose tokenizer has no letters for all options of a request answers by likelihood.

Those of one question are normalized over its options. They are the model's own, and as well
calibrated as the model is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from maskdial.bundle.manifest import Manifest
from maskdial.causal.decide import likelihoods, read_labels
from maskdial.causal.model import CausalModel
from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.questions import (
    Content,
    DecisionMethod,
    DecisionPrompt,
    Probabilities,
    Question,
    as_text,
)
from maskdial.engine.timing import Deadline, Timings
from maskdial.errors import ValidationError
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.decide import (
    EntailmentDecision,
    LabelDecision,
    MaskDecision,
    MaskedDecision,
    PromptDecision,
)
from maskdial.masked.tasks.task import REFUSE, Truncation
from maskdial.registry.served import ServedModel

_CANNOT_CUT = "causal models and decision models do not cut the input; shorten it"

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
    if manifest.task == "decide":
        return "head"
    if manifest.decision is not None and manifest.task == "fill-mask":
        return "letters"
    if manifest.task == "generate" and manifest.text_to_text is None:
        return "likelihood" if manifest.decision is None else "letters"
    methods: dict[DecisionMethod, bool] = {
        "entailment": EntailmentDecision.serves(manifest),
        "labels": LabelDecision.serves(manifest),
        "mask": MaskDecision.serves(manifest),
    }
    return next((method for method, serves in methods.items() if serves), None)


async def decide(
    state: Content,
    questions: Sequence[Question],
    model: ServedModel,
    config: Config,
    deadline: Deadline,
    *,
    truncation: Truncation = REFUSE,
) -> Decisions:
    """Answers questions about a text with a model that has a method for them.

    An answer does not depend on simultaneous requests, to the last bit, if the model is
    batch-invariant.

    Args:
        state: the text, or JSON, which models without a template read as its text.
        truncation: what to do with a text that is too long; causal models cannot cut it, nor can
            those that are asked by prompts.

    Raises:
        ValidationError: a question does not fit the model, or the text is too long.
        OverloadedError: the queue has no room for them.
        DeadlineError: the time is up.
    """
    method = method_of(model.manifest)
    assert method is not None, "a model without it does not serve the task"
    prompts = model.prompts
    if method == "likelihood" and prompts is not None and await prompts.fits(questions):
        method = "letters"
    if method in ("head", "letters"):
        assert prompts is not None, "models that answer so are asked by prompts"
        if truncation.enabled:
            raise ValidationError(_CANNOT_CUT, field="truncate")
        async with deadline.enforced():
            written = await prompts.write(state, questions)
        return await _answer_prompts(method, written, len(questions), model, config, deadline)
    text = as_text(state)
    if isinstance(model, MaskedModel):
        request = _MASKED[method](text, questions, truncation)
        answer = await run.answer(request, model, config, deadline)
        return Decisions(method, answer.content, answer.timings)
    assert isinstance(model, CausalModel)
    if truncation.enabled:
        raise ValidationError(_CANNOT_CUT, field="truncate")
    current_usage().note(model, text, questions)
    found = await likelihoods(text, questions, model, config, deadline)
    return Decisions(method, found.probabilities, found.timings, found.num_cached)


async def _answer_prompts(
    method: DecisionMethod,
    prompts: Sequence[DecisionPrompt],
    num_questions: int,
    model: ServedModel,
    config: Config,
    deadline: Deadline,
) -> Decisions:
    if isinstance(model, MaskedModel):
        request = PromptDecision(prompts, num_questions)
        answer = await run.answer(request, model, config, deadline)
        return Decisions(method, answer.content, answer.timings)
    assert isinstance(model, CausalModel)
    current_usage().note(model, prompts, num_questions)
    found = await read_labels(prompts, num_questions, model, config, deadline)
    return Decisions(method, found.probabilities, found.timings, found.num_cached)
