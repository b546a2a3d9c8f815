"""The server itself: its models, limits and health."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import Call, Request


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. ``family`` is masked or causal, ``max_length`` its maximum in tokens."""

    name: str
    family: str
    tasks: tuple[str, ...]
    architecture: str
    precision: str
    batch_invariant: bool
    max_length: int
    labels: tuple[str, ...]
    provider: str
    ready: bool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's version, lifecycle phase, limits by name, and models."""

    version: str
    phase: str
    limits: dict[str, int]
    models: tuple[ModelInfo, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server accepts requests, its status, and the models that are down."""

    ready: bool
    status: str
    models_down: tuple[str, ...]


class AsyncServer(AsyncCaller):
    """The methods for /models, /info and /health/ready."""

    async def models(self) -> list[ModelInfo]:
        """The served models."""
        return await self._send(Call(Request("GET", "/models"), parse_models))

    async def info(self) -> ServerInfo:
        """The server's version, phase, limits and models."""
        return await self._send(Call(Request("GET", "/info"), parse_server_info))

    async def health(self) -> Health:
        """Whether the server accepts requests. Raises TransportError if it cannot be reached."""
        # A server that is not ready replies with 503, which is an answer here and not a failure.
        request = Request("GET", "/health/ready", accepts=frozenset({200, 503}))
        return await self._send(Call(request, parse_health))


def parse_models(document: Sequence[Mapping[str, Any]]) -> list[ModelInfo]:
    """The reply of /models."""
    return [_model_info(item) for item in document]


def parse_server_info(document: Mapping[str, Any]) -> ServerInfo:
    """The reply of /info."""
    return ServerInfo(
        version=str(document["version"]),
        phase=str(document["phase"]),
        limits={str(name): int(limit) for name, limit in document["limits"].items()},
        models=tuple(_model_info(item) for item in document["models"]),
    )


def parse_health(document: Mapping[str, Any]) -> Health:
    """The reply of /health/ready."""
    status = str(document["status"])
    return Health(status == "ready", status, tuple(str(m) for m in document.get("models", ())))


def _model_info(item: Mapping[str, Any]) -> ModelInfo:
    return ModelInfo(
        name=str(item["name"]),
        family=str(item["family"]),
        tasks=tuple(str(task) for task in item["tasks"]),
        architecture=str(item["architecture"]),
        precision=str(item["precision"]),
        batch_invariant=bool(item["batch_invariant"]),
        max_length=int(item["max_length"]),
        labels=tuple(str(label) for label in item["labels"]),
        provider=str(item["provider"]),
        ready=bool(item["ready"]),
    )
