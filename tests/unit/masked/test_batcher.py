"""The batcher's promises, for any mix of lengths."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.masked.batcher import Batcher

_KEYS = itertools.count()  # those of texts that are not said to be equal


@dataclass(frozen=True, eq=False)
class Text:
    length: int
    client: str = ""
    key: bytes = field(default_factory=lambda: next(_KEYS).to_bytes(8))


lengths_of_texts = st.lists(st.integers(1, 600), max_size=60)
budgets = st.integers(1, 4096)


def filled(lengths: list[int], budget: int) -> tuple[Batcher[Text], list[Text]]:
    batcher: Batcher[Text] = Batcher(budget, 16)
    texts = [Text(length) for length in lengths]
    for text in texts:
        batcher.add(text)
    return batcher, texts


def batches_of(batcher: Batcher[Text]) -> Iterator[list[Text]]:
    while batch := batcher.next_batch():
        yield batch


def padded_tokens(batch: list[Text]) -> int:
    return max(text.length for text in batch) * len(batch)


def padding(batch: list[Text]) -> int:
    return padded_tokens(batch) - sum(text.length for text in batch)


def test_where_padding_is_free_texts_of_all_lengths_share_a_pass() -> None:
    """As on a GPU, where a pass costs as much as thousands of tokens."""
    for free_padding, num_batches in ((16, 8), (4096, 1)):
        batcher: Batcher[Text] = Batcher(4096, free_padding)
        for length in range(64, 128, 2):
            batcher.add(Text(length))
        assert len(list(batches_of(batcher))) == num_batches


@given(lengths_of_texts, budgets)
def test_every_text_comes_out_exactly_once(lengths: list[int], budget: int) -> None:
    batcher, texts = filled(lengths, budget)
    out = [text for batch in batches_of(batcher) for text in batch]
    assert len(out) == len(texts)
    assert set(out) == set(texts)
    assert len(batcher) == 0


@given(lengths_of_texts, budgets)
def test_a_batch_keeps_the_padded_budget_or_is_one_text(lengths: list[int], budget: int) -> None:
    batcher, _ = filled(lengths, budget)
    for batch in batches_of(batcher):
        assert padded_tokens(batch) <= budget or len(batch) == 1


texts_of_keys = st.lists(st.tuples(st.integers(1, 5), st.sampled_from("ab")), max_size=40)


@given(texts_of_keys, st.integers(1, 40))
def test_texts_of_a_key_come_out_together_and_count_as_one(
    keys: list[tuple[int, str]], budget: int
) -> None:
    """Whoever they are from; and none is forgotten, be it that some were withdrawn."""
    batcher: Batcher[Text] = Batcher(budget, 16)
    texts = [Text(length, client, bytes([length])) for length, client in keys]
    for text in texts:
        batcher.add(text)
    for text in (gone := texts[::7]):
        assert batcher.discard(text)
        assert not batcher.discard(text)
    batches = list(batches_of(batcher))
    assert {text for batch in batches for text in batch} == set(texts).difference(gone)
    found = [{text.key for text in batch} for batch in batches]
    assert sum(map(len, found)) == len(set().union(*found)), "a key is in one batch only"
    for batch in batches:
        distinct = {text.key: text for text in batch}.values()
        assert padded_tokens(list(distinct)) <= budget or len(distinct) == 1


@given(lengths_of_texts, budgets)
def test_the_oldest_text_leads_every_batch(lengths: list[int], budget: int) -> None:
    batcher, waiting = filled(lengths, budget)
    for batch in batches_of(batcher):
        assert batch[0] is waiting[0]
        waiting = [text for text in waiting if text not in batch]


@given(lengths_of_texts, budgets)
def test_padding_is_a_small_share_or_less_than_a_pass_costs(
    lengths: list[int], budget: int
) -> None:
    batcher, _ = filled(lengths, budget)
    for batch in batches_of(batcher):
        num_tokens = sum(text.length for text in batch)
        assert padding(batch) <= max(16, num_tokens / 32)


@given(lengths_of_texts, budgets)
def test_texts_of_one_length_run_oldest_first(lengths: list[int], budget: int) -> None:
    batcher, texts = filled(lengths, budget)
    out = [text for batch in batches_of(batcher) for text in batch]
    for length in set(lengths):
        assert [t for t in out if t.length == length] == [t for t in texts if t.length == length]


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "next"]), st.integers(1, 40))))
def test_any_interleaving_matches_a_plain_list(steps: list[tuple[str, int]]) -> None:
    batcher: Batcher[Text] = Batcher(128, 16)
    waiting: list[Text] = []
    gone = Text(1)
    for step, number in steps:
        if step == "add":
            waiting.append(Text(number))
            batcher.add(waiting[-1])
        elif step == "discard" and waiting:
            gone = waiting.pop(number % len(waiting))
            assert batcher.discard(gone)
        elif step == "next":
            batch = batcher.next_batch()
            assert batch[:1] == waiting[:1]
            assert set(batch) <= set(waiting)
            waiting = [text for text in waiting if text not in batch]
        assert not batcher.discard(gone)
        assert len(batcher) == len(waiting)
    assert batcher.clear() == waiting
    assert batcher.next_batch() == []


def test_padding_stays_near_zero_on_a_busy_mix() -> None:
    rng = random.Random(7)
    lengths = [min(int(rng.lognormvariate(4, 0.8)) + 3, 512) for _ in range(3000)]
    batcher, texts = filled(lengths, 8192)
    batches = list(batches_of(batcher))
    num_tokens = sum(text.length for text in texts)
    assert sum(padding(batch) for batch in batches) < 0.03 * num_tokens
    assert len(batches) < 3 * num_tokens / 8192


@pytest.mark.parametrize("length", [1, 30, 500])
def test_nothing_starves_behind_a_stream_of_texts_of_other_lengths(length: int) -> None:
    """However many come later: a text waits for no more passes than it found texts waiting."""
    batcher, _ = filled([8] * 100, 64)
    lone = Text(length)
    batcher.add(lone)
    for _ in range(13):  # eight texts a pass
        batch = batcher.next_batch()
        assert lone not in batch
        for text in batch:
            batcher.add(Text(text.length))
    assert lone in batcher.next_batch()


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=8),
    st.integers(1, 600),
    st.lists(st.lists(st.integers(1, 600), max_size=4), min_size=9, max_size=9),
    budgets,
)
def test_a_text_waits_for_no_more_passes_than_it_found_texts(
    older: list[int], length: int, arrivals: list[list[int]], budget: int
) -> None:
    batcher, _ = filled(older, budget)
    lone = Text(length)
    batcher.add(lone)
    for num_passes, later in enumerate(arrivals):
        if lone in batcher.next_batch():
            assert num_passes <= len(older)
            return
        for each in later:
            batcher.add(Text(each))
    pytest.fail("it never ran")


def test_companions_are_those_nearest_to_the_leader() -> None:
    batcher, texts = filled([100, 400, 97, 30, 101, 103, 99], 400)
    assert [text.length for text in batcher.next_batch()] == [100, 99, 101]
    assert batcher.next_batch() == [texts[1]]
    assert [text.length for text in batcher.next_batch()] == [97, 103]


def test_a_longer_text_joins_where_it_costs_little() -> None:
    batcher, _ = filled([100, 102, 140], 4096)
    assert [text.length for text in batcher.next_batch()] == [100, 102]


def test_equal_texts_fill_the_budget_exactly() -> None:
    batcher, _ = filled([16] * 10, 64)
    assert [len(batch) for batch in batches_of(batcher)] == [4, 4, 2]


def test_a_text_over_the_budget_runs_alone() -> None:
    batcher, _ = filled([500, 500, 10], 256)
    assert [[t.length for t in batch] for batch in batches_of(batcher)] == [[500], [500], [10]]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_batch_tokens must be at least 1$"):
        Batcher[Text](0, 16)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 200)), max_size=60), budgets)
def test_texts_of_several_clients_come_out_exactly_once(
    given_texts: list[tuple[str, int]], budget: int
) -> None:
    batcher: Batcher[Text] = Batcher(budget, 16)
    texts = [Text(length, client) for client, length in given_texts]
    for text in texts:
        batcher.add(text)
    out = []
    for batch in batches_of(batcher):
        assert padded_tokens(batch) <= budget or len(batch) == 1
        out += batch
    assert len(out) == len(texts)
    assert set(out) == set(texts)
    assert len(batcher) == 0


def test_clients_that_wait_get_equal_shares_of_the_tokens() -> None:
    """However many texts they send, and however long those are."""
    batcher: Batcher[Text] = Batcher(64, 16)
    for client, length, count in [("greedy", 64, 200), ("short", 8, 200), ("long", 32, 200)]:
        for _ in range(count):
            batcher.add(Text(length, client))
    tokens = {"greedy": 0, "short": 0, "long": 0}
    for _ in range(60):
        for text in batcher.next_batch():
            tokens[text.client] += text.length
    assert max(tokens.values()) - min(tokens.values()) <= 2 * 64


def test_a_new_client_is_next_but_does_not_catch_up() -> None:
    batcher: Batcher[Text] = Batcher(10, 16)
    for _ in range(100):
        batcher.add(Text(10, "old"))
    for _ in range(50):
        batcher.next_batch()
    for _ in range(20):
        batcher.add(Text(10, "new"))
    led = [batcher.next_batch()[0].client for _ in range(20)]
    assert led[:2] in (["old", "new"], ["new", "old"])
    assert led.count("new") == 10


def test_a_client_that_comes_back_keeps_what_it_was_served() -> None:
    """Otherwise, one text at a time would jump the queue."""
    batcher: Batcher[Text] = Batcher(10, 16)
    for _ in range(100):
        batcher.add(Text(10, "patient"))
    served = {"patient": 0, "restless": 0}
    for _ in range(60):
        if not any(text.client == "restless" for text in batcher._queues.get("restless", ())):
            batcher.add(Text(10, "restless"))
        served[batcher.next_batch()[0].client] += 1
    assert abs(served["patient"] - served["restless"]) <= 2


def test_a_client_with_many_texts_gets_short_passes_while_others_come() -> None:
    now = 100.0
    batcher: Batcher[Text] = Batcher(64, 16, lambda: now)

    def add(client: str, number: int) -> None:
        for _ in range(number):
            batcher.add(Text(8, client))

    add("greedy", 40)
    assert len(batcher.next_batch()) == 8, "nobody else has come"
    add("polite", 1)
    first = batcher.next_batch()
    assert [text.client for text in first] == ["polite", "greedy"]
    add("polite", 4)
    together = [text.client for text in batcher.next_batch()]
    assert together == ["greedy", "greedy", *["polite"] * 4], "only the greedy one has the limit"
    assert len(batcher.next_batch()) == 2
    now += 1.9
    assert len(batcher.next_batch()) == 2
    now += 0.2
    assert len(batcher.next_batch()) == 8, "the other one has not come for a while"
    add("polite", 1)
    assert len(batcher.next_batch()) == 2
    while len(batcher) > 8:
        assert len(batcher.next_batch()) == 2
    assert len(batcher.next_batch()) == 8, "what waits fits into one batch"


@pytest.mark.parametrize(("passed", "num_texts"), [(2.0, 2), (2.1, 8)])
def test_a_client_has_come_lately_for_two_seconds(passed: float, num_texts: int) -> None:
    now = 100.0
    batcher: Batcher[Text] = Batcher(64, 16, lambda: now)
    for client, number in (("polite", 1), ("greedy", 40)):
        for _ in range(number):
            batcher.add(Text(8, client))
    assert len(batcher.next_batch()) == 2
    now += passed
    assert len(batcher.next_batch()) == num_texts


def test_a_short_pass_has_room_for_a_token() -> None:
    batcher: Batcher[Text] = Batcher(3, 16)
    for client, number in (("polite", 1), ("greedy", 4)):
        for _ in range(number):
            batcher.add(Text(1, client))
    sizes = [len(batch) for batch in batches_of(batcher)]
    assert sizes == [1, 1, 3]


def test_those_who_may_fill_a_pass_come_before_those_who_may_not() -> None:
    """Whatever their names, and although the greedy one came before them."""
    batcher: Batcher[Text] = Batcher(64, 16, lambda: 100.0)
    for client, number in (("due", 1), ("greedy", 40), ("a", 2), ("z", 2)):
        for _ in range(number):
            batcher.add(Text(8, client))
    assert [text.client for text in batcher.next_batch()] == ["due", "a", "a", "z", "z"]


def test_clients_that_have_gone_are_forgotten() -> None:
    now = 0.0
    batcher: Batcher[Text] = Batcher(64, 16, lambda: now)
    for number in range(1000):
        now += 0.1
        batcher.add(Text(8, f"client {number}"))
    assert 0 < len(batcher._came_at) < 30
