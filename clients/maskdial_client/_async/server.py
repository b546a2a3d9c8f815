"""The server itself: its models, limits and health."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import Call, Request


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model under one attention mask. ``family`` is masked or causal, ``max_length`` its maximum
    in tokens.

    ``state`` is unloaded, loading, ready, draining or failed, and ``reason`` says why it failed.
    The ``provider`` of a model that is not loaded is empty.

    ``chat`` says whether it has a chat template. ``generation_defaults`` are what a causal model
    that is loaded samples by where a request does not say, by the names of the parameters.
    """

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
    mask: str
    state: str
    reason: str
    chat: bool
    generation_defaults: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model after a change. ``state`` is as in ModelInfo, and so is ``reason``."""

    model: str
    state: str
    reason: str


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
        """The models that there are, loaded or not."""
        return await self._send(Call(Request("GET", "/models"), parse_models))

    async def load_model(
        self,
        model: str,
        path: str | None = None,
        *,
        base: str | None = None,
        keep_alive: float | Literal["off"] | None = None,
        timeout: float | None = None,
    ) -> ModelStatus:
        """Loads a model, or a new version of it, and returns when that takes the requests.

        The client's ``api_key`` has to be the server's admin key. ``path`` is the bundle's folder
        in the server's folder of bundles, if its name there is not ``model``; ``base`` the model to
        load an adapter for; ``keep_alive`` the seconds after which a model is unloaded when nobody
        uses it.
        """
        fields = {"model": model, "path": path, "base": base, "keep_alive": keep_alive}
        body = {name: value for name, value in fields.items() if value is not None}
        request = Request("POST", "/models/load", body)
        return await self._send(Call(request, parse_model_status), timeout)

    async def unload_model(self, model: str, *, timeout: float | None = None) -> ModelStatus:
        """Unloads a model, and returns when it has finished its requests.

        The client's ``api_key`` has to be the server's admin key.
        """
        request = Request("POST", "/models/unload", {"model": model})
        return await self._send(Call(request, parse_model_status), timeout)

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


def parse_model_status(document: Mapping[str, Any]) -> ModelStatus:
    """The reply of /models/load and /models/unload."""
    return ModelStatus(
        model=str(document["model"]), state=str(document["state"]), reason=str(document["reason"])
    )


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
        # Older servers say none of this.
        mask=str(item.get("mask", "")),
        state=str(item.get("state", "ready" if item["ready"] else "failed")),
        reason=str(item.get("reason", "")),
        chat=bool(item.get("chat", False)),
        generation_defaults=dict(item.get("generation_defaults", {})),
    )
