"""Every Prometheus metric, declared once.

Times are in seconds. Labels are ``route``, ``model``, ``outcome``, ``state``, ``phase``, ``reason``
and ``key`` (a key's name), all from closed sets: no text that a user sends ever becomes a label.

A loaded model's series exist at zero from the start. Those that are for each route, or for each
key, begin with the first request: most of them never have one, and a page of a megabyte is what
every scrape would pay for.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

import maskdial

# A second series for each counter and histogram, which nothing reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

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
# What dashboard and rules look for (deploy/): at zero before the first of them, or it would not be
# in the rate.
_WATCHED = ("internal", "inference", "generation", "overloaded", "unavailable", "timeout")
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
DraftKind = Literal["grammar", "prediction", "prompt", "answers", "model", "mtp", "eagle"]
"""Where draft tokens come from."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(2**power for power in range(3, 18))
_COUNTS = tuple(2**power for power in range(11))
_RATIOS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
_PAUSE_SECONDS = 0.0005
_STEPS = 2**32


class Share:
    """An engine's part of a gauge: two engines of one name share it while a model is replaced.

    Not for several threads at a time: the engine's lock is held.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._value = 0.0

    def set(self, value: float) -> None:
        """Changes the gauge, to the last bit, by as much as the value has changed."""
        value = round(value * _STEPS) / _STEPS  # sums of such fractions are exact
        if value != self._value:
            self._gauge.inc(value - self._value)
            self._value = value


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """The instruments of a model's engine, their ``model`` label bound.

    Every update is cheap and may come from any thread.
    """

    queue_size: Share
    requests_running: Share
    engine_up: Gauge
    tokenization_duration: Histogram
    queue_duration: Histogram
    inference_duration: Histogram
    batch_size: Histogram
    batch_tokens: Histogram
    padding_ratio: Histogram
    prompt_tokens: Counter
    cancelled: Mapping[CancelReason, Counter]

    def observe_pass(
        self, seconds: float, num_rows: int, num_tokens: int, padded_tokens: int
    ) -> None:
        """Counts a pass that succeeded; of its ``padded_tokens``, ``num_tokens`` are valid."""
        self.inference_duration.observe(seconds)
        self.batch_size.observe(num_rows)
        self.batch_tokens.observe(num_tokens)
        self.padding_ratio.observe(padded_tokens / num_tokens)


@dataclass(frozen=True, slots=True)
class MaskedMetrics(PassMetrics):
    """Those of a masked model."""

    answer_cache_queries: Counter
    answer_cache_hits: Counter
    answer_cache_bytes: Share


@dataclass(frozen=True, slots=True)
class ModelMetrics(PassMetrics):
    """Those of a model that generates."""

    generation_tokens: Counter
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    kv_cache_usage: Share
    kv_cache_bytes: Share
    prefix_cache_queries: Counter
    prefix_cache_hits: Counter
    prefix_cache_disk_hits: Counter
    prefix_cache_bytes: Share
    prefix_cache_blocks: Share
    draft_tokens: Mapping[DraftKind, Counter]
    accepted_draft_tokens: Mapping[DraftKind, Counter]
    engine_seconds: Mapping[Phase, Counter]

    def observe_step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        """Adds one step of the generation loop to the seconds of its phases."""
        self.engine_seconds["schedule"].inc(schedule)
        self.engine_seconds["run"].inc(run)
        self.engine_seconds["sample"].inc(sample)
        self.engine_seconds["publish"].inc(publish)


@dataclass(frozen=True, slots=True)
class DiskMetrics:
    """The instruments of the prefix cache on disk, which all models share."""

    bytes: Gauge
    blocks: Gauge
    read_bytes: Counter
    written_bytes: Counter
    damaged: Counter


@dataclass(frozen=True, slots=True)
class _Family(Collector):
    """One metric, to be written by itself."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


@dataclass(frozen=True, slots=True)
class Totals:
    """What a model has done: numbers, and seconds together."""

    num_ok: int
    num_failed: int
    request_seconds: float
    num_queued: int
    queue_seconds: float
    num_passes: int
    pass_seconds: float


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # under which models are served
        self._requested: set[tuple[str, str]] = set()  # routes with models
        self._loaded: set[str] = set()  # names
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

        self._requests = counter(
            "requests", "Requests by how they ended", "route", "model", "outcome"
        )
        self.connections = gauge("connections", "Open connections")
        self.connections_ended = counter(
            "connections_ended", "Connections that a limit has ended", "reason"
        )
        for reason in get_args(ConnectionEnd):
            self.connections_ended.labels(reason)
        self._batch_requests = counter(
            "batch_requests", "Requests of batches, which no other counts", "model", "outcome"
        )
        self._batches = gauge("batches", "Batches that have not ended", "state")
        self._key_requests = counter(
            "key_requests", "Requests by the name of their key", "key", "outcome"
        )
        self._verdicts = counter(
            "policy_verdicts",
            "What rules of policies found; unchecked: what they could not judge",
            "policy",
            "rule",
            "action",
        )
        self._verdict_duration = histogram(
            "policy_verdict_seconds", "Judging texts by a rule", _SECONDS, "policy", "rule"
        )
        self._request_duration = histogram(
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
        self._kv_cache_usage = gauge(
            "kv_cache_usage_ratio", "Used share of the KV cache; its sum over two engines", "model"
        )
        self._kv_cache_bytes = gauge("kv_cache_bytes", "Bytes of used KV cache", "model")
        self._prefix_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "model"
        )
        self._prefix_cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", "model"
        )
        self._prefix_cache_disk_hits = counter(
            "prefix_cache_disk_hits", "Those of the tokens found that came from disk", "model"
        )
        self.disk = DiskMetrics(
            bytes=gauge("prefix_disk_bytes", "Bytes of the prefix cache on disk"),
            blocks=gauge("prefix_disk_blocks", "Blocks in the prefix cache on disk"),
            read_bytes=counter("prefix_disk_read_bytes", "Bytes read from it"),
            written_bytes=counter("prefix_disk_written_bytes", "Bytes written to it"),
            damaged=counter("prefix_disk_damaged", "Blocks of it that could not be read"),
        )
        self._prefix_cache_bytes = gauge(
            "prefix_cache_bytes", "Bytes of blocks in the prefix cache", "model"
        )
        self._prefix_cache_blocks = gauge(
            "prefix_cache_blocks", "Blocks in the prefix cache", "model"
        )
        self._answer_cache_queries = counter(
            "answer_cache_queries", "Tokens of texts looked up in the answer cache", "model"
        )
        self._answer_cache_hits = counter(
            "answer_cache_hits", "Tokens of texts whose answer was found there", "model"
        )
        self._answer_cache_bytes = gauge("answer_cache_bytes", "Bytes of the answer cache", "model")
        self._draft_tokens = counter(
            "speculative_draft_tokens", "Tokens guessed ahead", "model", "kind"
        )
        self._accepted_draft_tokens = counter(
            "speculative_accepted_tokens", "Tokens guessed ahead that were right", "model", "kind"
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
        self._of_models = [
            (each, each._labelnames.index("model"))
            for each in self.__dict__.values()
            if isinstance(each, MetricWrapperBase) and "model" in each._labelnames
        ]

    def declare(self, model: str) -> ModelMetrics:
        """Makes the series of a model that generates exist, and an engine's shares of them.

        ``model`` is the label of its engine: a name, or NAME:full where one has two engines.
        """
        common = self._of_passes(model)
        return ModelMetrics(
            **common,
            generation_tokens=self._generation_tokens.labels(model),
            time_to_first_token=self._time_to_first_token.labels(model),
            inter_token_latency=self._inter_token_latency.labels(model),
            kv_cache_usage=Share(self._kv_cache_usage.labels(model)),
            kv_cache_bytes=Share(self._kv_cache_bytes.labels(model)),
            prefix_cache_queries=self._prefix_cache_queries.labels(model),
            prefix_cache_hits=self._prefix_cache_hits.labels(model),
            prefix_cache_disk_hits=self._prefix_cache_disk_hits.labels(model),
            prefix_cache_bytes=Share(self._prefix_cache_bytes.labels(model)),
            prefix_cache_blocks=Share(self._prefix_cache_blocks.labels(model)),
            draft_tokens={
                kind: self._draft_tokens.labels(model, kind) for kind in get_args(DraftKind)
            },
            accepted_draft_tokens={
                kind: self._accepted_draft_tokens.labels(model, kind)
                for kind in get_args(DraftKind)
            },
            engine_seconds={
                phase: self._engine_seconds.labels(model, phase) for phase in get_args(Phase)
            },
        )

    def declare_masked(self, model: str) -> MaskedMetrics:
        """As `declare`, for a masked model, which has no series of generation."""
        return MaskedMetrics(
            **self._of_passes(model),
            answer_cache_queries=self._answer_cache_queries.labels(model),
            answer_cache_hits=self._answer_cache_hits.labels(model),
            answer_cache_bytes=Share(self._answer_cache_bytes.labels(model)),
        )

    def _of_passes(self, model: str) -> dict[str, Any]:
        self._names.add(model.partition(":")[0])
        return {
            "queue_size": Share(self._queue_size.labels(model)),
            "requests_running": Share(self._requests_running.labels(model)),
            "engine_up": self._engine_up.labels(model),
            "tokenization_duration": self._tokenization_duration.labels(model),
            "queue_duration": self._queue_duration.labels(model),
            "inference_duration": self._inference_duration.labels(model),
            "batch_size": self._batch_size.labels(model),
            "batch_tokens": self._batch_tokens.labels(model),
            "padding_ratio": self._padding_ratio.labels(model),
            "prompt_tokens": self._prompt_tokens.labels(model),
            "cancelled": {
                reason: self._cancelled.labels(model, reason) for reason in get_args(CancelReason)
            },
        }

    def of_connections(self) -> tuple[int, dict[str, int]]:
        """How many connections are open, and by reason those that a limit has ended."""
        (num_open,) = (
            each.value for family in self.connections.collect() for each in family.samples
        )
        ended = {
            each.labels["reason"]: int(each.value)
            for family in self.connections_ended.collect()
            for each in family.samples
            if each.name.endswith("_total")
        }
        return int(num_open), ended

    def count_request(self, route: str, model: str, outcome: str, seconds: float) -> None:
        """Counts a request to a task route that has ended, after so many seconds.

        One that is refused before its model is known has the empty model, as has one whose model
        is gone when it ends.
        """
        model = self._known(model)
        if (route, model) not in self._requested:
            self._requested.add((route, model))
            for each in _WATCHED:
                self._requests.labels(route, model, each)
        self._requests.labels(route, model, outcome).inc()
        self._request_duration.labels(route, model).observe(seconds)

    def totals(self, model: str) -> Totals:
        """The sums of a model's series, of both its engines; it reads those of all models."""
        engines = (model, f"{model}:full")
        outcomes = {"ok": 0.0, "failed": 0.0, "cancelled": 0.0}
        for sample in _samples(self._requests, "_total", (model,)):
            outcome = sample.labels["outcome"]
            outcomes[outcome if outcome in outcomes else "failed"] += sample.value

        def both(histogram: Histogram, models: tuple[str, ...]) -> tuple[int, float]:
            count, total = (
                sum(each.value for each in _samples(histogram, suffix, models))
                for suffix in ("_count", "_sum")
            )
            return int(count), total

        return Totals(
            int(outcomes["ok"]),
            int(outcomes["failed"]),
            both(self._request_duration, (model,))[1],
            *both(self._queue_duration, engines),
            *both(self._inference_duration, engines),
        )

    def count_batch_request(self, model: str, outcome: str) -> None:
        """Counts a request of a batch that has its answer, if need be of the empty model."""
        self._batch_requests.labels(self._known(model), outcome).inc()

    def _known(self, model: str) -> str:
        return model if model.partition(":")[0] in self._names else ""

    def set_batches(self, counts: Mapping[str, int]) -> None:
        """Sets how many batches there are in each state."""
        for state, number in counts.items():
            self._batches.labels(state).set(number)

    def count_key(self, name: str, outcome: str) -> None:
        """Counts a request by the name of its key."""
        self._key_names.add(name)
        self._key_requests.labels(name, outcome).inc()

    def count_verdict(self, policy: str, rule: str, action: str) -> None:
        """Counts something that a rule of a policy found, or could not judge."""
        self._verdicts.labels(policy, rule, action).inc()

    def observe_verdict(self, policy: str, rule: str, seconds: float) -> None:
        """Notes how long a rule's verdict on some texts took."""
        self._verdict_duration.labels(policy, rule).observe(seconds)

    def forget_other_keys(self, names: Iterable[str]) -> None:
        """Drops the series of all keys but these."""
        for name in self._key_names.difference(names):
            self._key_names.remove(name)
            for outcome in OUTCOMES:
                self._key_requests.remove(name, outcome)

    def declare_name(self, model: str) -> None:
        """Makes the state of a name exist that models are served under."""
        self._names.add(model)
        self.set_state(model, "unloaded")

    def forget_name(self, model: str) -> None:
        """Drops all series of that name, and of its engines: names come and go."""
        self._names.discard(model)
        self._loaded.discard(model)
        self._requested = {each for each in self._requested if each[1].partition(":")[0] != model}
        for metric, place in self._of_models:
            gone = [
                labels
                for labels in list(metric._metrics)
                if labels[place].partition(":")[0] == model
            ]
            for labels in gone:
                metric.remove(*labels)

    def set_state(self, model: str, state: ModelState) -> None:
        """Sets a model's state."""
        for each in get_args(ModelState):
            self._model_state.labels(model, each).set(each == state)

    def count_load(self, model: str, outcome: LoadOutcome) -> None:
        """Counts a load that has ended; a name's first makes its other series exist at zero."""
        if model not in self._names:
            return
        if model not in self._loaded:
            self._loaded.add(model)
            for each in get_args(LoadOutcome):
                self._model_loads.labels(model, each)
            for reason in get_args(UnloadReason):
                self._model_unloads.labels(model, reason)
        self._model_loads.labels(model, outcome).inc()

    def count_unload(self, model: str, reason: UnloadReason) -> None:
        """Counts a version that takes no more requests."""
        if model not in self._names:
            return
        self._model_unloads.labels(model, reason).inc()

    def render(self) -> bytes:
        """The registry in Prometheus' text format.

        It is written metric by metric, with pauses: another thread that waits for the interpreter,
        as the event loop does, gets it there at once.
        """
        parts = []
        for metric in self.registry.collect():
            parts.append(generate_latest(_Family(metric)))
            time.sleep(_PAUSE_SECONDS)
        return b"".join(parts)


def _samples(metric: Counter | Histogram, suffix: str, models: tuple[str, ...]) -> Iterable[Sample]:
    """Those of a metric with this end of their name, of these models."""
    return (
        sample
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(suffix) and sample.labels["model"] in models
    )
