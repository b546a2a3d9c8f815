"""`loadtests.simulate`: router, autoscaler, workload, and the command."""

import asyncio
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from loadtests.__main__ import main
from loadtests.engines import LoadedCausal
from loadtests.simulate.autoscaler import Autoscaler, Scaling
from loadtests.simulate.calibration import Arrival, Seen, Watch, in_server, loop_seconds, slowed
from loadtests.simulate.gaps import Gaps
from loadtests.simulate.replica import Limits
from loadtests.simulate.request import Request
from loadtests.simulate.router import Ring, Router
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Length, Workload
from maskdial.config import load_config
from maskdial.models.catalog import STARTER_FOLDER

STEP_TIMES = Path(__file__).parents[2] / "loadtests" / "simulate" / "llama-135m-int8.json"


@dataclass
class Target:
    number: int
    num_open: int = 0


def router(policy: str, loads: list[int], **options: float) -> tuple[Router, list[Target]]:
    targets = [Target(10 + index, load) for index, load in enumerate(loads)]
    made = Router(policy, random.Random(0), slots=2, **options)
    made.update(targets)
    return made, targets


def request(conversation: int = 0, instructions: int = 0) -> Request:
    return Request(conversation, instructions, 0, 1, 1, 0.0)


# Router


def test_only_the_keys_of_a_replica_that_goes_move() -> None:
    before, after = Ring(range(10)), Ring(range(9))
    keys = [f"key {number}" for number in range(2000)]
    moved = Counter(
        next(before.walk(key)) for key in keys if next(before.walk(key)) != next(after.walk(key))
    )
    assert set(moved) == {9}
    shares = Counter(next(before.walk(key)) for key in keys)
    assert all(100 < shares[name] < 350 for name in range(10))


def test_least_waiting_takes_the_least_busy_one_and_shares_ties() -> None:
    made, _ = router("least-waiting", [1, 0, 2, 0])
    chosen = Counter(made.choose(request(), 0.0) for _ in range(200))
    assert set(chosen) == {1, 3}


def test_round_robin_takes_turns() -> None:
    made, _ = router("round-robin", [0, 0, 0])
    assert sorted(made.choose(request(), 0.0) for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def test_two_choices_avoid_the_busiest() -> None:
    made, _ = router("two-choices", [0, 100])
    chosen = Counter(made.choose(request(), 0.0) for _ in range(400))
    assert chosen[1] < 140  # a quarter: both draws


@pytest.mark.parametrize("policy", ["session", "prefix"])
def test_affinity_keeps_to_a_replica_until_it_is_much_busier_than_others(policy: str) -> None:
    made, targets = router(policy, [0] * 8)
    first = made.choose(request(5, 5), 0.0)
    targets[first].num_open = 1  # a slot is free
    assert made.choose(request(5, 5), 0.0) == first
    for target in targets:
        target.num_open = 3
    targets[first].num_open = 4  # more than 1.25 times the mean of 3.1
    assert made.choose(request(5, 5), 0.0) != first
    strict, strict_targets = router(policy, [0] * 8, spread=math.inf)
    strict_targets[first].num_open = 100
    assert strict.choose(request(5, 5), 0.0) == first


def test_old_numbers_are_used_until_they_are_read_again() -> None:
    made, targets = router("least-waiting", [0, 1], load_age=1.0)
    assert made.choose(request(), 0.0) == 0
    targets[0].num_open = 9
    assert made.choose(request(), 0.9) == 0
    assert made.choose(request(), 1.0) == 1


# Autoscaler


def test_replicas_follow_the_target_with_the_highest_need() -> None:
    scaling = Scaling(waiting=4, running=6, least=1, most=50)
    assert Autoscaler(scaling).decide(0, 10, waiting=60, running=60) == 15
    assert Autoscaler(scaling).decide(0, 10, waiting=0, running=80) == 14
    assert Autoscaler(scaling).decide(0, 10, waiting=43, running=0) == 10  # within 10%
    assert Autoscaler(Scaling(most=12)).decide(0, 10, waiting=999, running=0) == 12


def test_they_double_at_most_within_half_a_minute() -> None:
    autoscaler = Autoscaler(Scaling(waiting=1, most=100))
    assert autoscaler.decide(0, 4, waiting=100, running=0) == 8
    assert autoscaler.decide(15, 8, waiting=100, running=0) == 8
    assert autoscaler.decide(45, 8, waiting=100, running=0) == 16


def test_they_shrink_one_by_one_after_a_while_without_need() -> None:
    scaling = Scaling(waiting=4, running=None, least=1, down_after=60, down_interval=30)
    autoscaler, size, sizes = Autoscaler(scaling), 4, []
    for now in range(0, 211, 15):
        size = autoscaler.decide(now, size, waiting=16 if now == 0 else 0, running=0)
        sizes.append(size)
    assert sizes == [4, 4, 4, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1]


def test_its_defaults_are_the_chart_s() -> None:
    path = Path(__file__).parents[2] / "deploy" / "helm" / "maskdial" / "values.yaml"
    chart = yaml.safe_load(path.read_text(encoding="utf-8"))["autoscaling"]
    scaling = Scaling()
    assert (scaling.waiting, scaling.running) == (
        chart["waitingPerReplica"],
        chart["runningPerReplica"],
    )
    assert (scaling.least, scaling.most) == (chart["minReplicas"], chart["maxReplicas"])
    assert scaling.down_after == chart["scaleDownSeconds"]


# Workload


def test_a_workload_has_the_rate_and_the_lengths_it_was_asked_for() -> None:
    workload = Workload(
        turns=4, prompt=Length(50, 1.0), generated=Length(20), num_instructions=30, num_kinds=3
    )
    drawn = list(workload.conversations(lambda now: 40.0 if now < 500 else 10.0, 40.0, 1000.0, 7))
    early = sum(conversation.start < 500 for conversation in drawn)
    assert early == pytest.approx(500 * 40 / 4, rel=0.05)
    assert len(drawn) - early == pytest.approx(500 * 10 / 4, rel=0.05)
    turns = [turn for conversation in drawn for turn in conversation.turns]
    assert sum(turn.num_new for turn in turns) / len(turns) == pytest.approx(50, rel=0.05)
    assert {turn.num_generated for turn in turns} == {20}
    kinds = Counter(conversation.instructions for conversation in drawn)
    assert kinds[0] / kinds[2] == pytest.approx(3, rel=0.15)
    assert workload.mean_prompt == 30 + 1.5 * 70 + 50
    assert drawn == list(
        workload.conversations(lambda now: 40.0 if now < 500 else 10.0, 40.0, 1000.0, 7)
    )


# Calibration, and the command


def test_clients_tell_the_step_times_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.simulate.calibration.LOOP_SECONDS", 20.0)
    alone = StepTimes(
        ((1, 0.010), (8, 0.017)), 1e-6, ((16, 0.02), (256, 0.1)), 1e-7, beside=((1, 0.001),)
    )
    limits = Limits()
    times = slowed(
        replace(alone, outside=((0, 0.003), (1, 0.004), (4, 0.005)), per_request=0.01), 1.5
    )
    seen = Seen(context=32.0, texts=[(10, 16), (20, 48), (60, 24), (9, 40), (33, 32)])
    for rows in seen.gaps:
        step = times.decode_seconds(rows, 32 * rows)
        seen.gaps[rows] += [0.5 * step, 1.5 * step]
    for rows in (0, 1, 4):
        for tokens in (16, 64):
            reading = times.mixed_seconds(rows, 32 * rows, tokens)
            first = times.outside_seconds(rows) + reading
            if rows:
                first += times.decode_seconds(rows, 32 * rows) / 2
            seen.arrivals += 4 * [Arrival(rows, tokens, first, reading if rows else 0.0)]
            if rows:  # the machine paused
                seen.arrivals.append(Arrival(rows, tokens, first + 1.0, reading + 1.0))
    # What an idle server takes to read counts as without HTTP: the rest is outside.
    outside = (
        times.outside_seconds(0) + 0.5 * (alone.prefill_seconds(16) + alone.prefill_seconds(64)) / 2
    )
    # Clients that are slow to send the next request leave no slot empty.
    slow = replace(times, outside=tuple((rows, each + 0.1) for rows, each in times.outside))
    seen.loops.append(loop_seconds(slow, limits, seen.texts))
    found = in_server(alone, seen, limits)
    for rows in (1, 2, 4, 8):
        expected = times.decode_seconds(rows, 32 * rows)
        assert found.decode_seconds(rows, 32 * rows) == pytest.approx(expected)
    expected = times.mixed_seconds(4, 4 * 32, 64)
    assert found.mixed_seconds(4, 4 * 32, 64) == pytest.approx(expected, rel=0.01)
    assert found.outside_seconds(4) == pytest.approx(0.0075)
    assert found.outside_seconds(0) == pytest.approx(outside)
    assert found.per_request == pytest.approx(0.015, rel=0.15)
    assert loop_seconds(found, limits, seen.texts) == pytest.approx(seen.loops[0], rel=0.01)
    assert (min(found.spread), max(found.spread)) == pytest.approx((0.5, 1.5), rel=0.05)


def test_connections_that_the_server_closed_are_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It closes those that were idle while loops ran."""
    ports: list[int] = []

    async def opened(port: int) -> SimpleNamespace:
        ports.append(port)
        return SimpleNamespace(closed=False)

    monkeypatch.setattr("loadtests.simulate.calibration.Connection.open", opened)
    model = LoadedCausal.load(STARTER_FOLDER / "hybrid", load_config({}))
    watch = Watch(model, 1234, seed=0)
    first, second = asyncio.run(watch.connections(2))
    assert asyncio.run(watch.connections(1)) == [first]
    monkeypatch.setattr(first, "closed", True)
    again = asyncio.run(watch.connections(2))
    assert second in again
    assert first not in again
    assert ports == [1234] * 3


def test_a_loop_counts_what_is_open_at_its_end_by_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [(10, 16), (20, 48), (60, 24), (9, 40), (33, 32)]
    times = StepTimes(((1, 0.002), (8, 0.004)), 0.0, ((16, 0.004), (256, 0.02)), 0.0)
    monkeypatch.setattr("loadtests.simulate.calibration._CLIENTS", 8)
    found = loop_seconds(times, Limits(), texts)
    monkeypatch.setattr("loadtests.simulate.calibration.LOOP_SECONDS", 100.0)
    assert found == pytest.approx(loop_seconds(times, Limits(), texts), rel=0.01)


def test_gaps_add_up_to_percentiles() -> None:
    gaps = Gaps()
    for milliseconds in range(1, 101):
        gaps.add(milliseconds / 1e3, 2)
    whole = Gaps.sum([gaps, Gaps()])
    assert whole.percentile(50) == pytest.approx(0.050, rel=0.01)
    assert whole.percentile(99) == pytest.approx(0.099, rel=0.01)
    assert whole.spread((2.0,)).percentile(50) == pytest.approx(0.100, rel=0.02)
    assert Gaps().percentile(50) == 0


def simulate(tmp_path: Path, *arguments: str) -> dict[str, object]:
    output = tmp_path / "report.json"
    assert main(["simulate", *arguments, "--output", str(output)]) == 0
    sections: dict[str, object] = json.loads(output.read_text(encoding="utf-8"))["sections"]
    return sections


def test_every_section_from_a_file_of_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtests.simulate.scaled._PEAK_SECONDS", 60.0)
    monkeypatch.setattr("loadtests.simulate.scaled._TARGETS", ((4.0, None), (4.0, 6.0)))
    monkeypatch.setattr("loadtests.simulate.scaled._NUM_SEEDS", 1)
    monkeypatch.setattr("loadtests.simulate.fleets._GATEWAY_MS", (0.0, 100.0))
    arguments = ["--step-times", str(STEP_TIMES), "--replicas", "2,6", "--seconds", "40"]
    sections = simulate(tmp_path, *arguments)
    assert list(sections) == ["load", "slots", "routing", "staleness", "gateway", "autoscaling"]
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in sections)
    gateway = sections["gateway"]["rows"]  # type: ignore[index]
    free, limited = (row for row in gateway if row["replicas"] == 6)
    assert limited["requests_per_s"] <= 10 < free["requests_per_s"]


def test_a_file_without_step_times_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}", encoding="utf-8")
    assert main(["simulate", "--step-times", str(path)]) == 1
    assert "loadtests engine --sections steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--step-times", str(STEP_TIMES), "--sections", "one-machine"]]
)
def test_it_needs_step_times_or_a_bundle(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize("section", ["one-machine", "timed-engine"])
def test_a_server_and_its_engine_are_simulated(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtests.simulate.timed_engine.SHARES", (0.7,))
    monkeypatch.setattr("loadtests.simulate.one_machine.PIECE_SECONDS", 0.4)
    monkeypatch.setattr("loadtests.simulate.calibration.LOOP_SECONDS", 0.1)
    arguments = ["--bundle", str(STARTER_FOLDER / "hybrid"), "--new-tokens", "4"]
    if section == "timed-engine":
        arguments += ["--step-times", str(STEP_TIMES)]
    options = ["--sections", section, "--measure-seconds", "0.4", "--shares", "0.7"]
    (found,) = simulate(tmp_path, *arguments, *options).values()
    (row,) = found["rows"]  # type: ignore[index]
    assert row["requests"] > 0
    names = ("achieved", "first_p50", "first_p99", "gap_p50", "gap_p99")
    assert all(row[f"x_{name}"] > 0 for name in names)
