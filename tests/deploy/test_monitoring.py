"""Dashboard and rules: every query reads metrics, labels and values that the server really has."""

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import queries
from tests.deploy.queries import TARGET_LABELS, Query
from tools import dashboard

ALL = [*queries.dashboard_queries(), *queries.rule_queries()]
RECORDED = {rule["record"]: rule["expr"] for rule in queries.rules() if "record" in rule}
PROMTOOL = shutil.which("promtool")


@dataclass(frozen=True, slots=True)
class Series:
    """The server's metrics: each one's labels with the values that they have."""

    labels: dict[str, dict[str, set[str]]]

    def labels_of(self, metric: str) -> set[str]:
        """A metric's labels; for a recorded one those that its rule keeps."""
        if metric in RECORDED:
            return queries.grouped_by(RECORDED[metric])
        return set(self.labels[metric]) | TARGET_LABELS


@pytest.fixture(scope="module")
def url(start_server: Callable[..., Any]) -> Iterator[str]:
    running = start_server(api_keys=["key"])
    with httpx.Client(base_url=running.url, headers={"x-api-key": "key"}, timeout=60) as http:
        # Series of a route and of a key begin with the first request.
        for path, text in (("fill-mask", "A [MASK]."), ("classify", "Fine."), ("generate", "Once")):
            assert http.post(f"/{path}", json={"inputs": text}).status_code == 200
    yield running.url
    running.stop()


@pytest.fixture(scope="module")
def series(url: str) -> Series:
    labels: dict[str, dict[str, set[str]]] = {"up": {}}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            values = labels.setdefault(sample.name, defaultdict(set))
            for label, value in sample.labels.items():
                values[label].add(value)
    return Series(labels)


@pytest.mark.parametrize("query", ALL, ids=lambda query: query.where)
def test_the_server_has_what_a_query_reads(query: Query, series: Series) -> None:
    kept: set[str] = set()
    for selector in queries.selectors(query.text):
        assert selector.metric in series.labels | RECORDED.keys(), query.text
        labels = series.labels_of(selector.metric)
        kept |= labels
        for label, value in selector.matchers:
            assert label in labels, f"{selector.metric} has no label {label}"
            known = series.labels.get(selector.metric, {}).get(label)
            if known and "$" not in value:
                assert set(value.split("|")) <= known, f"{label} of {selector.metric}"
    grouped = queries.grouped_by(query.text)
    assert grouped <= kept, query.text
    shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    assert shown <= (grouped or kept), query.legend


def test_a_metric_that_does_not_exist_is_found_out(series: Series) -> None:
    for text in (
        "rate(maskdial_request_total[5m])",
        'sum by (models) (maskdial_queue_size{a="b"})',
    ):
        with pytest.raises(AssertionError):
            test_the_server_has_what_a_query_reads(Query("", text), series)
    with pytest.raises(ValueError, match="unclosed"):
        queries.selectors("sum by (model")


def test_every_alert_says_what_is_wrong() -> None:
    alerts = [rule for rule in queries.rules() if "alert" in rule]
    assert len(alerts) >= 9
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in ("critical", "warning")


def test_the_dashboard_is_current() -> None:
    """`make format` writes it."""
    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.page()


def test_the_dashboards_panels_fit_and_have_their_own_numbers() -> None:
    panels = dashboard.dashboard()["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's prometheus) is not installed")
@pytest.mark.parametrize(
    "command", [["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]]
)
def test_promtool(command: list[str]) -> None:
    assert PROMTOOL is not None
    folder = Path(queries.RULES).parent
    done = subprocess.run(
        [PROMTOOL, *command], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
