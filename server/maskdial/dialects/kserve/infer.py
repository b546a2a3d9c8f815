"""`/v2/models/NAME/infer`, with JSON or binary tensors, and `/v1/models/NAME:predict`."""

import inspect
import math
from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, Self

from fastapi import Request, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from maskdial.bounds import Range, Size
from maskdial.dialects.body import BodyError, TaskBody, example
from maskdial.dialects.call import Call, read_lenient, respond
from maskdial.dialects.kserve.answers import TEXT, body_of, task_for, tensors_of
from maskdial.dialects.kserve.repository import check_version
from maskdial.dialects.kserve.tensors import (
    LENGTH_BYTES,
    OutputTensor,
    TextTensor,
    check_header,
    read_bytes,
    read_list,
)
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.unsupported import Unsupported
from maskdial.engine.offload import offload
from maskdial.errors import MaskdialError, ValidationError, shortened
from maskdial.http.disconnect import unless_gone
from maskdial.http.replies import (
    encode_json,
    error_content,
    error_headers,
    json_reply,
    timing_headers,
)
from maskdial.http.route import TaskRoute

HEADER_LENGTH = "inference-header-content-length"
"""The header that says how many bytes of JSON come before the binary tensors."""

_SECONDS_PER_NUMBER = 1e-7  # to write it as JSON
_MAX_DIMENSION = 2**63 - 1
_MAX_LENGTH_DIGITS = 19


_SharedMemory = Annotated[
    Any, Unsupported("this server shares no memory with clients; send the bytes")
]


class InputParameters(Lenient):
    """Where an input's data is."""

    within = "inputs.parameters"

    shared_memory_region: _SharedMemory = None

    binary_data_size: Annotated[int, Range(0, _MAX_DIMENSION)] | None = Field(
        None,
        description="Bytes of the input, which come after the JSON. Default: the data is here.",
    )


class InferInput(Lenient):
    """An input tensor of texts."""

    within = "inputs"

    name: str
    shape: Annotated[
        list[Annotated[int, Range(-_MAX_DIMENSION, _MAX_DIMENSION)]], Size(0, 8, "dimensions")
    ]
    datatype: str = Field(description="BYTES.")
    data: list[Any] | None = Field(None, description="The texts, nested by the shape or not.")
    parameters: InputParameters | None = None

    @property
    def binary_size(self) -> int | None:
        """Its bytes after the JSON; None if it is in it."""
        return None if self.parameters is None else self.parameters.binary_data_size


class OutputParameters(Lenient):
    """How an output is sent."""

    neutral = {"classification": (0,)}  # noqa: RUF012
    within = "outputs.parameters"

    shared_memory_region: _SharedMemory = None

    binary_data: bool | None = Field(None, description="As bytes after the JSON. Default: as JSON.")


class InferOutput(Lenient):
    """An output that is wanted."""

    within = "outputs"

    name: str
    parameters: OutputParameters | None = None


class InferBody(Lenient, TaskBody):
    """Tensors of texts for a model, as in KServe's and Triton's protocol."""

    habits = frozenset({"model_name"})  # which KServe's own client repeats from the path
    model_config = example(
        {
            "inputs": [
                {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["A warm film."]}
            ]
        }
    )

    id: str | None = Field(None, description="Comes back with the reply.")
    inputs: Annotated[list[InferInput], Size(1, 16, "inputs")]
    outputs: Annotated[list[InferOutput], Size(0, 16, "outputs")] | None = Field(
        None, description="The outputs that are wanted. Default: all."
    )
    parameters: dict[str, bool | int | float | str] | None = Field(
        None,
        description="Parameters of the task. binary_data_output sends all outputs as bytes; "
        "timeout is Triton's, in microseconds.",
    )

    @model_validator(mode="after")
    def _take_timeout(self) -> Self:
        microseconds = (self.parameters or {}).get("timeout")
        if microseconds and self.timeout is None:
            if isinstance(microseconds, str | bool) or not 0 < microseconds <= 86_400e6:
                raise ValueError(
                    "parameters.timeout: must be between 1 and 86400000000 microseconds"
                )
            self.timeout = microseconds / 1e6
        return self

    @property
    def task_parameters(self) -> dict[str, bool | int | float | str]:
        """Those of the task."""
        given = self.parameters or {}
        return {name: given[name] for name in given if name not in _OWN_PARAMETERS}


_OWN_PARAMETERS = frozenset(
    {
        *("binary_data_output", "timeout", "triton_enable_empty_final_response"),
        *("sequence_id", "sequence_start", "sequence_end"),
    }
)


class InferredTensor(TypedDict):
    """An output tensor: its data is here, or in as many bytes after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, int]]


class InferReply(TypedDict):
    """The outputs of a model."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[InferredTensor]


def kserve_error_reply(error: MaskdialError) -> Response:
    """An error as Triton's clients expect it: 400 for what cannot be served."""
    status = 400 if isinstance(error, ValidationError) else error.status
    return json_reply(error_content(error), status=status, headers=error_headers(error))


async def infer(call: Call[InferBody], content: bytes = b"") -> Response:
    """Answers tensors of texts with tensors of whatever the model does.

    The reply, or a part of it, may be bytes: see Triton's binary tensor data extension.
    """
    body = call.body
    tensors = await call.reread(lambda: _read(body.inputs, content))
    lease = await call.lease(call.choice())
    served = [each for each in lease.models if call.choice().allows(each.manifest)]
    task = task_for(served, tensors)
    parameters, ignored = body.task_parameters, call.ignored
    asked = await call.reread(lambda: body_of(task, tensors, parameters, body, ignored))
    answer = await tensors_of(call, task, asked)
    wanted = _wanted(answer.content, body)
    size = sum(math.prod(tensor.shape) for tensor, _ in wanted)

    def reply() -> Response:
        return _reply(call, served[0].name, wanted, timing_headers(answer.timings))

    return await offload(reply, size * _SECONDS_PER_NUMBER)


def _read(inputs: Sequence[InferInput], content: bytes) -> list[TextTensor]:
    """The tensors, whose bytes follow each other after the JSON."""
    tensors = []
    place = 0
    for given in inputs:
        number = check_header(given.name, given.datatype, given.shape)
        size = given.binary_size
        if (given.data is None) == (size is None):
            raise ValidationError(
                f"input {shortened(given.name)!r} must have either data or binary_data_size"
            )
        if size is None:
            assert given.data is not None
            tensors.append(read_list(given.name, number, given.data))
            continue
        if place + size > len(content):
            raise ValidationError(
                f"input {shortened(given.name)!r} has {size:,} bytes (binary_data_size); the body "
                f"has {len(content) - place:,} more"
            )
        tensors.append(read_bytes(given.name, number, content[place : place + size]))
        place += size
    if place < len(content):
        raise ValidationError(f"the body has {len(content) - place:,} bytes beyond its tensors")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValidationError("two inputs have the same name")
    return tensors


def _wanted(outputs: Sequence[OutputTensor], body: InferBody) -> list[tuple[OutputTensor, bool]]:
    """The outputs to send, and whether as bytes."""
    by_default = (body.parameters or {}).get("binary_data_output") is True
    if not body.outputs:
        return [(each, by_default) for each in outputs]
    by_name = {each.name: each for each in outputs}
    found = []
    for index, asked in enumerate(body.outputs):
        if asked.name not in by_name:
            raise BodyError(
                f"outputs[{index}].name: there is no output {shortened(asked.name)!r}, but "
                + ", ".join(map(repr, by_name)),
                field=f"outputs[{index}].name",
            )
        binary = None if asked.parameters is None else asked.parameters.binary_data
        found.append((by_name[asked.name], by_default if binary is None else binary))
    return found


def _reply(
    call: Call[InferBody],
    model_name: str,
    outputs: Sequence[tuple[OutputTensor, bool]],
    headers: dict[str, str],
) -> Response:
    tensors: list[InferredTensor] = []
    parts = []
    for tensor, binary in outputs:
        described: InferredTensor = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if binary:
            parts.append(tensor.to_bytes())
            described["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            described["data"] = tensor.to_list()
        tensors.append(described)
    content: InferReply = {"model_name": model_name, "model_version": "1", "outputs": tensors}
    if call.body.id is not None:
        content["id"] = call.body.id
    if not parts:
        return json_reply(content, headers=headers)
    header = encode_json(content)
    headers[HEADER_LENGTH] = str(len(header))
    return Response(b"".join([header, *parts]), 200, headers, media_type="application/octet-stream")


async def _endpoint(request: Request) -> Response:
    check_version(request)
    header, content = _split(await request.body(), request.headers.get(HEADER_LENGTH))
    call = Call(request, await read_lenient(InferBody, request, header))

    async def answer(call: Call[InferBody]) -> Response:
        return await infer(call, content)

    return await unless_gone(request, respond(answer, call))


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """The JSON of a body, and the bytes after it.

    Without any JSON, the body is the only text of the only input (Triton's raw binary request).
    """
    if header_length is None:
        return body, b""
    digits = header_length.strip()
    # Python reads no number of thousands of digits; leading zeros are digits, too.
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_LENGTH_DIGITS
    if not (is_number and int(digits) <= len(body)):
        raise ValidationError(
            f"the header {HEADER_LENGTH} must be the number of bytes of JSON, at most the body's "
            f"{len(body):,}, not {shortened(digits)!r}"
        )
    if int(digits) == 0:
        return _raw_header(len(body)), len(body).to_bytes(LENGTH_BYTES, "little") + body
    return body[: int(digits)], body[int(digits) :]


def _raw_header(num_bytes: int) -> bytes:
    """What a raw request leaves out; its reply is bytes, too."""
    size = {"binary_data_size": LENGTH_BYTES + num_bytes}
    tensor = {"name": TEXT, "shape": [1], "datatype": "BYTES", "parameters": size}
    return encode_json({"inputs": [tensor], "parameters": {"binary_data_output": True}})


ROUTES = tuple(
    TaskRoute(
        f"/v2/models/{{name:path}}{version}/infer",
        _endpoint,
        body=InferBody,
        reply=InferReply,
        error_reply=kserve_error_reply,
        invalid_status=400,
        binary=True,
        tags=["kserve"],
        name="infer",
        description=inspect.getdoc(infer),
    )
    for version in ("/versions/{version}", "")
)
