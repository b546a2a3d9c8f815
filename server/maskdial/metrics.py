"""Every Prometheus metric, declared once, at zero from the start.

Times are in seconds. Labels are ``route``, ``model``, ``outcome``, ``state``, ``phase``, ``reason``
and ``key`` (a key's name), all from closed sets: no text that a user sends ever becomes a label.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

import maskdial

OUTCOMES = (
    "ok",
    "cancelled",
    "validation",
    "unauthorized",
    "forbidden",
    "not_found",
    "request_timeout",
    "too_large",
    "overloaded",
    "unavailable",
    "timeout",
    "inference",
    "generation",
    "internal",
)
ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]
LoadOutcome = Literal["ok", "failed"]
UnloadReason = Literal["request", "room", "keep_alive", "replaced"]
CancelReason = Literal["disconnect", "timeout", "shutdown"]
ConnectionEnd = Literal[
    "limit",
    "displaced",
    "handshake",
    "overload",
    "malformed",
    "header_bytes",
    "headers",
    "body",
    "write",
    "unsent",
]
Phase = Literal["schedule", "run", "sample", "publish"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(2**power for power in range(3, 18))
_COUNTS = tuple(2**power for power in range(11))
_RATIOS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """One model's instruments, their ``model`` label bound.

    Every update is cheap and may come from any thread.
    """

    queue_size: Gauge
    requests_running: Gauge
    engine_up: Gauge
    tokenization_duration: Histogram
    queue_duration: Histogram
    inference_duration: Histogram
    batch_size: Histogram
    batch_tokens: Histogram
    padding_ratio: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    kv_cache_usage: Gauge
    kv_cache_bytes: Gauge
    prefix_cache_queries: Counter
    prefix_cache_hits: Counter
    draft_tokens: Counter
    accepted_draft_tokens: Counter
    engine_seconds: Mapping[Phase, Counter]
    cancelled: Mapping[CancelReason, Counter]

    def observe_pass(
        self, seconds: float, num_rows: int, num_tokens: int, padded_tokens: int
    ) -> None:
        """Counts a pass that succeeded; of its ``padded_tokens``, ``num_tokens`` are valid."""
        self.inference_duration.observe(seconds)
        self.batch_size.observe(num_rows)
        self.batch_tokens.observe(num_tokens)
        self.padding_ratio.observe(padded_tokens / num_tokens)

    def observe_step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        """Adds one step of the generation loop to the seconds of its phases."""
        self.engine_seconds["schedule"].inc(schedule)
        self.engine_seconds["run"].inc(run)
        self.engine_seconds["sample"].inc(sample)
        self.engine_seconds["publish"].inc(publish)


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        task_routes: the routes whose requests are counted.
    """

    def __init__(self, task_routes: Iterable[str] = ()) -> None:
        self._task_routes = tuple(task_routes)
        self._key_names: set[str] = set()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"maskdial_{name}", help_, labels, registry=self.registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(f"maskdial_{name}", help_, labels, registry=self.registry)

        def histogram(name: str, help_: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(
                f"maskdial_{name}", help_, labels, registry=self.registry, buckets=tuple(buckets)
            )

        self.requests = counter(
            "requests", "Requests by how they ended", "route", "model", "outcome"
        )
        self.connections = gauge("connections", "Open connections")
        self.connections_ended = counter(
            "connections_ended", "Connections that a limit has ended", "reason"
        )
        for reason in get_args(ConnectionEnd):
            self.connections_ended.labels(reason)
        self.key_requests = counter(
            "key_requests", "Requests by the name of their key", "key", "outcome"
        )
        self.request_duration = histogram(
            "request_duration_seconds", "From headers to last byte", _SECONDS, "route", "model"
        )
        self._tokenization_duration = histogram(
            "tokenization_duration_seconds", "Tokenizing a request", _SECONDS, "model"
        )
        self._queue_duration = histogram(
            "queue_duration_seconds", "Waiting for the first pass", _SECONDS, "model"
        )
        self._inference_duration = histogram(
            "inference_duration_seconds", "One pass of the model", _SECONDS, "model"
        )
        self._queue_size = gauge("queue_size", "Entries waiting for a pass", "model")
        self._requests_running = gauge("requests_running", "Entries in a pass or a slot", "model")
        self._batch_size = histogram("batch_size", "Rows in a pass", _COUNTS, "model")
        self._batch_tokens = histogram("batch_tokens", "Valid tokens in a pass", _TOKENS, "model")
        self._padding_ratio = histogram(
            "padding_ratio", "Padded tokens over valid tokens of a pass", _RATIOS, "model"
        )
        self._prompt_tokens = counter("prompt_tokens", "Tokens read", "model")
        self._generation_tokens = counter("generation_tokens", "Tokens generated", "model")
        self._time_to_first_token = histogram(
            "time_to_first_token_seconds", "From submission to first token", _SECONDS, "model"
        )
        self._inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between a stream's tokens", _SECONDS, "model"
        )
        self._kv_cache_usage = gauge("kv_cache_usage_ratio", "Used share of the KV cache", "model")
        self._kv_cache_bytes = gauge("kv_cache_bytes", "Bytes of used KV cache", "model")
        self._prefix_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "model"
        )
        self._prefix_cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", "model"
        )
        self._draft_tokens = counter("speculative_draft_tokens", "Tokens guessed ahead", "model")
        self._accepted_draft_tokens = counter(
            "speculative_accepted_tokens", "Tokens guessed ahead that were right", "model"
        )
        self._engine_seconds = counter(
            "engine_seconds", "Time of the generation loop, by its phase", "model", "phase"
        )
        self._cancelled = counter("cancelled", "Requests dropped unfinished", "model", "reason")
        self._engine_up = gauge("engine_up", "Engines up; 2 of a model being replaced", "model")
        self._model_state = gauge("model_state", "1 for a model's state", "model", "state")
        self._model_loads = counter("model_loads", "Loads by how they ended", "model", "outcome")
        self.model_load_duration = histogram(
            "model_load_duration_seconds", "From hashes to the first pass", _SECONDS
        )
        self._model_unloads = counter("model_unloads", "Unloads by their cause", "model", "reason")
        build_info = gauge("build_info", "Always 1", "version")
        build_info.labels(maskdial.__version__).set(1)
        # A request refused before its model is known has the empty model.
        self._declare_requests("")

    def declare(self, model: str, engine: str | None = None) -> ModelMetrics:
        """Makes every series of a model exist at zero and returns the instruments of its engine.

        ``engine`` is the ``model`` label of these instruments, where one model has two engines.
        """
        self._declare_requests(model)
        label = engine or model
        return ModelMetrics(
            queue_size=self._queue_size.labels(label),
            requests_running=self._requests_running.labels(label),
            engine_up=self._engine_up.labels(label),
            tokenization_duration=self._tokenization_duration.labels(label),
            queue_duration=self._queue_duration.labels(label),
            inference_duration=self._inference_duration.labels(label),
            batch_size=self._batch_size.labels(label),
            batch_tokens=self._batch_tokens.labels(label),
            padding_ratio=self._padding_ratio.labels(label),
            prompt_tokens=self._prompt_tokens.labels(label),
            generation_tokens=self._generation_tokens.labels(label),
            time_to_first_token=self._time_to_first_token.labels(label),
            inter_token_latency=self._inter_token_latency.labels(label),
            kv_cache_usage=self._kv_cache_usage.labels(label),
            kv_cache_bytes=self._kv_cache_bytes.labels(label),
            prefix_cache_queries=self._prefix_cache_queries.labels(label),
            prefix_cache_hits=self._prefix_cache_hits.labels(label),
            draft_tokens=self._draft_tokens.labels(label),
            accepted_draft_tokens=self._accepted_draft_tokens.labels(label),
            engine_seconds={
                phase: self._engine_seconds.labels(label, phase) for phase in get_args(Phase)
            },
            cancelled={
                reason: self._cancelled.labels(label, reason) for reason in get_args(CancelReason)
            },
        )

    def declare_keys(self, names: Iterable[str]) -> None:
        """Makes the series of these names of keys exist, and drops those of other names."""
        names = set(names)
        for name in self._key_names - names:
            for outcome in OUTCOMES:
                self.key_requests.remove(name, outcome)
        self._key_names = names
        for name in names:
            for outcome in OUTCOMES:
                self.key_requests.labels(name, outcome)

    def declare_name(self, model: str) -> None:
        """Makes the series of a name that models are served under exist at zero."""
        for outcome in get_args(LoadOutcome):
            self._model_loads.labels(model, outcome)
        for reason in get_args(UnloadReason):
            self._model_unloads.labels(model, reason)
        self.set_state(model, "unloaded")

    def forget_name(self, model: str) -> None:
        """Drops those series."""
        for state in get_args(ModelState):
            self._model_state.remove(model, state)
        for outcome in get_args(LoadOutcome):
            self._model_loads.remove(model, outcome)
        for reason in get_args(UnloadReason):
            self._model_unloads.remove(model, reason)

    def set_state(self, model: str, state: ModelState) -> None:
        """Sets a model's state."""
        for each in get_args(ModelState):
            self._model_state.labels(model, each).set(each == state)

    def count_load(self, model: str, outcome: LoadOutcome) -> None:
        """Counts a load that has ended."""
        self._model_loads.labels(model, outcome).inc()

    def count_unload(self, model: str, reason: UnloadReason) -> None:
        """Counts a version that takes no more requests."""
        self._model_unloads.labels(model, reason).inc()

    def _declare_requests(self, model: str) -> None:
        for route in self._task_routes:
            for outcome in OUTCOMES:
                self.requests.labels(route, model, outcome)
            self.request_duration.labels(route, model)

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)
