"""ModelInfer's messages as the bodies of `/infer`, and its replies as messages.

Everything here may take long, as a message holds as much as a body may, and is done off the event
loop where it does.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from maskdial.http.in_process import Reply
from maskdial.rpc.calls import CallError
from maskdial.rpc.messages import message, read

HEADER_LENGTH = "inference-header-content-length"
TEXT_OUTPUT = "text_output"

_FINAL = "triton_final_response"
# How HTTP writes a tensor. Here all come as raw contents.
_OF_HTTP = frozenset({"binary_data", "binary_data_size"})
_NOT_OF_GENERATE = frozenset({"triton_enable_empty_final_response", "binary_data_output"})
_MAX_TENSORS = 16  # as /infer takes; more are counted only


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request to infer.

    Attributes:
        model: its name.
        version: of it; empty: none is asked for.
        id: which comes back with the reply.
        prompt: the text, if there is one input with one text.
        parameters: of the request.
        body: of `/infer`, with binary tensors.
        header_length: how many bytes of JSON it begins with.
    """

    model: str
    version: str
    id: str
    prompt: str | None
    parameters: Mapping[str, Any]
    body: bytes
    header_length: int

    def generate_body(self, timeout: float | None) -> bytes:
        """The body of `/generate_stream`, for a request with a prompt."""
        kept = {
            name: value for name, value in self.parameters.items() if name not in _NOT_OF_GENERATE
        }
        content = {"text_input": self.prompt, "parameters": kept, "timeout": timeout}
        return json.dumps(content).encode()


def read_infer(content: bytes, timeout: float | None) -> InferRequest:
    """A message's request.

    Raises:
        CallError: it is no such message, or its tensors contradict each other.
    """
    request = read(content, "ModelInferRequest")
    raw = request.raw_input_contents
    if len(request.inputs) > _MAX_TENSORS or len(request.outputs) > _MAX_TENSORS:
        raise CallError(400, f"inputs and outputs must have at most {_MAX_TENSORS} tensors each")
    if raw and len(raw) != len(request.inputs):
        raise CallError(
            400,
            f"raw_input_contents has {len(raw)} tensors, and inputs has {len(request.inputs)}; "
            "give all tensors the same way",
        )
    raw = list(raw) or [packed(each.contents.bytes_contents) for each in request.inputs]
    parameters = _parameters(request.parameters)
    described: dict[str, Any] = {
        "inputs": [
            {
                "name": each.name,
                "datatype": each.datatype,
                "shape": list(each.shape),
                "parameters": _parameters(each.parameters, _OF_HTTP)
                | {"binary_data_size": len(data)},
            }
            for each, data in zip(request.inputs, raw, strict=True)
        ],
        "outputs": [
            {"name": each.name, "parameters": _parameters(each.parameters, _OF_HTTP)}
            for each in request.outputs
        ],
        "parameters": parameters | {"binary_data_output": True},
    }
    if request.id:
        described["id"] = request.id
    if "timeout" not in parameters:
        described["timeout"] = timeout
    header = json.dumps(described).encode()
    return InferRequest(
        request.model_name,
        request.model_version,
        request.id,
        _only_prompt(request, raw),
        parameters,
        b"".join([header, *raw]),
        len(header),
    )


def infer_response(reply: Reply) -> Any:
    """The message of a reply of `/infer`."""
    length = int(reply.headers[HEADER_LENGTH])
    content = json.loads(reply.body[:length])
    raw = []
    for output in content["outputs"]:
        size = output.pop("parameters")["binary_data_size"]
        raw.append(reply.body[length : length + size])
        length += size
    return message("ModelInferResponse")(**content, raw_output_contents=raw)


def text_response(request_id: str, event: Mapping[str, Any], *, final: bool) -> Any:
    """What a token adds, as the output of a model."""
    response = message("ModelInferResponse")(
        model_name=event["model_name"], model_version=event["model_version"], id=request_id
    )
    response.outputs.add(name=TEXT_OUTPUT, datatype="BYTES", shape=[1])
    response.raw_output_contents.append(packed([event[TEXT_OUTPUT].encode()]))
    mark(response, final=final)
    return response


def mark(response: Any, *, final: bool) -> None:
    """Says whether it is a request's last response, as Triton does."""
    response.parameters.add(key=_FINAL).value.bool_param = final


def packed(texts: Iterable[bytes]) -> bytes:
    """Texts as a BYTES tensor has them."""
    return b"".join(len(each).to_bytes(4, "little") + each for each in texts)


def _parameters(entries: Iterable[Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        chosen = entry.value.WhichOneof("parameter_choice")
        if chosen is not None and entry.key not in without:
            found[entry.key] = getattr(entry.value, chosen)
    return found


def _only_prompt(request: Any, raw: list[bytes]) -> str | None:
    """The text of a request that has one input with one text."""
    if len(request.inputs) != 1 or request.inputs[0].datatype != "BYTES":
        return None
    if any(size != 1 for size in request.inputs[0].shape):
        return None
    content = raw[0]
    if len(content) != 4 + int.from_bytes(content[:4], "little"):
        return None  # which `/infer` refuses, and says why
    try:
        return str(content[4:], "utf-8")
    except UnicodeDecodeError:
        return None
