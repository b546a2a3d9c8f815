"""Writes ``deploy/grafana/maskdial.json``: the dashboard for operators.

    make format

Grafana's format takes forty lines of JSON per panel, of which this holds those that differ.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "maskdial.json"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Every process is chosen by its target, and models within it.
_PROCESS = 'job=~"$job", instance=~"$instance"'
_MODEL = f'{_PROCESS}, model=~"$model"'
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: its title and description, the unit of its axis, and queries by their legend."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]


def _rate(metric: str, by: str = "", labels: str = _MODEL) -> str:
    return f"sum by ({by}) (rate(maskdial_{metric}{{{labels}}}[$__rate_interval]))"


def _total(metric: str, by: str = "model") -> str:
    return f"sum by ({by}) (maskdial_{metric}{{{_MODEL}}})"


def _mean(metric: str) -> str:
    """The mean of what a histogram observed."""
    return f"{_rate(f'{metric}_sum', 'model')} / {_rate(f'{metric}_count', 'model')}"


def _percentiles(metric: str, labels: str = _MODEL) -> dict[str, str]:
    buckets = _rate(f"{metric}_bucket", "le", labels)
    return {f"p{p}": f"histogram_quantile({p / 100:g}, {buckets})" for p in (50, 90, 99)}


ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel(
            "Requests by route",
            "Finished requests per second.",
            "reqps",
            {"{{route}}": _rate("requests_total", "route")},
        ),
        Panel(
            "Requests by outcome",
            "ok, or the type of the error; cancelled: the client left.",
            "reqps",
            {"{{outcome}}": _rate("requests_total", "outcome")},
        ),
        Panel(
            "Share of requests that failed",
            "Faults of the server, and refusals because it is full, loading or draining.",
            "percentunit",
            {
                "failed": _rate(
                    "requests_total", labels=f'{_MODEL}, outcome=~"internal|inference|generation"'
                )
                + f" / {_rate('requests_total')}",
                "refused": _rate(
                    "requests_total", labels=f'{_MODEL}, outcome=~"overloaded|unavailable"'
                )
                + f" / {_rate('requests_total')}",
                "timed out": _rate("requests_total", labels=f'{_MODEL}, outcome="timeout"')
                + f" / {_rate('requests_total')}",
            },
        ),
        Panel(
            "Request duration",
            "From headers to last byte, streams included.",
            "s",
            _percentiles("request_duration_seconds"),
        ),
        Panel(
            "Request duration by route, p99",
            "From headers to last byte, streams included.",
            "s",
            {
                "{{route}}": "histogram_quantile(0.99, "
                + _rate("request_duration_seconds_bucket", "le, route")
                + ")"
            },
        ),
        Panel(
            "Cancelled",
            "Requests dropped unfinished: the client left, the time was up, or the server stopped.",
            "reqps",
            {"{{model}} {{reason}}": _rate("cancelled_total", "model, reason")},
        ),
    ),
    "Generation": (
        Panel(
            "Time to first token",
            "From submission to the first token, the queue included.",
            "s",
            _percentiles("time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "Between the tokens of a stream.",
            "s",
            _percentiles("inter_token_latency_seconds"),
        ),
        Panel(
            "Tokens per second",
            "Tokens read and tokens generated.",
            "short",
            {
                "{{model}} read": _rate("prompt_tokens_total", "model"),
                "{{model}} generated": _rate("generation_tokens_total", "model"),
            },
        ),
        Panel(
            "KV cache use",
            "Used share of the KV cache, the fullest replica.",
            "percentunit",
            {"{{model}}": f"max by (model) (maskdial_kv_cache_usage_ratio{{{_MODEL}}})"},
        ),
        Panel(
            "KV cache",
            "Bytes of used KV cache, all replicas.",
            "bytes",
            {"{{model}}": _total("kv_cache_bytes")},
        ),
        Panel(
            "Prefix cache hit rate",
            "Share of the prompt tokens that were taken from the prefix cache.",
            "percentunit",
            {
                "{{model}}": f"{_rate('prefix_cache_hits_total', 'model')} / "
                f"{_rate('prefix_cache_queries_total', 'model')}"
            },
        ),
        Panel(
            "Time of the generation loop",
            "Share of a second that a model's thread spends in each phase; the rest is idle.",
            "percentunit",
            {"{{model}} {{phase}}": _rate("engine_seconds_total", "model, phase")},
        ),
        Panel(
            "Draft tokens accepted",
            "Share of the tokens guessed ahead that were right, whoever guessed them.",
            "percentunit",
            {
                "{{model}}": f"{_rate('speculative_accepted_tokens_total', 'model')} / "
                f"{_rate('speculative_draft_tokens_total', 'model')}"
            },
        ),
    ),
    "Engines": (
        Panel(
            "Waiting",
            "Entries in the queues: texts of masked models, sequences of causal models.",
            "short",
            {"{{model}}": _total("queue_size")},
        ),
        Panel(
            "Running",
            "Entries in a pass or a slot.",
            "short",
            {"{{model}}": _total("requests_running")},
        ),
        Panel(
            "Time in the queue",
            "From submission to the first pass.",
            "s",
            _percentiles("queue_duration_seconds"),
        ),
        Panel("Rows per pass", "Mean batch size.", "short", {"{{model}}": _mean("batch_size")}),
        Panel(
            "Tokens per pass",
            "Mean number of valid tokens.",
            "short",
            {"{{model}}": _mean("batch_tokens")},
        ),
        Panel(
            "Padding ratio",
            "Padded tokens over valid tokens, mean; 1 is no padding.",
            "short",
            {"{{model}}": _mean("padding_ratio")},
        ),
        Panel(
            "Duration of a pass",
            "One pass of a model.",
            "s",
            _percentiles("inference_duration_seconds"),
        ),
        Panel(
            "Tokenization",
            "Tokenizing a request.",
            "s",
            _percentiles("tokenization_duration_seconds"),
        ),
        Panel(
            "Engines up",
            "One per model and replica; two while a model is replaced.",
            "short",
            {"{{model}}": _total("engine_up")},
        ),
    ),
    "Replicas and models": (
        Panel(
            "Restarts",
            "Processes that took the place of another in the last hour.",
            "short",
            {
                "{{instance}}": "changes(process_start_time_seconds"
                f"{{{_PROCESS}}}[1h]) * on (job, instance) group_left () maskdial_build_info"
            },
        ),
        Panel(
            "Replicas by version",
            "Servers that answer.",
            "short",
            {"{{version}}": f"count by (version) (maskdial_build_info{{{_PROCESS}}})"},
        ),
        Panel(
            "Models by state",
            "Names of models, on all replicas.",
            "short",
            {"{{model}} {{state}}": f"{_total('model_state', 'model, state')} > 0"},
        ),
        Panel(
            "Loads and unloads",
            "Loads and unloads of models in five minutes.",
            "short",
            {
                "{{model}} load {{outcome}}": "sum by (model, outcome) "
                f"(increase(maskdial_model_loads_total{{{_MODEL}}}[5m]))",
                "{{model}} unload {{reason}}": "sum by (model, reason) "
                f"(increase(maskdial_model_unloads_total{{{_MODEL}}}[5m]))",
            },
        ),
        Panel(
            "Processor",
            "Cores in use.",
            "short",
            {"{{instance}}": f"rate(process_cpu_seconds_total{{{_PROCESS}}}[$__rate_interval])"},
        ),
        Panel(
            "Memory",
            "Resident memory.",
            "bytes",
            {"{{instance}}": f"process_resident_memory_bytes{{{_PROCESS}}}"},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports or provisions it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_place({"type": "row", "title": title}, len(panels), 0, top, _COLUMNS, 1))
        top += 1
        for index, panel in enumerate(row):
            column, line = index % (_COLUMNS // _WIDTH), index // (_COLUMNS // _WIDTH)
            left, y = column * _WIDTH, top + line * _HEIGHT
            panels.append(_place(_graph(panel), len(panels), left, y, _WIDTH, _HEIGHT))
        top += -(-len(row) // (_COLUMNS // _WIDTH)) * _HEIGHT
    return {
        "uid": "maskdial",
        "title": "maskdial",
        "description": "Masked and causal language models on one server.",
        "tags": ["inference", "maskdial"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("job", "label_values(maskdial_build_info, job)"),
                _variable("instance", 'label_values(maskdial_build_info{job=~"$job"}, instance)'),
                _variable("model", f"label_values(maskdial_queue_size{{{_PROCESS}}}, model)"),
            ]
        },
        "panels": panels,
    }


def page() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _place(
    panel: dict[str, Any], number: int, x: int, y: int, width: int, height: int
) -> dict[str, Any]:
    return {"id": number + 1, **panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        # Also matches requests that were refused before their model was known.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
