"""The comparison's pure parts: turns, ratios, the table, the plot's points, what a graph reads."""

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from loadtests.checkpoints import (
    CAUSAL_WORDS,
    MASK,
    MASKED_WORDS,
    causal_ids,
    causal_tokenizer,
    causal_words,
    masked_ids,
    masked_tokenizer,
    masked_words,
)
from loadtests.compare.arguments import add_compare_parser
from loadtests.compare.entrants import ENGINE, ENTRANTS, HTTP, MEMORY, Entrant, choose
from loadtests.compare.plot import curves
from loadtests.compare.results import (
    TARGETS,
    Result,
    Spread,
    findings,
    memory_share,
    results_of,
)
from loadtests.compare.rounds import Times, take_rounds
from loadtests.compare.runners.streams import decode_seconds, num_lead
from loadtests.compare.table import family_table
from loadtests.compare.weights import bytes_read
from loadtests.compare.work import CONCURRENCY, SHORT_CONTEXT, WORK, Work
from loadtests.errors import LoadTestError

SMALL, LARGE = WORK["masked"][0], WORK["masked"][-1]


def entrant(name: str) -> Entrant:
    return Entrant(name, "masked", "nowhere", f"what {name} is")


class Players:
    """Entrants whose turns take given seconds of a clock of their own."""

    def __init__(self, seconds: dict[str, float], fails: Callable[[str, int], bool]) -> None:
        self.now = 0.0
        self.turns: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self._seconds = seconds
        self._fails = fails

    def run(self, entrant: Entrant, work: Work) -> float:
        self.turns.append((entrant.name, work.name))
        if self._fails(entrant.name, len(self.turns)):
            raise LoadTestError("it fell over")
        self.now += self._seconds[entrant.name]
        return self._seconds[entrant.name]

    def play(self, seconds: float) -> Times:
        return take_rounds(
            [entrant(name) for name in self._seconds],
            self.run,
            seconds,
            on_failure=lambda each, error: self.failures.append(f"{each.name}: {error}"),
            clock=lambda: self.now,
        )


def test_entrants_take_turns_at_each_piece_of_work() -> None:
    players = Players({"a": 1, "b": 2, "c": 3}, lambda name, turn: False)
    times = players.play(25)
    size = len(WORK["masked"])
    first, second = players.turns[: 3 * size], players.turns[3 * size :]
    assert first == [(name, work.name) for work in WORK["masked"] for name in "abc"]
    # The second begins with another entrant, and ends when the time is over.
    assert second == [(name, SMALL.name) for name in "bca"]
    # The warm-up counts only where there was nothing else.
    assert times[SMALL] == {"a": {1: 1}, "b": {1: 2}, "c": {1: 3}}
    assert times[LARGE] == {"a": {0: 1}, "b": {0: 2}, "c": {0: 3}}


def test_no_work_begins_when_the_time_is_over() -> None:
    players = Players({"a": 5, "b": 5}, lambda name, turn: False)
    times = players.play(0.1)
    assert players.turns == [("a", SMALL.name), ("b", SMALL.name)]
    assert times == {SMALL: {"a": {0: 5}, "b": {0: 5}}}


def test_who_fails_has_no_more_turns() -> None:
    players = Players({"a": 1, "b": 1}, lambda name, turn: name == "b" and turn > 3)
    times = players.play(60)
    assert players.failures == ["b: it fell over"]
    assert [name for name, _ in players.turns].count("b") == 2
    assert set(times[SMALL]) == {"a", "b"}
    assert set(times[LARGE]) == {"a"}
    assert len(times[LARGE]["a"]) > 3


def test_ratios_are_taken_within_a_round() -> None:
    times: Times = {
        SMALL: {ENGINE: {1: 1.0, 2: 10.0, 3: 2.0}, "peer": {1: 2.0, 2: 15.0, 4: 0.1}, "new": {5: 1}}
    }
    engine, peer, new = results_of(times)
    assert engine.faster is None
    assert engine.value == Spread(1000, 2000, 10000)
    assert peer.faster == Spread(1.5, 1.75, 2.0)
    assert peer.rounds == 3
    assert new.faster is None
    assert peer.as_json()["times_our_engine"] == {"min": 1.5, "median": 1.75, "max": 2.0}
    assert peer.as_json()["work"]["name"] == "1 x 16"


def test_values_have_the_unit_of_their_kind() -> None:
    assert (Work("prefill", 1, 512).value(0.5), Work("prefill", 1, 512).unit) == (1024, "tok/s")
    assert (Work("decode", 4, 96).value(0.5), Work("decode", 4, 96).unit) == (500, "ms/step")
    assert Work("decode", 4, 96).tokens_per_second(0.5) == 8
    assert Work("pass", 8, 32).tokens_per_second(0.5) == 512
    assert Work("read", 1, 1000).value(0.1) == pytest.approx(10.48576)


def test_the_share_of_the_memorys_speed() -> None:
    step, read = Work("decode", 1, SHORT_CONTEXT, 48), Work("read", 1, 512, 4)
    gigabyte = 512 * 2**20
    times: Times = {
        step: {ENGINE: {1: 0.01, 2: 0.02}, "peer": {1: 0.005}},
        read: {MEMORY: {1: 0.1, 2: 0.05}},
    }
    # The fastest reading gives the limit: 0.05 s for the buffer, 0.005 s for a tenth of it.
    share = memory_share(times, gigabyte // 10)
    assert share is not None
    assert (share.low, share.high) == pytest.approx((0.25, 0.5), rel=1e-6)
    assert memory_share({step: times[step]}, 1000) is None


def result(name: str, work: Work, seconds: float, ratio: float | None) -> Result:
    value = work.value(seconds)
    faster = None if ratio is None else Spread(ratio - 0.1, ratio, ratio + 0.1)
    return Result(work, name, Spread(0.9 * value, value, 1.1 * value), faster, 3)


def test_findings_say_whether_a_target_is_met() -> None:
    one, eight = Work("decode", 1, SHORT_CONTEXT, 48), Work("decode", 8, SHORT_CONTEXT, 48)
    rows = findings(
        "causal",
        [
            result(ENGINE, one, 0.01, None),
            result("openvino", one, 0.0124, 1.24),
            result("openvino", eight, 0.02, 1.1),
            result("llama.cpp-q4", one, 0.02, 2.0),
            result("transformers", one, 0.02, 2.0),
            result(HTTP, eight, 0.01, 1.05),
        ],
        Spread(0.5, 0.61, 0.7),
    )
    assert rows == [
        (f"{one.name}, against openvino", "1.24x (1.14 to 1.34)", ">= 1.25x", False),
        (f"{eight.name}, against openvino", "1.10x (1.00 to 1.20)", ">= 1.10x", True),
        (f"{one.name}, against llama.cpp-q4", "2.00x (1.90 to 2.10)", ">= 1.50x", True),
        (f"{eight.name}: HTTP's share of the engine's speed", "95%", ">= 93%", True),
        (
            "decode, batch 1: share of the memory's read bandwidth",
            "61% (50% to 70%)",
            ">= 60%",
            True,
        ),
    ]


def test_every_target_is_of_work_that_is_measured() -> None:
    for target in TARGETS:
        works = [
            work
            for each in ENTRANTS
            for work in each.work
            if target.fits(each.family, result(each.name, work, 1.0, 1.0))
        ]
        assert works, target


def test_a_table_has_a_column_for_each_entrant_that_took_part() -> None:
    results = [
        result(ENGINE, SMALL, 0.02, None),
        result("openvino-w8", SMALL, 0.03, 1.5),
        result(ENGINE, LARGE, 0.4, None),
    ]
    players = [entrant(ENGINE), entrant("absent"), entrant("openvino-w8")]
    table = family_table("masked", results, players, None).splitlines()
    assert "|  | engine | openvino-w8 |" in table
    assert "| 1 x 16 | 20 ms (18 to 22) | 30 ms, 1.50x (1.40 to 1.60) |" in table
    assert "| 8 x 128 | 400 ms (360 to 440) |  |" in table
    assert "- openvino-w8: what openvino-w8 is." in table
    assert "| 1 x 16, against openvino-w8 | 1.50x (1.40 to 1.60) | >= 1.20x | yes |" in table
    assert "absent" not in "".join(table)
    assert not any("do not quote it" in line for line in table)
    once = family_table("masked", [replace(results[0], rounds=1)], players, None)
    assert "Medians of 1 round;" in once
    assert "do not quote it" in once


def test_the_plot_has_those_that_can_batch() -> None:
    def decode(batch: int, length: int = SHORT_CONTEXT) -> Work:
        return Work("decode", batch, length, 48)

    points = curves(
        [
            result(ENGINE, decode(8), 0.02, None),
            result(ENGINE, decode(1), 0.01, None),
            result(ENGINE, decode(4, 1000), 0.02, None),
            result("single", decode(1), 0.01, 1.0),
            result(ENGINE, Work("prefill", 1, 512), 0.5, None),
        ]
    )
    assert list(points) == [ENGINE]
    assert points[ENGINE] == [(1, pytest.approx(100)), (8, pytest.approx(400))]


def test_a_step_is_timed_while_all_streams_run() -> None:
    # The first writes alone until the second begins: those steps do not count.
    first = [0.0, 1.0, 1.1, 1.2, 2.0, 2.5, 3.0, 3.5, 4.0, 9.0]
    second = [0.0, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert decode_seconds([first, second], 3) == pytest.approx(0.5)
    assert decode_seconds([first, second], 2) == pytest.approx(0.5)
    with pytest.raises(LoadTestError, match="2 streams did not run together"):
        decode_seconds([[0.0, 1.0, 1.1, 1.2], [0.0, 2.0, 2.1, 2.2]], 3)
    assert num_lead(Work("decode", 8, 1000, 1)) > 8 * 1000 / 256


def test_peers_are_chosen_by_name() -> None:
    everyone = list(choose(("causal", "masked"), None))
    assert everyone == list(ENTRANTS)
    alone = [(each.family, each.name) for each in choose(("masked",), ())]
    assert alone == [("masked", ENGINE), ("masked", HTTP)]
    some = {each.name for each in choose(("causal",), ("transformers", "pipeline"))}
    assert some == {ENGINE, HTTP, MEMORY, "transformers"}
    with pytest.raises(LoadTestError, match=r"'tgi' is no peer; there are openvino, llama\.cpp-q8"):
        list(choose(("causal",), ("tgi",)))


def test_each_entrant_has_its_familys_work() -> None:
    for each in ENTRANTS:
        assert [work.kind for work in each.work] == (
            ["read"]
            if each.name == MEMORY
            else [work.kind for work in WORK[each.family] if work.kind != "read"]
        )
    steps = [work for work in WORK["causal"] if work.length == SHORT_CONTEXT]
    assert [work.batch for work in steps] == list(CONCURRENCY)


def test_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_compare_parser(parser.add_subparsers())
    args = parser.parse_args(["compare", "--peers", "openvino, pipeline", "--only", "masked"])
    assert (args.peers, args.only, args.precision) == (("openvino", "pipeline"), "masked", "int8")
    assert parser.parse_args(["compare", "--peers", ""]).peers == ()
    assert parser.parse_args(["compare"]).peers is None


def test_weights_are_counted_without_what_is_read_by_rows(tmp_path: Path) -> None:
    def constant(name: str, shape: tuple[int, ...], kind: type[np.generic]) -> TensorProto:
        return numpy_helper.from_array(np.zeros(shape, kind), name)

    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "weights"], ["y"]),
        helper.make_node("Cast", ["eight"], ["eight_float"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["y", "eight_float"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [None])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [
            constant("table", (100, 8), np.float32),
            constant("weights", (8, 16), np.float32),
            constant("eight", (16, 4), np.int8),
            constant("unused", (999,), np.float32),
            helper.make_tensor("four", TensorProto.INT4, [6], bytes(3), raw=True),
        ],
    )
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    assert bytes_read(tmp_path / "model.onnx") == 8 * 16 * 4 + 16 * 4


def test_causal_words_are_a_token_each() -> None:
    tokenizer, words = causal_tokenizer(), causal_words()
    assert tokenizer.get_vocab_size() == CAUSAL_WORDS
    text = "".join(random.Random(0).choices(words, k=500))
    ids = tokenizer.encode(text).ids
    assert len(ids) == 500
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("Größe 10 €\n").ids) == "Größe 10 €\n"
    drawn = causal_ids(random.Random(0), 500)
    assert all(0 < token_id < CAUSAL_WORDS for token_id in drawn)
    assert tokenizer.decode(drawn, skip_special_tokens=False).isascii()


def test_masked_words_are_a_token_each() -> None:
    tokenizer, words = masked_tokenizer(), masked_words()
    assert tokenizer.get_vocab_size() == MASKED_WORDS
    chosen = [*random.Random(0).choices(words, k=100), MASK]
    ids = tokenizer.encode(" ".join(chosen)).ids
    assert len(ids) == 103
    assert ids.count(tokenizer.token_to_id(MASK)) == 1
    assert "[UNK]" not in tokenizer.encode("Paris is the capital of France (2024)!").tokens
    assert tokenizer.token_to_id(MASK) not in masked_ids(random.Random(0), 5000)
