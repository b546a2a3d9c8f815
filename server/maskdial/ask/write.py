"""Requests to write: which model is meant, and its texts by whichever way it writes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from maskdial.ask.catalogue import UNMASK, WRITE
from maskdial.ask.unmasking import UnmaskedBlock, UnmaskedGeneration, UnmaskingModel
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, Generation
from maskdial.causal.model import CausalModel
from maskdial.causal.prompts import Prompt
from maskdial.causal.request import GenerationRequest
from maskdial.config import Config
from maskdial.engine.timing import Deadline, Timings
from maskdial.errors import ValidationError
from maskdial.registry.choice import WrittenMask
from maskdial.registry.served import ServedModel, Task

Writer = CausalModel | UnmaskingModel


class AnyGeneration(Protocol):
    """An admitted request to write, by whichever way: its prompts are read, its texts ready to run.

    Either `complete` it or `stream` it, once.
    """

    @property
    def prompts(self) -> Sequence[Prompt]: ...
    @property
    def warnings(self) -> Sequence[str]: ...
    def timings(self, completions: Sequence[Completion]) -> Timings: ...
    async def complete(self) -> list[Completion]: ...
    def stream(
        self,
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, TokenEvent | UnmaskedBlock]]]: ...


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
