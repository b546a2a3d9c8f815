"""`loadtests.engine` without a model: turns, statistics, scripts and arguments."""

import argparse
import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console

from loadtests import LoadTestError, names_of
from loadtests.__main__ import main
from loadtests.engine import SHARES, first_token, seconds_of, speculation, split, stall
from loadtests.engine.rig import Recorder, Step
from loadtests.engine.speculation import ScriptedRunner
from loadtests.measurement import Section, median, median_ratio, take_turns
from maskdial.runtime.logits import Logits, SummarizedLogits
from maskdial.runtime.piece import Piece

VOCAB = 10


def turns(costs: dict[str, float], seconds: float) -> tuple[dict[str, list[int]], list[str]]:
    """Measures variants with given costs on a fake clock; a sample is its number."""
    now = 0.0
    order: list[str] = []

    def variant(name: str) -> Callable[[], Awaitable[int]]:
        async def measure() -> int:
            nonlocal now
            now += costs[name]
            order.append(name)
            return len(order)

        return measure

    variants = {name: variant(name) for name in costs}
    return asyncio.run(take_turns(variants, seconds, lambda: now)), order


def test_variants_take_turns_and_the_first_round_is_dropped() -> None:
    samples, order = turns({"a": 1.0, "b": 2.0, "c": 1.0}, 12.0)
    assert order == [*"abc", *"bca", *"cab"]
    assert samples == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_no_round_begins_that_would_end_too_late() -> None:
    assert len(turns({"a": 1.0, "b": 2.0}, 8.9)[1]) == 4


def test_of_two_rounds_none_is_dropped() -> None:
    assert turns({"a": 1.0}, 2.5)[0] == {"a": [1, 2]}


def test_one_round_is_always_made_and_kept() -> None:
    assert turns({"a": 5.0, "b": 5.0}, 0.1) == ({"a": [1], "b": [2]}, ["a", "b"])


def test_medians() -> None:
    assert median([3, 1, 2]) == 2
    assert median([]) == 0
    assert median_ratio([2, 30, 400], [1, 10, 100]) == 3
    assert median_ratio([2, 30], [0, 10]) == 3


def test_sections_keep_the_order_of_the_report() -> None:
    parse_sections = names_of(tuple(SHARES))
    assert parse_sections("steps, stall,steps") == ("stall", "steps")
    with pytest.raises(argparse.ArgumentTypeError, match="'stalls' is not one of stall, split"):
        parse_sections("stalls,steps")


def test_sections_share_the_seconds() -> None:
    assert math.isclose(sum(SHARES.values()), 1)
    shares = seconds_of(("stall", "split"), 100.0)
    assert list(shares) == ["stall", "split"]
    assert sum(shares.values()) == pytest.approx(100)
    assert shares["split"] / shares["stall"] == pytest.approx(SHARES["split"] / SHARES["stall"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["engine"],
        ["engine", "--bundle", "x", "--seconds", "0"],
        ["engine", "--bundle", "x", "--sections", "nothing"],
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "error" in capsys.readouterr().err


def record(passes: list[tuple[int, int]], phases: tuple[float, float, float, float]) -> Step:
    recorder = Recorder()
    for num_rows, num_tokens in passes:
        recorder.metrics.observe_pass(0.25, num_rows, num_tokens, num_tokens)
    recorder.metrics.observe_step(*phases)
    (step,) = recorder.take_steps()
    assert recorder.take_steps() == []
    return step


def test_a_step_knows_its_own_time_and_what_it_did() -> None:
    step = record([(8, 8)], (0.125, 0.5, 0.25, 0.125))
    assert (step.total, step.own, step.around_passes) == (1.0, 0.5, 0.25)
    assert step.num_decoded == 8


def test_a_step_that_also_reads_a_prompt_is_no_plain_decode_step() -> None:
    step = record([(7, 7), (1, 256)], (0, 1, 0, 0))
    assert step.num_decoded == 0
    assert [each.reads_prompt for each in step.passes] == [False, True]
    assert step.around_passes == 0.5
    assert record([(7, 70)], (0, 1, 0, 0)).num_decoded == 0
    assert record([], (0, 1, 0, 0)).num_decoded == 0


def test_gaps_that_overlap_the_reading_of_a_prompt() -> None:
    readers: list[Any] = [SimpleNamespace(times=[0, 1, 3, 6, 10]), SimpleNamespace(times=[2, 5])]
    assert stall.gaps_during(readers, 2, 5) == [2, 3, 3]


def test_iterations_that_read_the_long_prompt() -> None:
    began = record([(1, 1), (6, 96)], (0, 1, 0, 0))
    decoded = record([(7, 7)], (0, 1, 0, 0))
    read = record([(7, 7), (1, 256)], (0, 1, 0, 0))
    idle = record([], (0, 0, 0, 0))
    together = record([(8, 263)], (0, 1, 0, 0))
    assert stall.seconds_beside_streams([began, decoded, read, idle, together]) == [0.5, 0.25]


def test_a_stall_is_compared_with_one_chunk_and_one_step() -> None:
    calm = stall.Sample(
        gaps=(0.25, 0.3, 0.05),
        steps=(0.05, 0.05),
        both=(0.25, 0.25, 0.15),
        time_to_first_token=1.0,
    )
    noisy = stall.Sample(
        gaps=(0.3, 0.6, 0.05),
        steps=(0.05, 0.1),
        both=(0.25, 0.5, 0.15),
        time_to_first_token=3.0,
    )
    assert (calm.gaps_with_chunk, noisy.gaps_with_chunk) == ((0.25, 0.3), (0.3, 0.6))
    row = stall.summarize(256, [calm, noisy])
    assert (row.chunk_tokens, row.step_ms, row.both_ms) == (256, 50, 250)
    assert (row.gap_ms, row.longest_gap_ms, row.worst_gap_ms) == pytest.approx((300, 450, 600))
    assert row.gap_to_both == pytest.approx((0.275 / 0.25 + 0.45 / 0.375) / 2)
    assert row.longest_to_longest == pytest.approx(1.2)
    assert row.prompt_ms == 2000


def test_the_only_chunk_of_a_prompt_is_a_whole_one() -> None:
    sample = stall.Sample((0.3, 0.01), (0.05,), (0.25,), 1.0)
    assert sample.gaps_with_chunk == (0.3,)
    assert stall.summarize(512, [sample]).both_ms == 250


def test_the_split_has_medians_and_the_share_of_each_step() -> None:
    phases = [(0.0, 0.5, 0.25, 0.25), (0.0, 3.0, 0.5, 0.5), (0.0, 1.5, 0.25, 0.25)]
    row = split.summarize(
        "greedy", [record([(n, n)], each) for n, each in zip((8, 8, 5), phases, strict=True)]
    )
    assert (row.step_ms, row.run_ms, row.sample_ms, row.publish_ms) == (2000, 1500, 250, 250)
    assert (row.own_percent, row.rows, row.steps) == (25, 7, 3)


@given(st.integers(0, 1000), st.floats(1.5, 150), st.floats(0.01, 30))
def test_a_temperature_gives_any_model_the_same_perplexity(
    seed: int, perplexity: float, scale: float
) -> None:
    logits = (scale * np.random.default_rng(seed).standard_normal(300)).astype(np.float32)
    temperature = split.temperature_for(logits, perplexity)
    log = (logits - logits.max()) / np.float64(temperature)
    weights = np.exp(log) / np.exp(log).sum()
    entropy = -(weights[weights > 0] * np.log(weights[weights > 0])).sum()
    assert np.exp(entropy) == pytest.approx(perplexity, rel=1e-6)


def test_prefix_rows_compare_round_by_round() -> None:
    off = [first_token.PrefixSample(seconds, 0) for seconds in (1.0, 4.0, 2.0)]
    hit = [first_token.PrefixSample(seconds, 896) for seconds in (0.1, 0.5, 0.25)]
    row = first_token.summarize_prefix("on", 1016, hit, off)
    assert (row.prompt_tokens, row.cached_tokens) == (1016, 896)
    assert (row.median_ms, row.min_ms, row.max_ms, row.times_faster) == (250, 100, 500, 8)


def test_together_rows_compare_round_by_round() -> None:
    both = [first_token.TogetherSample(0.5, 0.25, 1), first_token.TogetherSample(1.0, 0.5, 3)]
    alone = [first_token.TogetherSample(1.0, 0.5, 8), first_token.TogetherSample(4.0, 2.0, 8)]
    row = first_token.summarize_together((8, 64), both, alone)
    assert row == first_token.TogetherRow("8-64", 750, 375, 2, 2500, 1250, 8, 3)
    assert first_token.summarize_together((64, 64), both, alone).prompt_tokens == "64"


def test_speculation_rows() -> None:
    off = [speculation.Sample(10.0, 40, 40, 0, 0), speculation.Sample(20.0, 40, 40, 0, 0)]
    on = [speculation.Sample(30.0, 40, 10, 60, 30), speculation.Sample(40.0, 40, 10, 60, 30)]
    row = speculation.summarize("copy", 2, on, off)
    assert row == speculation.Row("copy", 2, 15.0, 35.0, 2.5, 4.0, 60, 50.0, 21)


def test_texts_are_cut_to_the_context() -> None:
    prompt, target = list(range(50)), list(range(100, 140))
    assert speculation.fit(prompt, target, 90) == speculation.Script(
        tuple(range(50)), tuple(range(100, 140))
    )
    assert speculation.fit(prompt, target, 80).target == tuple(range(100, 130))
    short = speculation.fit(prompt, target, 40)
    assert (short.prompt, short.target) == (tuple(range(26, 50)), tuple(range(100, 116)))
    with pytest.raises(LoadTestError, match="no tokens"):
        speculation.fit([], target, 40)


class EvenRunner:
    """A model to which every token is equally likely; it counts its passes."""

    cache: Any = None
    decode_and_prefill: Any = None
    adapters: NDArray[np.int64] | None = None

    def __init__(self) -> None:
        self.num_passes = 0

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        self.num_passes += 1
        return np.zeros((num_logits, VOCAB), np.float32)

    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        raise AssertionError("not used")

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        self.num_passes += 1
        return np.zeros((len(rows), VOCAB), np.float32)

    def warm_up(self) -> None:
        raise AssertionError("not used")


def best_of(logits: Logits) -> list[int]:
    best: list[int] = np.asarray(logits).argmax(-1).tolist()
    return best


def test_a_script_is_followed_in_chunks_steps_and_drafts() -> None:
    model = EvenRunner()
    runner = ScriptedRunner(model)
    runner.follow([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert best_of(runner.prefill(0, np.array([1, 2]), 0)) == [3]
    assert best_of(runner.prefill(0, np.array([3, 4]), 2)) == [5]
    lengths, rows = np.array([4]), np.array([0])
    assert best_of(runner.decode(np.array([5]), lengths, rows)) == [6]
    assert best_of(runner.prefill(0, np.array([6, 0, 0]), 5, 3)) == [7, 8, 9]
    assert model.num_passes == 4


def test_several_streams_follow_a_script_in_one_pass() -> None:
    model = EvenRunner()
    model.decode_and_prefill = lambda *_: np.zeros((5, VOCAB), np.float32)
    runner = ScriptedRunner(model)
    runner.follow([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert runner.decode_and_prefill is not None
    none = np.array([5, 0, 2])
    pieces = [Piece.of(1, np.array([2, 3, 4]), 1, 3), Piece.of(3, np.array([1, 2]), 0)]
    logits = runner.decode_and_prefill(none, np.array([4, 0, 1]), np.array([0]), pieces)
    assert best_of(logits) == [6, 3, 4, 5, 3]


def test_after_its_script_the_logits_are_the_models() -> None:
    runner = ScriptedRunner(EvenRunner())
    runner.follow([1, 2, 3])
    logits = runner.prefill(0, np.array([2, 3, 4]), 1, 3)
    assert best_of(logits) == [3, 0, 0]
    assert not np.asarray(logits)[1:].any()


def test_a_summary_follows_the_script_too() -> None:
    """As of graphs that the kernels rewrote, whose logits are not looked through again."""
    model = EvenRunner()
    summary = np.zeros(2, np.int64), np.zeros(2, np.float32), np.full(2, VOCAB, np.float64)
    logits = SummarizedLogits(np.zeros((2, VOCAB), np.float32), *summary)
    model.decode_and_prefill = lambda *_: logits
    runner = ScriptedRunner(model)
    runner.follow([1, 2, 3, 4])
    assert runner.decode_and_prefill is not None
    no_rows = np.empty(0, np.int64)
    pieces = [Piece.of(0, np.array([2, 3]), 1, 2)]
    found = runner.decode_and_prefill(no_rows, no_rows, no_rows, pieces)
    assert best_of(found) == logits.best.tolist() == [3, 4]
    assert logits.max_logits.tolist() == logits.values.max(-1).tolist()


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    some_ms: float


def test_a_section_is_a_table_and_json() -> None:
    section = Section("stall", "how long?", 2, (Line("[a]", 12.345),), ("fine",), ("small",))
    assert section.as_json() == {
        "question": "how long?",
        "rounds": 2,
        "rows": [{"name": "[a]", "some_ms": 12.345}],
        "findings": ["fine"],
        "notes": ["small"],
    }
    console = Console(file=StringIO(), width=80)
    section.show(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("stall: how long? (2 rounds)", "some", "ms", "[a]", "12.3", "fine", "note: small"):
        assert part in text
