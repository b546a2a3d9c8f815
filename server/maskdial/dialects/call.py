"""Which model answers a request; it is not unloaded before the guard has seen the reply go out."""

from fastapi import Request

from maskdial.causal.model import CausalModel
from maskdial.engine.timing import Deadline
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.masked.model import MaskedModel
from maskdial.registry.choice import Choice
from maskdial.registry.entry import Lease
from maskdial.registry.served import ServedModel, Task


async def model_for(
    request: Request, task: Task, choice: Choice, deadline: Deadline
) -> ServedModel:
    """The model that is meant, loaded if necessary; if both masks do the task, the causal one.

    Raises:
        NotFoundError: no such model, or none for the task.
        ValidationError: the model cannot do the task, or several can.
        UnavailableError: it could not be loaded, or requests may not have it loaded.
        DeadlineError: it was not loaded in time.
        ClientGoneError: the client left meanwhile.
    """
    lease = await lease_for(request, choice, deadline, task)
    model = server_context(request).models.pick(lease, choice, task)
    request.state.model = model.name
    return model


async def masked_for(
    request: Request, task: Task, choice: Choice, deadline: Deadline
) -> MaskedModel:
    """`model_for` a task that only masked models do."""
    model = await model_for(request, task, choice, deadline)
    assert isinstance(model, MaskedModel)
    return model


async def causal_for(
    request: Request, task: Task, choice: Choice, deadline: Deadline
) -> CausalModel:
    """`model_for` a task that only causal models do."""
    model = await model_for(request, task, choice, deadline)
    assert isinstance(model, CausalModel)
    return model


async def lease_for(
    request: Request, choice: Choice, deadline: Deadline, task: Task | None = None
) -> Lease:
    """The request's lease, which the guard releases; without a task, on the named model.

    A request has one lease at most: one that waited for a second would keep its first model from
    being unloaded, perhaps to make room for the second.

    Raises:
        As `model_for`.
    """
    models = server_context(request).models

    async def wait() -> None:
        # Set here, so that the guard knows a lease whose waiter was cancelled at the last moment.
        request.state.lease = await models.lease(choice, task)

    if getattr(request.state, "lease", None) is None:
        request.state.lease = models.lease_now(choice, task)
    if request.state.lease is None:
        async with deadline.enforced():
            await unless_gone(request, wait())
    lease = request.state.lease
    assert isinstance(lease, Lease)
    return lease
