"""Triton's model configuration and statistics extensions, which its clients read."""

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import Request, Response
from typing_extensions import TypedDict

from maskdial.dialects.kserve.repository import (
    VERSION,
    VERSION_PATHS,
    entry_of,
    tensors_of_main_task,
)
from maskdial.errors import MaskdialError
from maskdial.http.context import server_context
from maskdial.http.replies import error_reply, json_reply
from maskdial.http.route import Route
from maskdial.metrics import Metrics

_DATA_TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}


class ConfigTensor(TypedDict):
    """An input or an output."""

    name: str
    data_type: str
    dims: list[int]


class ModelConfig(TypedDict):
    """A model, as Triton's configuration describes it."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfigTensor]
    output: list[ConfigTensor]
    model_transaction_policy: dict[str, bool]


class Duration(TypedDict):
    """How often something happened, and for how long together."""

    count: int
    ns: int


class ModelStatistics(TypedDict):
    """What a model has done since the server started."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: dict[str, Duration]
    batch_stats: list[Any]


class StatisticsReply(TypedDict):
    """The statistics of one model, or of all."""

    model_stats: list[ModelStatistics]


async def model_config(request: Request) -> Response:
    """A model's configuration: the tensors of its main task."""
    try:
        entry = entry_of(request)
    except MaskdialError as error:
        return error_reply(error)
    tensors, tasks = tensors_of_main_task(request, entry)
    content: ModelConfig = {
        "name": entry.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": 0,  # the first dimension of a tensor is not told apart
        "input": [_tensor(*each) for each in tensors.inputs],
        "output": [_tensor(*each) for each in tensors.outputs],
        "model_transaction_policy": {"decoupled": "generate" in tasks},
    }
    return json_reply(content)


async def model_statistics(request: Request) -> Response:
    """How many requests a model has answered, how long they took and waited, and its passes.

    Requests that failed took their time as well, which is told with the others'.
    """
    try:
        names = [entry_of(request).name]
    except MaskdialError as error:
        return error_reply(error)
    return await _statistics(request, names)


async def all_statistics(request: Request) -> Response:
    """The statistics of all models."""
    return await _statistics(
        request, [each.name for each in server_context(request).models.entries]
    )


async def _statistics(request: Request, names: Iterable[str]) -> Response:
    metrics = server_context(request).metrics
    # It looks at all series of some metrics.
    found = await asyncio.to_thread(lambda: [_of_model(name, metrics) for name in names])
    content: StatisticsReply = {"model_stats": found}
    return json_reply(content)


def _of_model(name: str, metrics: Metrics) -> ModelStatistics:
    totals = metrics.totals(name)
    durations = {
        "success": _duration(totals.num_ok, totals.request_seconds),
        "fail": _duration(totals.num_failed, 0),
        "queue": _duration(totals.num_queued, totals.queue_seconds),
        "compute_infer": _duration(totals.num_passes, totals.pass_seconds),
        **{each: _duration(0, 0) for each in ("compute_input", "compute_output", "cache_hit")},
    }
    return {
        "name": name,
        "version": VERSION,
        "last_inference": 0,  # nobody notes it
        "inference_count": totals.num_ok,
        "execution_count": totals.num_passes,
        "inference_stats": durations,
        "batch_stats": [],
    }


def _duration(count: int, seconds: float) -> Duration:
    return {"count": count, "ns": round(seconds * 1e9)}


def _tensor(name: str, datatype: str) -> ConfigTensor:
    return {"name": name, "data_type": _DATA_TYPES[datatype], "dims": [-1]}


ROUTES = (
    Route(
        "/v2/models/stats", all_statistics, methods=["GET"], reply=StatisticsReply, tags=["kserve"]
    ),
    *(
        Route(
            f"/v2/models/{{name:path}}{version}/{last}",
            endpoint,
            methods=["GET"],
            reply=reply,
            statuses=(404, 422),
            tags=["kserve"],
        )
        for version in VERSION_PATHS
        for last, endpoint, reply in (
            ("config", model_config, ModelConfig),
            ("stats", model_statistics, StatisticsReply),
        )
    ),
)
