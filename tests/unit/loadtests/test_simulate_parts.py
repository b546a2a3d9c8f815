"""`loadtests.simulate`: router, workload, and the command."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtests.__main__ import main
from loadtests.simulate.request import Request
from loadtests.simulate.router import Ring, Router
from loadtests.simulate.workload import Length, Workload


@dataclass
class Target:
    number: int
    num_open: int = 0


def router(policy: str, loads: list[int]) -> tuple[Router, list[Target]]:
    targets = [Target(10 + index, load) for index, load in enumerate(loads)]
    return Router(policy, random.Random(0), targets, slots=2), targets


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
    chosen = Counter(made.choose(request()) for _ in range(200))
    assert set(chosen) == {1, 3}


def test_round_robin_takes_turns() -> None:
    made, _ = router("round-robin", [0, 0, 0])
    assert sorted(made.choose(request()) for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def test_two_choices_avoid_the_busiest() -> None:
    made, _ = router("two-choices", [0, 100])
    chosen = Counter(made.choose(request()) for _ in range(400))
    assert chosen[1] < 140  # a quarter: both draws


@pytest.mark.parametrize("policy", ["session", "prefix"])
def test_affinity_keeps_to_a_replica_until_it_is_much_busier_than_others(policy: str) -> None:
    made, targets = router(policy, [0] * 8)
    first = made.choose(request(5, 5))
    targets[first].num_open = 1  # a slot is free
    assert made.choose(request(5, 5)) == first
    for target in targets:
        target.num_open = 3
    targets[first].num_open = 4  # more than 1.25 times the mean of 3.1
    assert made.choose(request(5, 5)) != first


# Workload


def test_a_workload_has_the_rate_and_the_lengths_it_was_asked_for() -> None:
    workload = Workload(
        turns=4, prompt=Length(50, 1.0), generated=Length(20), num_instructions=30, num_kinds=3
    )
    drawn = list(workload.conversations(40.0, 1000.0, 7))
    assert len(drawn) == pytest.approx(1000 * 40 / 4, rel=0.05)
    turns = [turn for conversation in drawn for turn in conversation.turns]
    assert sum(turn.num_new for turn in turns) / len(turns) == pytest.approx(50, rel=0.05)
    assert {turn.num_generated for turn in turns} == {20}
    kinds = Counter(conversation.instructions for conversation in drawn)
    assert kinds[0] / kinds[2] == pytest.approx(3, rel=0.15)
    assert workload.mean_prompt == 30 + 1.5 * 70 + 50
    assert drawn == list(workload.conversations(40.0, 1000.0, 7))


# The command


def simulate(tmp_path: Path, *arguments: str) -> dict[str, object]:
    output = tmp_path / "report.json"
    assert main(["simulate", *arguments, "--output", str(output)]) == 0
    sections: dict[str, object] = json.loads(output.read_text(encoding="utf-8"))["sections"]
    return sections


def test_every_section_from_the_shipped_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtests.simulate.fleets._GATEWAY_MS", (0.0, 100.0))
    sections = simulate(tmp_path, "--replicas", "2,6", "--seconds", "40")
    assert list(sections) == ["load", "slots", "routing", "gateway"]
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
