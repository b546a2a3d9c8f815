"""`loadtests.report`: the summary of samples."""

import json
import math

from loadtests.open_loop import Failure, Run, Sample
from loadtests.report import make_report, percentile, summarize
from loadtests.texts import Kind

REFUSED = Failure("overloaded", 429, "the queue is full")


def test_nothing_measured_has_no_summary() -> None:
    assert summarize([]) is None
    assert math.isnan(percentile([], 50))


def test_a_report_counts_from_the_intended_start_and_loses_nothing() -> None:
    samples = (
        Sample(Kind.GENERATE, 0.5, 1.0, 4.0, (2.0, 2.5, 4.0), None),
        Sample(Kind.FILL_MASK, 1.0, 1.0, 1.25, (), None),
        Sample(Kind.GENERATE, 1.5, 1.5, 1.75, (), REFUSED),
        Sample(Kind.GENERATE, 1.75, None, 5.0, (), Failure("unfinished", None, "waiting")),
        Sample(Kind.GENERATE, 1.75, 1.75, 2.0, (1.9,), REFUSED),
    )
    report = make_report(2.0, Run(samples, 3))
    assert (report.requests, report.succeeded, report.failed) == (5, 2, 3)
    assert (report.offered_rate, report.achieved_rate, report.elapsed) == (2.5, 0.4, 5.0)
    assert (report.tokens, report.tokens_per_second) == (3, 0.6)
    assert report.start_delay is not None
    assert (report.start_delay.count, report.start_delay.max) == (4, 500.0)
    generate = report.kinds[Kind.GENERATE]
    assert (generate.requests, generate.succeeded) == (4, 1)
    assert generate.end_to_end is not None
    assert generate.time_to_first_token is not None
    assert generate.inter_token is not None
    assert generate.end_to_end.max == 3500.0
    assert generate.time_to_first_token.p50 == 1500.0
    assert (generate.inter_token.count, generate.inter_token.mean) == (2, 1000.0)
    assert report.kinds[Kind.FILL_MASK].time_to_first_token is None
    assert Kind.CLASSIFY not in report.kinds
    assert [(e.error_type, e.status, e.count) for e in report.errors] == [
        ("overloaded", 429, 2),
        ("unfinished", None, 1),
    ]


def test_the_json_report_names_its_units() -> None:
    samples = (Sample(Kind.CLASSIFY, 0.5, 0.5, 0.75, (), None),)
    document = json.loads(json.dumps(make_report(2.0, Run(samples, 1)).as_json()))
    assert document["kinds"]["classify"]["end_to_end_ms"]["p99"] == 250.0
    assert document["kinds"]["classify"]["inter_token_ms"] is None
    assert document["start_delay_ms"]["max"] == 0.0
