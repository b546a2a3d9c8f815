"""The queries of dashboard and rules, and what each of them needs of the metrics."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
# Prometheus adds these to every series of a target.
TARGET_LABELS = frozenset({"job", "instance"})


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and where it is written; ``legend`` is a panel's."""

    where: str
    text: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric that a query reads, with its matchers as (label, value)."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


def dashboard_queries() -> Iterator[Query]:
    """Every query of every panel, Grafana's own variables replaced."""
    dashboard = json.loads((DEPLOY / "grafana" / "maskdial.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "5m")
            yield Query(panel["title"], text, target["legendFormat"])


def rules() -> Iterator[dict[str, Any]]:
    """Every recording and alert rule."""
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        yield from group["rules"]


def rule_queries() -> Iterator[Query]:
    """Every rule's query."""
    for rule in rules():
        yield Query(rule.get("record") or rule["alert"], rule["expr"])


def selectors(text: str) -> list[Selector]:
    """The metrics that a query reads.

    Raises:
        ValueError: it is not PromQL.
    """
    found: list[Selector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, text
            matchers = tuple((each.name, each.value) for each in node.matchers.matchers)
            found.append(Selector(node.name, matchers))

    promql_parser.walk(promql_parser.parse(text), pre_visit=visit)
    return list(dict.fromkeys(found))


def grouped_by(text: str) -> set[str]:
    """The labels that a query's aggregations keep; empty if it has none."""
    return {
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", text)
        for label in group.split(",")
        if label.strip()
    }
