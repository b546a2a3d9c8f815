"""Call: one request to a task route, from its parsed body to its reply."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from maskdial.ask.write import AnyGeneration, Writer, prepare, task_under, writing
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.request import GenerationRequest
from maskdial.dialects.body import SECONDS_PER_BYTE, BodyError, TaskBody, read_body, read_object
from maskdial.engine.fairness import current_usage
from maskdial.engine.offload import offload
from maskdial.engine.timing import Deadline, Timed
from maskdial.errors import MaskdialError, ValidationError
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.ignored import Ignored
from maskdial.http.replies import error_reply, json_reply
from maskdial.http.route import Endpoint, TaskRoute
from maskdial.http.sse import EVENTS, Frames, StreamForm, stream_reply
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.task import TaskRequest
from maskdial.policy.generation import GuardedGeneration
from maskdial.policy.guard import GuardedRequest, Rerouted
from maskdial.registry.choice import ModelChoice
from maskdial.registry.entry import Lease
from maskdial.registry.served import ServedModel, Task

BodyT = TypeVar("BodyT", bound=TaskBody)
OtherT = TypeVar("OtherT", bound=TaskBody)
AnyBody = TypeVar("AnyBody", bound=BaseModel)
T = TypeVar("T")


class Call(Generic[BodyT]):
    """A request whose body has been read.

    Attributes:
        body: the body.
        model_name: the model that the path names; None: the body names it, or the task does.
        deadline: when the reply is due, counted from the body's arrival.
        ignored: what the request brought that means nothing here; None: that is refused.
    """

    def __init__(self, request: Request, body: BodyT) -> None:
        self.body = body
        self.model_name: str | None = request.path_params.get("name")
        self.server = server_context(request)
        self.deadline = Deadline(body.timeout, self.server.config)
        self.ignored: Ignored | None = getattr(request.state, "ignored", None)
        self._request = request

    @property
    def request(self) -> Request:
        """The request of the HTTP connection, for routes that read its path or headers."""
        return self._request

    async def read_as(self, schema: type[OtherT]) -> "Call[OtherT]":
        """The same request with its body read as another one.

        Raises:
            ValidationError: the body violates the schema.
        """
        content = await self._request.body()
        return self.with_body(await read_body(schema, content, self.ignored))

    def with_body(self, body: OtherT) -> "Call[OtherT]":
        """The same request, with the same deadline and lease, for another body."""
        other: Call[OtherT] = Call(self._request, body)
        other.deadline = self.deadline
        return other

    async def content(self) -> Mapping[str, Any]:
        """The body's fields as they were sent."""
        content = await self._request.body()
        return await self.reread(lambda: read_object(content))

    async def reread(self, work: Callable[[], T]) -> T:
        """Reads the body, or parts of it, once more: in a thread if the body is large."""
        return await offload(work, len(await self._request.body()) * SECONDS_PER_BYTE)

    def check_admin(self) -> None:
        """Whether the request may change the server; see `Keys.check_admin`."""
        self.server.keys.check_admin(self._request.scope)

    def choice(self) -> ModelChoice:
        """Which model is meant.

        Raises:
            ValidationError: name and mask contradict each other.
        """
        routed: list[str] = getattr(self._request.state, "routed", [])
        return ModelChoice(routed[-1]) if routed else self.body.choice(self.model_name)

    def reroute(self, model: str) -> None:
        """Has another model answer, as a policy says.

        Raises:
            ValidationError: it has been asked before.
        """
        state = self._request.state
        routed: list[str] = getattr(state, "routed", [])
        if model in routed:
            raise BodyError(f"policies route this request to {model!r} again", field="model")
        state.routed = [*routed, model]
        lease, state.lease = state.lease, None
        lease.release()

    def act_for(self, key: str) -> None:
        """Gives the request the prefixes and policies of a key of another name, if any."""
        current_usage().key = key
        self._request.state.bound_key = key or self._request.state.key

    async def model(self, task: Task) -> ServedModel:
        """The model that is meant, loaded if necessary; if both masks do the task, the causal one.

        Raises:
            NotFoundError: no such model, or none for the task.
            ValidationError: the model cannot do the task, or several can.
            UnavailableError: it could not be loaded, or requests may not have it loaded.
            DeadlineError: it was not loaded in time.
        """
        try:
            choice = self.choice()
            lease = await self.lease(choice, task)
            model = self.server.models.pick(lease, choice, task)
        except ValidationError as error:
            raise BodyError(error.message, field="model") from error
        self._request.state.model = model.name
        if self.server.policies is not None:
            self.server.policies.check_task(
                model.manifest, model.name, self._request.state.key, task
            )
        return model

    async def masked(self, task: Task) -> MaskedModel:
        """`model` of a task that only masked models do."""
        model = await self.model(task)
        assert isinstance(model, MaskedModel)
        return model

    async def writer(self) -> Writer:
        """The model that is meant to write, by whichever way it does under the mask that is asked
        for.

        Raises:
            As `model`.
        """
        mask = self.choice().mask
        return writing(await self.model(task_under(mask)), mask)

    async def lease(self, choice: ModelChoice, task: Task | None = None) -> Lease:
        """The request's lease, which the guard releases; without a task, on the named model.

        A request has one lease at most: one that waited for a second would keep its first model
        from being unloaded, perhaps to make room for the second.

        Raises:
            As `model`.
        """
        models, state = self.server.models, self._request.state

        async def wait() -> None:
            # Set here, so that the guard knows a lease whose waiter was cancelled at the last
            # moment.
            state.lease = await models.lease(choice, task)

        if getattr(state, "lease", None) is None:
            state.lease = models.try_lease(choice, task)
        if state.lease is None:
            async with self.deadline.enforced():
                await wait()
        lease = state.lease
        assert isinstance(lease, Lease)
        return lease

    async def answer(self, request: TaskRequest[T], model: MaskedModel) -> Timed[T]:
        """Runs a task of the masked family; see `maskdial.masked.run.answer`."""
        return await run.answer(request, model, self.server.config, self.deadline)

    async def generation(
        self, asked: GenerationRequest | ChatRequest, model: Writer
    ) -> AnyGeneration:
        """Admits a request to write, or a conversation to answer, under the mask that is asked for
        and the policies that bind it; see `maskdial.ask.write.prepare`.

        Raises:
            RefusedError: a policy refuses it.
            Rerouted: a policy has another model answer.
        """
        guarded = self._guarded(model)
        if guarded is None:
            return await self._admitted(asked, model)
        asked = await guarded.read(asked, model)
        return GuardedGeneration(await self._admitted(asked, model), guarded, model, asked)

    def _guarded(self, model: Writer) -> GuardedRequest | None:
        """The request under the policies that bind it, and those that it asks for."""
        policies, state = self.server.policies, self._request.state
        names = self._request.headers.get("x-policy", "")
        if policies is None:
            if names:
                raise ValidationError("this server has no policies (--policy)", field="x-policy")
            return None
        key = getattr(state, "bound_key", state.key)
        guarded = policies.over(model.name, key, names, self.deadline, state.request_id)
        state.policy = "" if guarded is None else guarded.names
        return guarded

    async def _admitted(
        self, asked: GenerationRequest | ChatRequest, model: Writer
    ) -> AnyGeneration:
        request = asked.generation_for(model) if isinstance(asked, ChatRequest) else asked
        mask = self.choice().mask
        generation = await prepare(request, model, mask, self.server.config, self.deadline)
        if self.ignored is not None and request.is_limited:
            longest = max(len(prompt.context_ids) for prompt in generation.prompts)
            if (request.max_new_tokens or 0) > model.max_length - longest:
                field = self.body.names().get("max_new_tokens", "max_new_tokens")
                self.ignored.clipped[field] = None
        return generation

    async def stream(
        self,
        frames: Frames,
        error_frame: Callable[[MaskdialError], bytes],
        headers: dict[str, str],
        form: StreamForm = EVENTS,
    ) -> Response:
        """A reply of events; see `stream_reply`. Errors name the body's fields."""

        def located(error: MaskdialError) -> bytes:
            return error_frame(self.located(error))

        return await stream_reply(self._request, frames, located, headers, form)

    def located(self, error: MaskdialError) -> MaskdialError:
        """The error with the place at fault as the client wrote it."""
        return self.body.locate(error) if isinstance(error, ValidationError) else error


Answerer = Callable[[Call[BodyT]], Awaitable[Response]]
"""Makes the reply of a call."""


async def respond(answer: Answerer[BodyT], call: Call[BodyT]) -> Response:
    """The reply of a call.

    Raises:
        MaskdialError: why there is none, in the words of the body.
    """
    try:
        return await answer(call)
    except ValidationError as error:
        raise call.located(error) from error


async def tell(request: Request, task: Task, describe: Callable[[ServedModel], object]) -> Response:
    """What a route that reads no body says of the model that does a task, or of the one that
    `?model=` names; it is loaded first.
    """
    server = server_context(request)
    choice = ModelChoice.of(request.query_params.get("model"))
    try:
        async with Deadline(None, server.config).enforced():
            lease = await server.models.lease(choice, task)
        try:
            model = server.models.pick(lease, choice, task)
            return json_reply(await asyncio.to_thread(describe, model))
        finally:
            lease.release()
    except MaskdialError as error:
        return error_reply(error)


async def read_lenient(
    schema: type[AnyBody], request: Request, content: bytes | None = None
) -> AnyBody:
    """A request's body. What it brings that means nothing here is noted: the reply's headers tell
    it (`Exchange.send`), and the log.

    Args:
        schema: of the body.
        request: the request.
        content: the JSON, if it is not all of the body.

    Raises:
        ValidationError: the body violates the schema.
    """
    server = server_context(request)
    ignored = Ignored() if server.config.unknown_fields == "ignore" else None
    request.state.ignored = ignored
    body = await read_body(schema, await request.body() if content is None else content, ignored)
    if ignored is not None:
        server.ignored.note(request.state.client, ignored)
    return body


def endpoint(answer: Answerer[BodyT], body: type[BodyT]) -> Endpoint:
    """An endpoint that reads the body, watches the client, and answers.

    The work of a client that leaves before its reply begins is cancelled.
    """

    async def serve(request: Request) -> Response:
        call = Call(request, await read_lenient(body, request))
        while True:
            try:
                return await unless_gone(request, respond(answer, call))
            except Rerouted as elsewhere:
                call.reroute(elsewhere.model)

    return serve


def task_route(
    path: str,
    answer: Answerer[BodyT],
    body: type[BodyT],
    reply: Any,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Any,
) -> TaskRoute:
    """A route whose calls are answered by a function.

    Args:
        path: as FastAPI writes it.
        answer: makes the reply.
        body: the type of the body.
        reply: the type of the reply, for the documentation.
        name: for the documentation; the function's own by default.
        description: likewise.
        options: of `TaskRoute`.
    """
    return TaskRoute(
        path,
        endpoint(answer, body),
        body=body,
        reply=reply,
        name=name or answer.__name__,
        description=description or inspect.cleandoc(answer.__doc__ or ""),
        **options,
    )
