"""`/v1/messages/batches`: batches of messages, as Anthropic has them.

They are the Batch API's: a file of requests to `/v1/messages`, and files of their results.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from maskdial.batches.files import new_file_id
from maskdial.batches.jobs import MESSAGES_PREFIX, Job
from maskdial.batches.output import write_whole
from maskdial.batches.routes import read_number
from maskdial.batches.service import BatchService, owner_of, service_of
from maskdial.bounds import Size
from maskdial.dialects.anthropic.errors import FORM
from maskdial.dialects.anthropic.replies import AnthropicError
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.call import read_lenient
from maskdial.dialects.lenient import Lenient
from maskdial.errors import MaskdialError, NotFoundError, ValidationError, shortened
from maskdial.http.replies import encode_json, json_reply
from maskdial.http.route import Route, TaskRoute

_ENDPOINT = "/v1/messages"
_SECONDS = 86_400
_MAX_REQUESTS = 100_000
_PAGE, _MAX_PAGE = 20, 1000


class BatchedRequest(Lenient):
    """A conversation to answer, and how its result is named."""

    within = "requests"

    custom_id: Annotated[str, Size(1, 64, "characters")]
    params: dict[str, Any] = Field(description="The body of `/v1/messages`.")


class MessageBatchBody(Lenient):
    """Conversations to answer."""

    habits = frozenset({"user_profile_id", "workspace_id"})
    model_config = example(
        {
            "requests": [
                {
                    "custom_id": "first",
                    "params": {
                        "messages": [{"role": "user", "content": "Who lives here?"}],
                        "max_tokens": 40,
                    },
                }
            ]
        }
    )

    requests: Annotated[list[BatchedRequest], Size(1, _MAX_REQUESTS, "requests")]

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        known: set[str] = set()
        for index, request in enumerate(self.requests):
            where = f"requests[{index}]"
            if request.custom_id in known:
                raise FieldError(
                    f"{where}.custom_id", f"{shortened(request.custom_id)!r} is there twice"
                )
            known.add(request.custom_id)
            if request.params.get("stream"):
                raise FieldError(
                    f"{where}.params.stream", "a batch has whole replies; leave it out"
                )
        return self

    def lines(self) -> bytes:
        """The requests as a file of the Batch API."""
        return b"".join(
            encode_json(
                {
                    "custom_id": each.custom_id,
                    "method": "POST",
                    "url": _ENDPOINT,
                    "body": each.params,
                }
            )
            + b"\n"
            for each in self.requests
        )


class MessageCounts(TypedDict):
    """How many requests of a batch are in which state; until it has ended, all are processing."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    """A batch; times are in the form of RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatches(TypedDict):
    """Some batches, the newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(TypedDict):
    """A batch that is no more."""

    id: str
    type: Literal["message_batch_deleted"]


async def create(request: Request) -> Response:
    """Answers conversations while the server has nothing else to do."""
    service, owner = service_of(request), owner_of(request)
    body = await read_lenient(MessageBatchBody, request)
    content, file_id = body.lines(), new_file_id()
    partial = service.files.path(f"{file_id}.partial")
    with service.room.growing(owner) as growing:
        growing.grow_to(len(content))
        await service.storage.run(lambda: write_whole(partial, content))
        file = await service.add_file(partial, file_id, owner, "requests.jsonl", None)
    try:
        job = await service.create(
            owner,
            file_id=file.id,
            endpoint=_ENDPOINT,
            window="24h",
            seconds=_SECONDS,
            metadata=None,
            output_expiry=None,
            prefix=MESSAGES_PREFIX,
        )
    except MaskdialError:
        await service.files.delete(file)
        raise
    job.total = len(body.requests)
    return json_reply(await _describe(request, job))


async def list_all(request: Request) -> Response:
    """The batches, the newest first; `after_id`, `before_id` and `limit` choose some."""
    found = [
        job
        for job in service_of(request).jobs.of(owner_of(request))[::-1]
        if job.id.startswith(MESSAGES_PREFIX)
    ]
    query = request.query_params
    limit = read_number(query.get("limit", str(_PAGE)), "limit", 1, _MAX_PAGE)
    places = {job.id: place for place, job in enumerate(found)}
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in places:
            raise NotFoundError(f"{name}: there is no batch with this id", field=name)
    if (before := query.get("before_id")) is not None:
        end = places[before]
        first = max(end - limit, 0)
        chosen, has_more = found[first:end], first > 0
    else:
        after = query.get("after_id")
        first = 0 if after is None else places[after] + 1
        chosen, has_more = found[first : first + limit], first + limit < len(found)
    content: MessageBatches = {
        "data": [await _describe(request, job) for job in chosen],
        "has_more": has_more,
        "first_id": chosen[0].id if chosen else None,
        "last_id": chosen[-1].id if chosen else None,
    }
    return json_reply(content)


async def retrieve(request: Request) -> Response:
    """`GET /v1/messages/batches/{id}`: the state of a batch and its counts."""
    return json_reply(await _describe(request, _job(request)))


async def cancel(request: Request) -> Response:
    """Ends a batch early; what is answered by then is kept."""
    job = _job(request)
    await service_of(request).cancel(job)
    return json_reply(await _describe(request, job))


async def delete(request: Request) -> Response:
    """Removes a batch that has ended, with its requests and results."""
    service, job = service_of(request), _job(request)
    _check_ended(job, "cancel it first")
    for file_id in (job.input_file_id, job.output_file_id, job.error_file_id):
        with suppress(NotFoundError):
            if file_id is not None:
                await service.files.delete(service.files.get(file_id, job.owner))
    await service.jobs.forget(job)
    content: DeletedMessageBatch = {"id": job.id, "type": "message_batch_deleted"}
    return json_reply(content)


async def results(request: Request) -> Response:
    """A result for each request of a batch, in lines of JSON."""
    service, job = service_of(request), _job(request)
    _check_ended(job, "wait for its end")
    written = [
        service.files.path(service.files.get(file_id, job.owner).id)
        for file_id in (job.output_file_id, job.error_file_id)
        if file_id is not None
    ]
    asked = service.files.path(service.files.get(job.input_file_id, job.owner).id)
    return StreamingResponse(_results(job, asked, written), media_type="application/x-jsonl")


def _results(job: Job, asked: Path, written: list[Path]) -> Iterator[bytes]:
    """The results of a batch: those that are written, and what became of the other requests.

    Args:
        job: the batch.
        asked: the file of its requests.
        written: the files of its results, one after the other.
    """
    done = set()
    for path in written:
        for line in _lines(path):
            done.add(line["custom_id"])
            yield _result_line(line["custom_id"], _result(line))
    for line in _lines(asked):
        if line["custom_id"] not in done:
            yield _result_line(line["custom_id"], _unanswered(job))


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, file)


def _result_line(custom_id: str, result: Mapping[str, Any]) -> bytes:
    return encode_json({"custom_id": custom_id, "result": result}) + b"\n"


def _result(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a line of the results says, as Anthropic writes it."""
    if (response := line["response"]) is not None:
        if response["status_code"] == 200:
            return {"type": "succeeded", "message": response["body"]}
        return {"type": "errored", "error": response["body"]}
    error = line["error"]
    if error["code"] == "batch_expired":
        return {"type": "expired"}
    return _errored(error["message"])


def _unanswered(job: Job) -> Mapping[str, Any]:
    """What became of a request that has no result."""
    if job.status == "cancelled":
        return {"type": "canceled"}
    return _errored(job.errors[0]["message"] if job.errors else "internal error")


def _errored(message: str) -> Mapping[str, Any]:
    error: AnthropicError = {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": message},
    }
    return {"type": "errored", "error": error}


def _job(request: Request) -> Job:
    job = service_of(request).jobs.get(request.path_params["id"], owner_of(request))
    if not job.id.startswith(MESSAGES_PREFIX):
        raise NotFoundError("there is no batch with this id", field="id")
    return job


def _check_ended(job: Job, advice: str) -> None:
    if not job.has_ended:
        raise ValidationError(f"the batch has not ended: it is {job.status}; {advice}", field="id")


async def _describe(request: Request, job: Job) -> MessageBatch:
    """A batch as Anthropic writes it."""
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if job.status == "cancelling":
        status = "canceling"
    ended_at = None
    if job.has_ended:
        status, ended_at = "ended", _time(job.times[f"{job.status}_at"])
    cancelled_at = job.times.get("cancelling_at")
    url = f"{str(request.base_url).rstrip('/')}/v1/messages/batches/{job.id}/results"
    return {
        "id": job.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": await _counts(service_of(request), job),
        "created_at": _time(job.created_at),
        "expires_at": _time(job.expires_at),
        "ended_at": ended_at,
        "cancel_initiated_at": None if cancelled_at is None else _time(cancelled_at),
        "archived_at": None,
        "results_url": None if ended_at is None else url,
    }


async def _counts(service: BatchService, job: Job) -> MessageCounts:
    counts: MessageCounts = {
        "processing": 0,
        "succeeded": 0,
        "errored": 0,
        "canceled": 0,
        "expired": 0,
    }
    if not job.has_ended:
        counts["processing"] = job.total
        return counts
    num_left = job.total - job.num_answered - job.num_failed
    counts["succeeded"], counts["errored"] = job.num_answered, job.num_failed
    counts["canceled" if job.status == "cancelled" else "errored"] += num_left
    if job.status == "expired" and job.error_file_id is not None:
        path = service.files.path(job.error_file_id)

        def count() -> int:
            with suppress(FileNotFoundError):
                return sum(_result(line)["type"] == "expired" for line in _lines(path))
            return 0

        counts["expired"] = await service.storage.run(count)
        counts["errored"] -= counts["expired"]
    return counts


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _post(path: str, endpoint: Any, **options: Any) -> TaskRoute:
    return TaskRoute(
        path,
        endpoint,
        reply=MessageBatch,
        error=AnthropicError,
        error_reply=FORM.reply,
        invalid_status=400,
        tags=["anthropic"],
        **options,
    )


def _route(method: str, path: str, endpoint: Any, reply: Any, **options: Any) -> Route:
    return Route(
        path,
        endpoint,
        methods=[method],
        reply=reply,
        error=AnthropicError,
        statuses=(400, 404, 503),
        tags=["anthropic"],
        **options,
    )


_PATH = "/v1/messages/batches"
ROUTES = (
    _post(_PATH, create, name="create_message_batch", body=MessageBatchBody),
    _route(
        "GET",
        _PATH,
        list_all,
        MessageBatches,
        name="list_message_batches",
        queries=("after_id", "before_id", "limit"),
    ),
    _route("GET", f"{_PATH}/{{id}}", retrieve, MessageBatch, name="retrieve_message_batch"),
    _route("DELETE", f"{_PATH}/{{id}}", delete, DeletedMessageBatch, name="delete_message_batch"),
    _route(
        "GET",
        f"{_PATH}/{{id}}/results",
        results,
        None,
        name="message_batch_results",
        media_type="application/x-jsonl",
    ),
    _post(f"{_PATH}/{{id}}/cancel", cancel, name="cancel_message_batch"),
)
