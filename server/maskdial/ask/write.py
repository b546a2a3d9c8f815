"""Requests to write: which model is meant, and its texts by whichever way it writes."""

from dataclasses import replace

from maskdial.ask.catalogue import UNMASK, WRITE
from maskdial.ask.unmasking import UnmaskedGeneration, UnmaskingModel
from maskdial.causal.generate import Generation
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest
from maskdial.config import Config
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError
from maskdial.registry.choice import WrittenMask
from maskdial.registry.served import ServedModel, Task

Writer = CausalModel | UnmaskingModel
AnyGeneration = Generation | UnmaskedGeneration


def task_under(mask: WrittenMask | None) -> Task:
    """What a model is asked for by a request to write under a mask; None: its own."""
    return UNMASK if mask == "full" else WRITE


def writing(model: ServedModel, mask: WrittenMask | None) -> Writer:
    """A model that does the task, as it writes under a mask."""
    if isinstance(model, CausalModel) and mask != "block":
        return model
    return UnmaskingModel(model)


async def prepare(
    request: GenerationRequest,
    model: Writer,
    mask: WrittenMask | None,
    config: Config,
    deadline: Deadline,
) -> AnyGeneration:
    """Admits a request to write under a mask.

    Raises:
        As `Generation.prepare` and `UnmaskedGeneration.prepare`.
        ValidationError: it says how to unmask a text that is written token by token.
    """
    if isinstance(model, UnmaskingModel):
        return await UnmaskedGeneration.prepare(request, model, config, deadline)
    for name in request.unmasking.given:
        raise ValidationError(
            "is for the full and the block mask; set mask to one of them", field=name
        )
    if mask == "prefix":
        request = replace(request, full_prompt=True)
    return await Generation.prepare(request, model, config, deadline)
