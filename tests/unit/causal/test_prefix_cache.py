"""The prefix cache, against a plain dictionary of prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from maskdial.causal.prefix_cache import PrefixCache, default_bytes, snapshot_blocks

BLOCK_BYTES = 8


def new_cache(
    max_blocks: int = 100, block_tokens: int = 2, model: str = "m", *, shared: bool = False
) -> PrefixCache:
    max_bytes = max_blocks * BLOCK_BYTES
    return PrefixCache(model=model, block_tokens=block_tokens, max_bytes=max_bytes, shared=shared)


def new_block(value: int = 0) -> NDArray[np.int64]:
    block = np.array([value])
    assert block.nbytes == BLOCK_BYTES
    return block


def keys_of(cache: PrefixCache, tokens: range | list[int], salt: str = "") -> tuple[bytes, ...]:
    return cache.keys(np.array(tokens, np.int64), salt)


def put_all(cache: PrefixCache, keys: tuple[bytes, ...], first_value: int = 0) -> None:
    for i, key in enumerate(keys):
        cache.put(key, new_block(first_value + i))


def held(cache: PrefixCache, keys: tuple[bytes, ...]) -> list[bool]:
    return [key in cache for key in keys]


def test_only_whole_blocks_have_keys() -> None:
    cache = new_cache(block_tokens=4)
    assert [len(keys_of(cache, range(n))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_longer_prompt_begins_with_the_keys_of_its_beginning() -> None:
    cache = new_cache(block_tokens=4)
    keys = keys_of(cache, range(20))
    assert keys_of(cache, range(14)) == keys[:3]
    assert keys_of(cache, [*range(8), 99, *range(9, 20)])[:3] != keys[:3]
    assert keys_of(cache, [*range(8), 99, *range(9, 20)])[:2] == keys[:2]
    assert keys_of(cache, [99, *range(1, 20)])[4] != keys[4]


def test_keys_do_not_depend_on_how_the_tokens_lie_in_memory() -> None:
    cache = new_cache()
    tokens = np.arange(40, dtype=np.int64)
    assert cache.keys(tokens[::2], "") == cache.keys(tokens[::2].copy(), "")


def test_the_same_block_in_another_place_is_another_block() -> None:
    assert len(set(keys_of(new_cache(), [1, 2] * 50))) == 50


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("m", "a"), ("m", "b")),
        (("m", ""), ("n", "")),
        (("m", "a"), ("ma", "")),
        (("m1", "2"), ("m", "12")),
        (("m", "\ud800"), ("m", "\udfff")),
    ],
)
def test_models_and_salts_share_nothing(one: tuple[str, str], other: tuple[str, str]) -> None:
    ours, theirs = (
        keys_of(new_cache(model=model), range(10), salt) for model, salt in (one, other)
    )
    assert len(ours) == len(theirs) == 5
    assert not set(ours) & set(theirs)


@pytest.mark.parametrize("one", ["alice", "ali", ""])
def test_owners_share_nothing_unless_the_cache_is_shared(one: str) -> None:
    """Whatever salts they choose."""
    tokens = np.arange(10, dtype=np.int64)
    for shared in (False, True):
        cache = new_cache(shared=shared)
        ours = {
            salt: set(cache.keys(tokens, salt, one)) for salt in ("", "bob", "cebob", "alicebob")
        }
        theirs = set(cache.keys(tokens, "", "bob"))
        assert bool(theirs & ours[""]) == shared
        assert not theirs & (ours["bob"] | ours["cebob"] | ours["alicebob"])


def test_another_salt_finds_nothing() -> None:
    cache = new_cache()
    put_all(cache, keys_of(cache, range(6), "tenant a"))
    assert len(cache.match(keys_of(cache, range(6), "tenant a"))) == 3
    assert cache.match(keys_of(cache, range(6), "tenant b")) == ()


def test_a_match_is_the_longest_beginning() -> None:
    cache = new_cache()
    keys = keys_of(cache, range(8))
    put_all(cache, keys[:3], first_value=10)
    assert [int(block.data[0]) for block in cache.match(keys)] == [10, 11, 12]
    assert [int(block.data[0]) for block in cache.match(keys[:2])] == [10, 11]
    assert cache.match(()) == ()


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    cache = new_cache(max_blocks=4)
    old, new = keys_of(cache, range(8)), keys_of(cache, range(50, 56))
    put_all(cache, old)
    for i, left in enumerate([3, 2, 1]):
        cache.put(new[i], new_block())
        assert held(cache, old) == [True] * left + [False] * (4 - left)
    assert held(cache, new) == [True] * 3


def test_a_use_keeps_the_shared_beginning_and_not_the_other_end() -> None:
    cache = new_cache(max_blocks=5)
    one, other = keys_of(cache, [0, 0, 1, 1, 2, 2]), keys_of(cache, [0, 0, 1, 1, 3, 3])
    stranger = keys_of(cache, [9, 9])
    put_all(cache, one)
    put_all(cache, stranger)
    put_all(cache, other)
    assert len(cache.match(one[:2])) == 2
    put_all(cache, keys_of(cache, [8, 8]))
    assert one[2] not in cache
    assert held(cache, (*other, *stranger)) == [True] * 4


def test_a_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = new_cache(max_blocks=3)
    put_all(cache, keys_of(cache, [70, 71]))
    keys = keys_of(cache, range(12))
    put_all(cache, keys)
    assert held(cache, keys) == [True] * 3 + [False] * 3
    assert cache.num_bytes == 3 * BLOCK_BYTES


def test_a_block_whose_beginning_is_missing_is_not_held() -> None:
    cache = new_cache()
    keys = keys_of(cache, range(6))
    cache.put(keys[0], new_block())
    cache.put(keys[2], new_block())
    assert held(cache, keys) == [True, False, False]


def test_a_block_that_does_not_fit_evicts_nothing() -> None:
    cache = new_cache(max_blocks=2)
    one, other = keys_of(cache, [1, 1]), keys_of(cache, [2, 2])
    cache.put(one[0], new_block())
    cache.put(other[0], np.zeros(3))
    assert held(cache, one + other) == [True, False]
    assert cache.num_bytes == BLOCK_BYTES


def test_a_block_that_is_held_stays_as_it_is() -> None:
    cache = new_cache()
    keys = keys_of(cache, [1, 1])
    cache.put(keys[0], new_block(1))
    cache.put(keys[0], new_block(2))
    (block,) = cache.match(keys)
    assert block.data[0] == 1
    assert cache.num_bytes == BLOCK_BYTES
    with pytest.raises(ValueError, match="read-only"):
        block.data[0] = 3


def test_a_prefix_ends_where_states_are_kept() -> None:
    cache = PrefixCache(model="m", block_tokens=2, max_bytes=10**6, snapshot_blocks=1)
    keys = keys_of(cache, range(10))
    put_all(cache, keys)
    assert cache.match(keys) == ()
    states = np.ones(4, np.float32)
    cache.put(keys[2], new_block(), states)
    cache.put(keys[0], new_block(), np.zeros(4, np.float32))
    found = cache.match(keys)
    assert len(found) == 3
    assert found[-1].states is states
    assert len(cache.match(keys[:2])) == 1
    assert [cache.has_states(key) for key in keys] == [True, False, True, False, False]
    assert cache.num_bytes == 5 * BLOCK_BYTES + 2 * states.nbytes
    with pytest.raises(ValueError, match="read-only"):
        states[0] = 2


def test_states_count_as_bytes_and_go_with_their_block() -> None:
    states = np.zeros(BLOCK_BYTES // 4, np.float32)
    cache = PrefixCache(model="m", block_tokens=2, max_bytes=4 * BLOCK_BYTES, snapshot_blocks=1)
    one, other = keys_of(cache, [1, 1, 1, 1]), keys_of(cache, [2, 2, 2, 2])
    put_all(cache, one)
    cache.put(one[1], new_block(), states.copy())
    assert cache.num_bytes == 3 * BLOCK_BYTES
    put_all(cache, other)
    assert held(cache, one + other) == [True, False, True, True]
    cache.put(other[1], new_block(), states.copy())
    assert cache.num_bytes == 4 * BLOCK_BYTES
    assert cache.match(one) == ()
    assert len(cache.match(other)) == 2


def states_of(value: float = 0.0) -> NDArray[np.float32]:
    return np.full(BLOCK_BYTES // 4, value, np.float32)


def test_states_of_earlier_turns_age_and_go_before_blocks() -> None:
    """Each turn goes on from the last one's states; those where the instructions end stay in use,
    and a conversation that nobody goes on with goes before either.
    """
    cache = PrefixCache(model="m", block_tokens=2, max_bytes=13 * BLOCK_BYTES, snapshot_blocks=100)
    idle = keys_of(cache, [9] * 4)
    put_all(cache, idle)
    keys = keys_of(cache, range(16))
    for turn in range(2, 8):
        snapshots = [keys[0], keys[turn]]
        cache.match(keys[:turn], snapshots)
        for index in range(turn + 1):
            states = states_of(index) if index in (0, turn) else None
            cache.put(keys[index], new_block(index), states, snapshots=snapshots)
    assert held(cache, idle) == [False, False]
    assert held(cache, keys) == [True] * 8
    assert cache.num_bytes == 13 * BLOCK_BYTES
    kept = [index for index, key in enumerate(keys) if cache.has_states(key)]
    assert kept == [0, 4, 5, 6, 7]  # those of turns 2 and 3 have gone


def test_of_a_prompt_without_room_the_beginning_is_kept_with_its_states() -> None:
    cache = PrefixCache(model="m", block_tokens=2, max_bytes=6 * BLOCK_BYTES, snapshot_blocks=2)
    keys = keys_of(cache, range(40))
    snapshots = cache.snapshots(len(keys), ())
    digests = [keys[number - 1] for number in sorted(snapshots)]
    for index, key in enumerate(keys):
        states = states_of() if index + 1 in snapshots else None
        cache.put(key, new_block(index), states, snapshots=digests)
    assert len(cache.match(keys)) == 4
    assert cache.num_bytes <= 6 * BLOCK_BYTES


def test_what_was_restored_is_one_use() -> None:
    """It pushes out what is older, and nothing of its own."""
    cache = PrefixCache(model="m", block_tokens=2, max_bytes=6 * BLOCK_BYTES, snapshot_blocks=9)
    old, keys = keys_of(cache, [9] * 8), keys_of(cache, range(10))
    put_all(cache, old)
    cache.restore([(key, new_block(i)) for i, key in enumerate(keys)], (keys[-1], states_of()))
    assert held(cache, old) == [False] * 4
    found = cache.match(keys)
    assert [block.data[0] for block in found] == [*range(5)]
    assert [block.take_restored() for block in found] == [1] * 5
    cache.restore([(keys_of(cache, [8] * 4)[1], new_block())])  # nothing leads there
    assert held(cache, keys) == [True] * 5


def test_where_states_are_kept() -> None:
    cache = PrefixCache(model="m", block_tokens=4, max_bytes=1, snapshot_blocks=10)
    assert cache.snapshots(0, [5]) == frozenset()
    assert cache.snapshots(7, []) == {7}
    assert cache.snapshots(7, [3, 4, 9, 11, 28, 99]) == {1, 2, 7}
    assert cache.snapshots(25, [90]) == {10, 20, 22, 25}
    assert new_cache().snapshots(25, [90]) == frozenset()


@pytest.mark.parametrize(
    ("states", "block", "expected"),
    [(0, 100, 0), (100, 100, 1), (101, 100, 2), (5, 100, 1), (10**9, 100, 64), (10, 0, 64)],
)
def test_snapshots_weigh_no_more_than_blocks(states: int, block: int, expected: int) -> None:
    assert snapshot_blocks(states, block, 64) == expected


def test_states_too_large_for_the_cache_are_left_out() -> None:
    cache = PrefixCache(model="m", block_tokens=2, max_bytes=BLOCK_BYTES, snapshot_blocks=1)
    keys = keys_of(cache, range(2))
    cache.put(keys[0], new_block(), np.zeros(1, np.float32))
    assert held(cache, keys) == [True]
    assert cache.num_bytes == BLOCK_BYTES
    assert cache.match(keys) == ()


def test_without_room_nothing_is_ever_held() -> None:
    cache = new_cache(max_blocks=0)
    keys = keys_of(cache, range(6))
    put_all(cache, keys)
    assert held(cache, keys) == [False] * 3
    assert cache.match(keys) == ()
    assert cache.num_bytes == 0


@pytest.mark.parametrize(
    ("context", "free", "mebibytes"),
    [
        (100, 64_000, 512),
        (2_000, 64_000, 2_000),  # an agent's conversation with a model of four billion weights
        (17_000, 20_000, 5_000),
        (17_000, 1_000, 512),  # of which the server takes as much as is free, and says so
        (17_000, None, 512),
    ],
)
def test_where_no_size_is_given_a_whole_context_fits(
    context: int, free: int | None, mebibytes: int
) -> None:
    size = default_bytes(context * 2**20, None if free is None else free * 2**20)
    assert size == mebibytes * 2**20


Prefix = tuple[str, tuple[int, ...]]


class NaiveCache:
    """Whole prefixes in a dictionary, each with the time of its last use."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.blocks: dict[Prefix, NDArray[np.int64]] = {}
        self.used_at: dict[Prefix, int] = {}
        self.time = 0

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    def match(self, prefixes: list[Prefix]) -> list[NDArray[np.int64]]:
        self.time += 1
        found = []
        for prefix in prefixes:
            if prefix not in self.blocks:
                break
            self.used_at[prefix] = self.time
            found.append(self.blocks[prefix])
        return found

    def put(self, prefixes: list[Prefix], block: NDArray[np.int64]) -> None:
        *before, prefix = prefixes
        if any(earlier not in self.blocks for earlier in before):
            return
        if prefix in self.blocks:
            self.match(prefixes)
            return
        if block.nbytes > self.max_bytes:
            return
        self.blocks[prefix] = block
        self.match(prefixes)
        # Of blocks that were last used together, the one with most tokens before it goes first.
        while self.num_bytes > self.max_bytes:
            oldest = min(self.blocks, key=lambda p: (self.used_at[p], -len(p[1])))
            del self.blocks[oldest]


BLOCK_TOKENS = 2
chains = st.lists(st.integers(0, 1), min_size=0, max_size=9)
salts = st.sampled_from(["", "a"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("match"), salts, chains, st.just([])),
        st.tuples(st.just("put"), salts, chains, st.lists(st.integers(1, 3), min_size=4)),
        st.tuples(st.just("put last"), salts, chains, st.lists(st.integers(1, 3), min_size=1)),
    ),
    max_size=40,
)


@given(operations, st.integers(0, 12 * BLOCK_BYTES))
def test_like_a_dictionary_of_prefixes(
    operations: list[tuple[str, str, list[int], list[int]]], max_bytes: int
) -> None:
    cache = PrefixCache(model="m", block_tokens=BLOCK_TOKENS, max_bytes=max_bytes)
    naive = NaiveCache(max_bytes)
    seen: dict[Prefix, bytes] = {}
    num_put = 0
    for name, salt, tokens, sizes in operations:
        keys = cache.keys(np.array(tokens, np.int64), salt)
        prefixes: list[Prefix] = [
            (salt, tuple(tokens[: BLOCK_TOKENS * (i + 1)])) for i in range(len(keys))
        ]
        for prefix, key in zip(prefixes, keys, strict=True):
            assert seen.setdefault(prefix, key) == key
        if name == "match":
            found = cache.match(keys)
            expected = naive.match(prefixes)
            assert len(found) == len(expected)
            assert all(a.data is b for a, b in zip(found, expected, strict=True))
        else:
            first = 0 if name == "put" else max(len(keys) - 1, 0)
            for i, size in zip(range(first, len(keys)), sizes, strict=False):
                num_put += 1
                block = np.full(size, num_put)
                cache.put(keys[i], block)
                naive.put(prefixes[: i + 1], block)
        assert len(set(seen.values())) == len(seen)
        assert {prefix for prefix, key in seen.items() if key in cache} == naive.blocks.keys()
        assert cache.num_bytes == naive.num_bytes <= max_bytes
        for salt, beginning in naive.blocks:
            before = beginning[:-BLOCK_TOKENS]
            assert not before or (salt, before) in naive.blocks
