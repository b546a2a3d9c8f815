"""Board: the metrics of all replicas in one place, so that any of them can tell Prometheus all.

Ray's proxy sends a scrape to any replica. If each told its own counters from memory and the others'
from hearsay, they would run backwards from scrape to scrape, which Prometheus takes for restarts.
"""

import time
from collections.abc import Iterable

import ray
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from ray.actor import ActorHandle

_FORGET_SECONDS = 60.0


class Board:
    """What each replica of an application last posted, in an actor that needs no processor."""

    def __init__(self) -> None:
        self._posts: dict[str, tuple[float, list[Metric]]] = {}

    def post(self, replica: str, metrics: list[Metric]) -> None:
        """Replaces what a replica posted before."""
        self._posts[replica] = time.monotonic(), metrics

    def withdraw(self, replica: str) -> None:
        """Forgets a replica that has ended."""
        self._posts.pop(replica, None)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, with a label ``replica``.

        Replicas that have not posted for a minute are gone.
        """
        now = time.monotonic()
        self._posts = {
            replica: post
            for replica, post in self._posts.items()
            if now - post[0] < _FORGET_SECONDS
        }
        return generate_latest(
            _Merged({replica: metrics for replica, (_, metrics) in self._posts.items()})
        )


class _Merged(Collector):
    """The metrics of several replicas, each family once."""

    def __init__(self, metrics: dict[str, list[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, metrics in self._metrics.items():
            for metric in metrics:
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                family.samples.extend(
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in metric.samples
                )
        return families.values()


def board_of(application: str) -> ActorHandle[Board]:
    """The application's board, which outlives each replica; made for its first user."""
    options = {
        "name": f"maskdial-board-{application}",
        "namespace": "maskdial",
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
    }
    handle: ActorHandle[Board] = ray.remote(Board).options(**options).remote()
    return handle
