"""What tests do with a running server: wait for it, read its metrics, find its engines."""

import time
from collections.abc import Callable
from typing import Any

import httpx

PATIENCE = 60.0
"""Seconds, after which a test that waits for something has failed."""


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until the condition is true."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The value of a metric with these labels, among others; a route's begin with its first
    request.
    """
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    assert name == "maskdial_requests_total", f"no metric {name} {labels}"
    return 0.0


def engine_of(server: Any, label: str) -> Any:
    """The engine of a model, by its name; of a second graph, ``NAME:full``."""
    models = server.server.config.app.state.context.models
    return next(each for each in models if each.bundle.label == label).engine
