"""`loadtests.compare` without processes: rounds, ratios, targets, the table, checkpoints."""

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from loadtests import LoadTestError
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
from loadtests.compare import add_arguments
from loadtests.compare.entrants import ENGINE, ENTRANTS, HTTP, MEMORY, Entrant, choose
from loadtests.compare.peers import decode_seconds, num_lead
from loadtests.compare.report import shape_table
from loadtests.compare.results import (
    Reads,
    Result,
    Spread,
    Times,
    bytes_read,
    findings,
    memory_shares,
    results_of,
)
from loadtests.compare.rounds import take_rounds
from loadtests.compare.setup import find
from loadtests.compare.work import (
    CONCURRENCY,
    LARGE_CONCURRENCY,
    MANY_CONCURRENCY,
    ROOM,
    SHORT_CONTEXT,
    WORK,
    Load,
    Work,
)

MASKED_WORK = WORK["small"]["masked"]
SMALL, LARGE = MASKED_WORK[0], MASKED_WORK[-1]


def entrant(name: str) -> Entrant:
    return Entrant(name, "masked", "nowhere", f"what {name} is")


class Players:
    """Entrants whose turns take given seconds on a fake clock."""

    def __init__(self, seconds: dict[str, float], fails: Callable[[str, int], bool]) -> None:
        self.now = 0.0
        self.turns: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self._seconds = seconds
        self._fails = fails

    def run(self, entrant: Entrant, work: Work) -> float:
        self.turns.append((entrant.name, work.name))
        if self._fails(entrant.name, len(self.turns)):
            raise LoadTestError("it failed")
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
    size = len(MASKED_WORK)
    first, second = players.turns[: 3 * size], players.turns[3 * size :]
    assert first == [(name, work.name) for work in MASKED_WORK for name in "abc"]
    # The second round begins with another entrant and ends when the time is up.
    assert second == [(name, SMALL.name) for name in "bca"]
    # The warm-up counts only for work that was not measured again.
    assert times[SMALL] == {"a": {1: 1}, "b": {1: 2}, "c": {1: 3}}
    assert times[LARGE] == {"a": {0: 1}, "b": {0: 2}, "c": {0: 3}}


def test_no_work_begins_after_the_time_is_up() -> None:
    players = Players({"a": 5, "b": 5}, lambda name, turn: False)
    times = players.play(0.1)
    assert players.turns == [("a", SMALL.name), ("b", SMALL.name)]
    assert times == {SMALL: {"a": {0: 5}, "b": {0: 5}}}


def test_an_entrant_that_fails_takes_no_more_turns() -> None:
    players = Players({"a": 1, "b": 1}, lambda name, turn: name == "b" and turn > 3)
    times = players.play(60)
    assert players.failures == ["b: it failed"]
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
    assert (peer.rounds, peer.cold) == (3, False)
    assert new.faster is None
    assert peer.as_json()["times_our_engine"] == {"min": 1.5, "median": 1.75, "max": 2.0}
    assert peer.as_json()["work"]["name"] == "1 x 16"


def test_values_have_the_unit_of_their_kind() -> None:
    assert (Work("prefill", 1, 512).value(0.5), Work("prefill", 1, 512).unit) == (1024, "tok/s")
    step, steps = Work("decode", 4, 96), Work("decode", 4, 96, per_second=True)
    assert (step.value(0.5), step.unit) == (500, "ms/step")
    assert (steps.value(0.5), steps.unit) == (8, "tok/s")
    assert (Work("pass", 8, 32).value(0.5), Work("pass", 8, 32).unit) == (500, "ms")
    texts = Work("pass", 32, 128, per_second=True)
    assert (texts.value(0.5), texts.unit) == (64, "texts/s")
    assert Work("read", 1, 1000).value(0.1) == pytest.approx(10.48576)


def test_ragged_texts_are_the_same_at_each_call() -> None:
    work = Work("generate", 64, 512, least=16, new_tokens=256, per_second=True)
    assert work.name == "generate, batch 64, 16 to 512 tokens, then 16 to 256 new ones"
    assert work.texts == work.texts
    lengths, news = zip(*work.texts, strict=True)
    assert len(lengths) == 64
    assert (min(lengths) >= 16, max(lengths) <= 512, max(lengths) > 400) == (True, True, True)
    assert (min(news) >= 16, max(news) <= 256, max(news) > 200) == (True, True, True)
    assert len(set(lengths)) > 32
    # Requested tokens count, not the padding that all wait for.
    assert (work.value(2.0), work.unit) == (sum(news) / 2, "tok/s")
    passed = Work("pass", 32, 128, least=16)
    assert {new for _, new in passed.texts} == {0}
    assert passed.name == "32 x 16 to 128"
    assert Work("pass", 2, 128).texts == ((128, 0), (128, 0))


def test_there_is_room_for_all_work() -> None:
    for load, families in WORK.items():
        for work in families["causal"]:
            new = work.new_tokens or (num_lead(work) + work.repeats)
            if work.kind != "read":
                assert work.batch <= ROOM[load].batch
                assert work.length + new <= ROOM[load].context


def test_the_share_of_the_memory_bandwidth() -> None:
    step, read = Work("decode", 1, SHORT_CONTEXT, 48), Work("read", 1, 512, 4)
    gigabyte = 512 * 2**20
    times: Times = {
        step: {ENGINE: {1: 0.01, 2: 0.02}, "peer": {1: 0.005}},
        read: {MEMORY: {1: 0.1, 2: 0.05}},
    }
    # The fastest read sets the limit: 0.05 s for the buffer, 0.005 s for a tenth of it.
    shares = memory_shares(times, Reads(gigabyte // 10, 0))
    assert list(shares) == [step]
    assert (shares[step].low, shares[step].high) == pytest.approx((0.25, 0.5), rel=1e-6)
    assert memory_shares({step: times[step]}, Reads(1000, 0)) == {}
    # The KV cache of each text halfway through the steps.
    assert Reads(1000, 3).of(Work("decode", 8, 100, 48)) == 1000 + 3 * 8 * 124


def result(name: str, work: Work, seconds: float, ratio: float | None) -> Result:
    value = work.value(seconds)
    faster = None if ratio is None else Spread(ratio - 0.1, ratio, ratio + 0.1)
    return Result(work, name, Spread(0.9 * value, value, 1.1 * value), faster, 3)


def test_findings_are_of_http_and_of_the_memory() -> None:
    one, eight = Work("decode", 1, SHORT_CONTEXT, 48), Work("decode", 8, SHORT_CONTEXT, 48)
    results = [
        result(ENGINE, one, 0.01, None),
        result("openvino", eight, 0.02, 1.1),
        result(HTTP, one, 0.01, 1.1),
        result(HTTP, eight, 0.01, 1.05),
    ]
    assert findings(results, {one: Spread(0.5, 0.61, 0.7)}) == [
        (f"{eight.name}: HTTP's share of the engine's speed", "95%"),
        (f"{one.name}: share of the memory's read bandwidth", "61% (50% to 70%)"),
    ]


def test_a_table_has_a_column_for_each_entrant_that_took_part() -> None:
    results = [
        result(ENGINE, SMALL, 0.02, None),
        result("openvino-w8", SMALL, 0.03, 1.5),
        result(ENGINE, LARGE, 0.4, None),
    ]
    players = [entrant(ENGINE), entrant("absent"), entrant("openvino-w8")]
    shares = {LARGE: Spread(0.5, 0.61, 0.7)}
    table = shape_table("BERT", results, players, shares).splitlines()
    assert "|  | engine | openvino-w8 |" in table
    assert "| 1 x 16 | 20 ms (18 to 22) | 30 ms, 1.50x (1.40 to 1.60) |" in table
    assert "| 8 x 128 | 400 ms (360 to 440) |  |" in table
    assert "- openvino-w8: what openvino-w8 is." in table
    assert "| 8 x 128: share of the memory's read bandwidth | 61% (50% to 70%) |" in table
    assert "absent" not in "".join(table)
    assert not any("do not quote it" in line for line in table)
    once = replace(results[0], rounds=1)
    assert "Medians of 1 round." in shape_table("BERT", [once], players, {})
    cold = shape_table("BERT", [replace(once, cold=True)], players, {})
    assert "do not quote it" in cold


def test_a_step_is_timed_while_all_streams_run() -> None:
    # Steps of the first stream before the second begins do not count.
    first = [0.0, 1.0, 1.1, 1.2, 2.0, 2.5, 3.0, 3.5, 4.0, 9.0]
    second = [0.0, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert decode_seconds([first, second], 3) == pytest.approx(0.5)
    assert decode_seconds([first, second], 2) == pytest.approx(0.5)
    with pytest.raises(LoadTestError, match="2 streams did not run at the same time"):
        decode_seconds([[0.0, 1.0, 1.1, 1.2], [0.0, 2.0, 2.1, 2.2]], 3)
    assert num_lead(Work("decode", 8, 1000, 1)) > 8 * 1000 / 256


def test_peers_are_chosen_by_name() -> None:
    def names(*asked: Any) -> list[str]:
        return [each.name for each in choose(*asked)]

    usual = {each.name for each in ENTRANTS if each.family == "causal"} - {"transformers-compiled"}
    assert set(names("causal", None, "cpu", "small")) == usual
    assert names("masked", (), "cpu", "small") == [ENGINE, HTTP]
    some = names("causal", ("transformers", "pipeline"), "cpu", "small")
    assert set(some) == {ENGINE, HTTP, MEMORY, "transformers"}
    compiled = ("transformers-compiled",)
    assert set(names("causal", compiled, "cpu", "large")) == {ENGINE, HTTP, MEMORY, *compiled}
    assert set(names("causal", None, "cuda", "large")) == {ENGINE, MEMORY, *compiled}
    peers = ["transformers", "transformers-encoder", "transformers-compiled"]
    assert names("masked", None, "cuda", "large") == [ENGINE, *peers]
    with pytest.raises(LoadTestError, match=r"unknown peer 'tgi'; choose from openvino, llama"):
        names("causal", ("tgi",), "cpu", "small")
    with pytest.raises(LoadTestError, match=r"unknown peer 'openvino'; choose from transf"):
        names("causal", ("openvino",), "cuda", "large")


def test_shapes_are_chosen_by_name() -> None:
    assert [shape.heading for shape in find(("7b",))] == ["A 7B Llama shape"]
    with pytest.raises(LoadTestError, match="unknown shape '9b'; choose from 135m"):
        find(("135m", "9b"))


def test_each_entrant_has_its_familys_work() -> None:
    for each in ENTRANTS:
        for load in WORK:
            mine = replace(each, load=load).work
            wanted = [
                work
                for work in WORK[load][each.family]
                if (work.kind == "read") == (each.name == MEMORY)
                and (each.ragged or not work.least)
            ]
            assert list(mine) == wanted
    batches: dict[Load, tuple[int, ...]] = {
        "small": CONCURRENCY,
        "large": LARGE_CONCURRENCY,
        "many": MANY_CONCURRENCY,
    }
    for load in WORK:
        steps = [
            work
            for work in WORK[load]["causal"]
            if (work.kind, work.length) == ("decode", SHORT_CONTEXT)
        ]
        assert tuple(work.batch for work in steps) == batches[load]


def test_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--peers", "openvino, pipeline", "--only", "masked"])
    assert (args.peers, args.only) == (("openvino", "pipeline"), "masked")
    assert parser.parse_args(["--peers", ""]).peers == ()
    assert parser.parse_args([]).peers is None
    args = parser.parse_args(["--provider", "cuda", "--shapes", "7b,bert-large"])
    assert (args.provider, args.shapes, args.apart) == ("cuda", ("7b", "bert-large"), False)


def test_weights_that_are_read_by_rows_do_not_count(tmp_path: Path) -> None:
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


def test_causal_words_are_one_token_each() -> None:
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


def test_a_smaller_vocabulary_has_fewer_words() -> None:
    tokenizer, words = causal_tokenizer(32_000), causal_words(32_000)
    assert tokenizer.get_vocab_size() == 32_000
    assert len(words) < len(causal_words())
    assert len(tokenizer.encode("".join(random.Random(0).choices(words, k=500))).ids) == 500
    assert max(causal_ids(random.Random(0), 5000, 32_000)) < 32_000


def test_masked_words_are_one_token_each() -> None:
    tokenizer, words = masked_tokenizer(), masked_words()
    assert tokenizer.get_vocab_size() == MASKED_WORDS
    chosen = [*random.Random(0).choices(words, k=100), MASK]
    ids = tokenizer.encode(" ".join(chosen)).ids
    assert len(ids) == 103
    mask = tokenizer.token_to_id(MASK)
    assert mask is not None
    assert ids.count(mask) == 1
    assert "[UNK]" not in tokenizer.encode("Paris is the capital of France (2024)!").tokens
    assert mask not in masked_ids(random.Random(0), 5000)
