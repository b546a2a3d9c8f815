"""Writes ``docs/metrics.md``: every Prometheus metric of the server, from `maskdial.metrics`.

    make format

A test fails when the page is out of date.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from prometheus_client.metrics import MetricWrapperBase

from maskdial.metrics import (
    OUTCOMES,
    CancelReason,
    ConnectionEnd,
    DraftKind,
    LoadOutcome,
    Metrics,
    ModelState,
    Phase,
    UnloadReason,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
_INTRODUCTION = """# Prometheus metrics

Generated from `server/maskdial/metrics.py` by `make format`.

`GET /metrics` answers in Prometheus' text format. With `--metrics-key` it needs \
`Authorization: Bearer KEY`. Durations are in seconds, sizes in bytes. A page is up to a second \
old.

A loaded model's series exist at zero. Those of a route or a key begin with its first request.

The dashboard, the alerts and their rules are in [deployment](deployment.md#dashboard-and-alerts). \
What other servers call these metrics is in [moving](moving.md).
"""
_LABELS = f"""
## Labels

| label | values |
|---|---|
| `route` | the route's template, such as `/v1/chat/completions` |
| `model` | a served name; `NAME:full` is the masked engine of a model with both masks; empty: the \
request was refused before its model was known |
| `key` | a key's name; counted only with `--metrics-key` |
| `policy`, `rule`, `action` | the names that the file of policies gives |
| `kind` of drafts | {", ".join(f"`{each}`" for each in get_args(DraftKind))} |
| `outcome` of requests | {", ".join(f"`{each}`" for each in OUTCOMES)}: see [errors](errors.md) |
| `outcome` of loads | {", ".join(f"`{each}`" for each in get_args(LoadOutcome))} |
| `state` of a model | {", ".join(f"`{each}`" for each in get_args(ModelState))} |
| `reason` of an unload | {", ".join(f"`{each}`" for each in get_args(UnloadReason))} |
| `reason` of a cancellation | {", ".join(f"`{each}`" for each in get_args(CancelReason))} |
| `reason` of a connection's end | {", ".join(f"`{each}`" for each in get_args(ConnectionEnd))} |
| `phase` | {", ".join(f"`{each}`" for each in get_args(Phase))} |

`process_*` and `python_*` are those of Prometheus' client for Python.
"""
_SECTIONS = {
    "Requests": ("requests", "request_", "key_", "tokenization", "cancelled", "batches", "batch_r"),
    "Queues and passes": ("queue", "inference", "batch_", "padding", "engine", "prompt_tokens"),
    "Text generation": ("generation", "time_to", "inter_token", "kv_cache", "speculative"),
    "Prefix cache": ("prefix",),
    "Answer cache": ("answer_cache",),
    "Models": ("model", "build"),
    "Policies": ("policy",),
    "Connections": ("connections",),
}


def page() -> str:
    """The whole page, as Markdown."""
    rows: dict[str, list[str]] = {title: [] for title in _SECTIONS}
    for metric in _metrics():
        name = metric._name.removeprefix("maskdial_")
        title = next(t for t, starts in _SECTIONS.items() if name.startswith(starts))
        rows[title].append(_row(metric))
    tables = [
        f"\n## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n{''.join(of)}"
        for title, of in rows.items()
    ]
    return "".join([_INTRODUCTION, *tables, _LABELS])


def _metrics() -> Iterator[MetricWrapperBase]:
    """Those of the server, as they are declared."""
    registry = Metrics().registry
    yield from (
        each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase)
    )


def _row(metric: MetricWrapperBase) -> str:
    name = metric._name + ("_total" if metric._type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"| `{name}` | {metric._type} | {labels} | {metric._documentation} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
