"""`/v1/files` and `/v1/batches`, as OpenAI has them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request, Response
from fastapi.responses import FileResponse
from pydantic import Field
from typing_extensions import TypedDict

from maskdial.batches import jobs
from maskdial.batches.files import StoredFile, new_file_id
from maskdial.batches.jobs import LineError, Status
from maskdial.batches.service import owner_of, service_of
from maskdial.batches.upload import receive_upload
from maskdial.bounds import Range
from maskdial.dialects.body import example, read_body
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.openai.base import Metadata
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import OpenAIError
from maskdial.errors import NotFoundError, ValidationError, shortened
from maskdial.http.context import server_context
from maskdial.http.replies import json_reply
from maskdial.http.route import Route, TaskRoute

T = TypeVar("T")

_LEAST_EXPIRY, _MOST_EXPIRY = 3600, 30 * 86_400  # seconds, as OpenAI
_WINDOW = re.compile(r"([1-9]\d{0,2})([hd])")
_MAX_WINDOW = 7 * 86_400
_PAGE, _MAX_PAGE = 20, 100
_FILES_PAGE = 10_000
_FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class ExpiresAfter(Lenient):
    """When a file is removed."""

    anchor: Literal["created_at"] = Field(description="From when on the seconds count.")
    seconds: Annotated[int, Range(_LEAST_EXPIRY, _MOST_EXPIRY)] = Field(
        description="An hour to 30 days."
    )


class BatchBody(Lenient):
    """A batch to answer."""

    model_config = example(
        {
            "input_file_id": "file-abc",
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        }
    )

    input_file_id: str = Field(
        description="Of a file with a request in each line, uploaded with the purpose `batch`."
    )
    endpoint: str = Field(description="The path of the task that all its lines are for.")
    completion_window: str = Field(
        description="After so long, lines that have no answer fail: hours (`24h`) or days (`7d`), "
        "seven days at most."
    )
    metadata: Metadata | None = Field(None, description="Any 16 pairs, which replies repeat.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When the files of results are removed. Default: after 30 days."
    )


class UploadForm(TypedDict):
    """A file to upload."""

    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]


class FileReply(TypedDict):
    """A file; times are in seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FilesReply(TypedDict):
    """A page of the list of files."""

    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedReply(TypedDict):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: bool


class ErrorsReply(TypedDict):
    """What is wrong with an input file."""

    object: Literal["list"]
    data: list[LineError]


class CountsReply(TypedDict):
    """How many lines a batch has, and how many of them are done."""

    total: int
    completed: int
    failed: int


class BatchReply(TypedDict):
    """A batch; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: ErrorsReply | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: CountsReply
    metadata: dict[str, str] | None


class BatchesReply(TypedDict):
    """A page of the list of batches."""

    object: Literal["list"]
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def upload_file(request: Request) -> Response:
    """Keeps a file of requests for a batch."""
    service, owner = service_of(request), owner_of(request)
    file_id = new_file_id()
    partial = service.files.path(f"{file_id}.partial")
    limit = server_context(request).config.batch_max_file_bytes
    with service.room.growing(owner) as growing:
        async with receive_upload(
            request, service.storage, partial, limit, growing.grow_to
        ) as upload:
            expiry = _read_form(upload.fields)
            name = upload.filename or "file"
            file = await service.add_file(partial, file_id, owner, name, expiry)
    return json_reply(_describe(file))


async def list_files(request: Request) -> Response:
    """The files, the newest first; `after`, `limit`, `order` and `purpose` choose some."""
    found = service_of(request).files.of(owner_of(request))
    if (purpose := request.query_params.get("purpose")) is not None:
        found = [file for file in found if file.purpose == purpose]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ValidationError('order: must be "asc" or "desc"', field="order")
    if order == "desc":
        found.reverse()
    return _page(request, found, lambda file: file.id, _describe, _FILES_PAGE, _FILES_PAGE)


async def retrieve_file(request: Request) -> Response:
    """`GET /v1/files/{id}`: what is known of an uploaded or a written file."""
    return json_reply(_describe(_file(request)))


async def download_file(request: Request) -> Response:
    """The content of a file."""
    file = _file(request)
    path = service_of(request).files.path(file.id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(request: Request) -> Response:
    """`DELETE /v1/files/{id}`: removes a file that no running batch reads."""
    file = _file(request)
    await service_of(request).delete_file(file)
    return json_reply({"id": file.id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> Response:
    """Answers a file of requests while the server has nothing else to do."""
    service = service_of(request)
    body = await read_body(BatchBody, await request.body())
    expiry = body.output_expires_after
    job = await service.create(
        owner_of(request),
        file_id=body.input_file_id,
        endpoint=body.endpoint,
        window=body.completion_window,
        seconds=_window_seconds(body.completion_window),
        metadata=body.metadata,
        output_expiry=None if expiry is None else expiry.seconds,
    )
    return json_reply(jobs.wire(job))


async def list_batches(request: Request) -> Response:
    """The batches, the newest first; `after` and `limit` choose some."""
    found = service_of(request).jobs.of(owner_of(request))[::-1]
    return _page(request, found, lambda job: job.id, jobs.wire, _PAGE, _MAX_PAGE)


async def retrieve_batch(request: Request) -> Response:
    """`GET /v1/batches/{id}`: the state of a batch and its counts."""
    return json_reply(jobs.wire(_job(request)))


async def cancel_batch(request: Request) -> Response:
    """Ends a batch early; what is answered by then is kept."""
    job = _job(request)
    await service_of(request).cancel(job)
    return json_reply(jobs.wire(job))


def _file(request: Request) -> StoredFile:
    service = service_of(request)
    return service.files.get(request.path_params["id"], owner_of(request))


def _job(request: Request) -> jobs.Job:
    return service_of(request).jobs.get(request.path_params["id"], owner_of(request))


def _describe(file: StoredFile) -> FileReply:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _read_form(fields: Mapping[str, str]) -> int | None:
    """The seconds after which an uploaded file is removed, if its form says so."""
    for name in fields:
        if name not in _FORM_FIELDS:
            raise ValidationError(f"{shortened(name)}: unknown field", field=shortened(name))
    if fields.get("purpose") != "batch":
        raise ValidationError('purpose: must be "batch"', field="purpose")
    anchor, seconds = (fields.get(name) for name in _FORM_FIELDS[1:])
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ValidationError(
            'expires_after[anchor]: must be "created_at"', field="expires_after[anchor]"
        )
    return read_number(seconds or "", "expires_after[seconds]", _LEAST_EXPIRY, _MOST_EXPIRY)


def _window_seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = 0 if match is None else int(match[1]) * {"h": 3600, "d": 86_400}[match[2]]
    if not 0 < seconds <= _MAX_WINDOW:
        raise ValidationError(
            'completion_window: must be hours or days, such as "24h", and seven days at most',
            field="completion_window",
        )
    return seconds


def _page(
    request: Request,
    found: Sequence[T],
    id_of: Callable[[T], str],
    describe: Callable[[T], Any],
    page: int,
    most: int,
) -> Response:
    """Those of a list that the query asks for."""
    query = request.query_params
    limit = read_number(query.get("limit", str(page)), "limit", 1, most)
    first = 0
    if (after := query.get("after")) is not None:
        ids = [id_of(each) for each in found]
        if after not in ids:
            raise NotFoundError("there is nothing with this id in the list", field="after")
        first = ids.index(after) + 1
    chosen = found[first : first + limit]
    return json_reply(
        {
            "object": "list",
            "data": [describe(each) for each in chosen],
            "first_id": id_of(chosen[0]) if chosen else None,
            "last_id": id_of(chosen[-1]) if chosen else None,
            "has_more": first + limit < len(found),
        }
    )


def read_number(text: str, name: str, least: int, most: int) -> int:
    """A number from a query or a form.

    Raises:
        ValidationError: it is none, or out of its bounds.
    """
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not least <= int(text) <= most:
        raise ValidationError(f"{name}: must be a number from {least} to {most}", field=name)
    return int(text)


def _post(path: str, endpoint: Any, reply: Any, **options: Any) -> TaskRoute:
    return TaskRoute(
        path,
        endpoint,
        reply=reply,
        error=OpenAIError,
        error_reply=FORM.reply,
        invalid_status=400,
        tags=["openai"],
        **options,
    )


def _route(method: str, path: str, endpoint: Any, reply: Any, **options: Any) -> Route:
    return Route(
        path,
        endpoint,
        methods=[method],
        reply=reply,
        error=OpenAIError,
        statuses=(400, 404, 503),
        tags=["openai"],
        **options,
    )


ROUTES = (
    _post(
        "/v1/files",
        upload_file,
        FileReply,
        body=UploadForm,
        body_type="multipart/form-data",
        takes_file=True,
    ),
    _route(
        "GET", "/v1/files", list_files, FilesReply, queries=("after", "limit", "order", "purpose")
    ),
    _route("GET", "/v1/files/{id}", retrieve_file, FileReply),
    _route(
        "GET",
        "/v1/files/{id}/content",
        download_file,
        None,
        media_type="application/octet-stream",
    ),
    _route("DELETE", "/v1/files/{id}", delete_file, DeletedReply),
    _post("/v1/batches", create_batch, BatchReply, body=BatchBody),
    _route("GET", "/v1/batches", list_batches, BatchesReply, queries=("after", "limit")),
    _route("GET", "/v1/batches/{id}", retrieve_batch, BatchReply),
    _post("/v1/batches/{id}/cancel", cancel_batch, BatchReply),
)
