"""Drawing on the device against the host's sampler, in memory that stands in for a GPU's."""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import narrow
from maskdial.causal.sampling.device_penalties import MAX_PENALIZED, TokenPenalties
from maskdial.causal.sampling.device_sampler import DeviceSampler
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.processors import process
from maskdial.causal.sampling.sampler import Sample, Sampler
from maskdial.causal.sampling.sampler_graph import MAX_CANDIDATES
from maskdial.causal.sequence import Sequence
from maskdial.engine.philox import Philox
from maskdial.errors import GenerationError, MaskdialError
from maskdial.runtime.logits import DeviceLogits
from maskdial.runtime.logits import Logits as AnyLogits
from maskdial.runtime.session import SessionOptions

Logits = NDArray[np.float32]
MAX_ROWS = 8
VOCABS = (7, 64, 1000, 5000, 49_152)
EOS = 3
DRAW = SamplingParams(do_sample=True)
uniform = Philox().uniform


class WatchedSampler(Sampler):
    """The host's sampler, which records the sequences that it is given."""

    def __init__(self, vocab_size: int, never: frozenset[int] = frozenset()) -> None:
        super().__init__(vocab_size, frozenset({EOS}), never)
        self.given: list[Sequence] = []

    def sample(
        self, logits: AnyLogits, sequences: Iterable[Sequence]
    ) -> list[Sample | MaskdialError]:
        sequences = list(sequences)
        self.given += sequences
        return super().sample(logits, sequences)


@dataclass
class Rig:
    """Logits in a device's memory, and a sampler for them."""

    memory: Any
    vocab: int
    never: frozenset[int] = frozenset()
    host: WatchedSampler = field(init=False)

    def __post_init__(self) -> None:
        self.host = WatchedSampler(self.vocab, self.never)
        self.sampler = DeviceSampler(
            self.memory,
            self.host,
            vocab_size=self.vocab,
            max_rows=MAX_ROWS,
            options=SessionOptions(intra_op_threads=1),
        )
        self._buffer = self.memory.allocate((4 * MAX_ROWS, self.vocab), np.dtype(np.float32))

    def logits(self, values: Logits, rows: SequenceOf[int] | None = None) -> DeviceLogits:
        """Puts values, (num_rows, vocab), on the device."""
        self.memory.peek(self._buffer)[: len(values)] = values
        kept = range(len(values)) if rows is None else rows
        return DeviceLogits(self._buffer, np.array(kept, np.int64), self.memory)

    def sample(
        self,
        values: Logits,
        sequences: SequenceOf[Sequence],
        rows: SequenceOf[int] | None = None,
    ) -> list[Sample | MaskdialError]:
        """Samples on the device."""
        self.host.given.clear()
        return self.sampler.sample(self.logits(values, rows), sequences)


@pytest.fixture(scope="module")
def rigs(device_memory: Callable[..., Any]) -> dict[int, Rig]:
    return {vocab: Rig(device_memory(), vocab) for vocab in VOCABS}


class SilentDetokenizer:
    """Every token is the empty text."""

    special_ids: frozenset[int] = frozenset()

    def decoder(self, prompt_ids: SequenceOf[int]) -> "SilentDetokenizer":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def sequence_of(
    params: SamplingParams,
    prompt: SequenceOf[int] = (1, 5, 5),
    generated: SequenceOf[int] = (),
    seed: int | None = None,
) -> Sequence:
    sequence = Sequence(prompt, replace(params, max_new_tokens=10**6), seed=seed)
    for token_id in generated:
        sequence.accept(
            token_id,
            0.0,
            detokenizer=SilentDetokenizer(),
            eos_token_ids=frozenset(),
            max_length=10**9,
        )
    return sequence


def describe(params: object) -> str:
    """The parameters that differ from the defaults."""
    if not isinstance(params, SamplingParams):
        return str(params)
    values = [(f, getattr(params, f.name)) for f in fields(params)]
    return " ".join(f"{f.name}={value}" for f, value in values if value != f.default) or "greedy"


def make_logits(kind: str, seed: int, rows: int, vocab: int) -> Logits:
    random = np.random.default_rng(seed)
    normal = random.standard_normal((rows, vocab))
    if kind == "peaked":
        normal *= 8
    elif kind == "typical":
        normal *= 3
    elif kind == "flat":
        normal *= 0.01
    elif kind == "huge":
        normal *= 1e5
    elif kind == "ties":  # as a float16 model has, and more so
        normal = np.round(normal * 4) / 2
    elif kind == "with -inf":
        normal *= 3
        normal[random.random((rows, vocab)) < 0.6] = -np.inf
        normal[:, random.integers(vocab)] = 1.0
    return normal.astype(np.float32)


LOGITS = ("peaked", "typical", "flat", "huge", "ties", "with -inf")


def rounding(params: SamplingParams, vocab: int) -> float:
    """The relative error that sums of probabilities may have on the device.

    There the weights come from float32 log-probabilities, which are divided by the temperature. For
    tokens that matter these are at least -log(vocab) - 40 * temperature, and rounded twice.
    """
    return 2.0**-23 * (40 + math.log(vocab) / params.temperature)


def acceptable(logits: Logits, sequence: Sequence, never: frozenset[int] = frozenset()) -> set[int]:
    """The tokens that the host's sampler would draw if its shares had the error of `rounding`."""
    params = sequence.params
    scores = process(logits, sequence, frozenset({EOS}), never)
    by = rounding(params, len(logits))
    u = uniform(sequence.seed, sequence.num_generated)
    tokens = set()
    for of_top_p, of_min_p in product((1 - by, 1.0, 1 + by), repeat=2):
        near = replace(
            params,
            top_p=params.top_p * of_top_p if params.top_p < 1 else 1.0,
            min_p=params.min_p * of_min_p,
        )
        candidates = narrow(scores, scores.max(), near)
        tokens |= {candidates.pick(min(max(u + d, 0.0), 1 - 2**-52)) for d in (-by, 0.0, by)}
    return tokens


def check(
    rig: Rig, values: Logits, sequences: SequenceOf[Sequence], rows: SequenceOf[int] | None = None
) -> int:
    """Compares the samples with the host's; returns how many differ because of rounding."""
    samples = rig.sample(values, sequences, rows)
    on_host = list(rig.host.given)
    own = values if rows is None else values[list(rows)]
    num_different = 0
    for row, sequence, sample, wanted in zip(
        own, sequences, samples, Sampler.sample(rig.host, own, sequences), strict=True
    ):
        assert isinstance(sample, Sample)
        assert isinstance(wanted, Sample)
        if any(sequence is each for each in on_host):
            assert sample == wanted
            continue
        if sample.token_id != wanted.token_id:
            assert not sequence.params.greedy
            assert sample.token_id in acceptable(row, sequence, rig.host.never)
            num_different += 1
            shift = np.float64(row[sample.token_id]) - np.float64(row[wanted.token_id])
            wanted = replace(wanted, logprob=wanted.logprob + float(shift))
        # A device adds up float32. Of 49,152 equal weights in eight lanes (AVX2), all sums round
        # the same way, which was 1.6e-5.
        assert sample.logprob == pytest.approx(wanted.logprob, rel=1e-6, abs=4e-5)
    return num_different


params_of_a_row = st.builds(
    SamplingParams,
    do_sample=st.sampled_from([True, True, True, False]),
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 254, 255, 256, 257, 4999]),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.6]),
    penalty_last_n=st.sampled_from([None, None, -1, 0, 1, 3, 99]),
    logit_bias=st.sampled_from([(), (), ((2, 3.0),)]),
    min_new_tokens=st.sampled_from([0, 0, 3]),
    top_n_tokens=st.sampled_from([0, 0, 2]),
)
batches = st.lists(
    st.tuples(
        params_of_a_row,
        st.lists(st.integers(0, 6), max_size=6),
        st.integers(0, 2**64 - 1),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    kind=st.sampled_from(LOGITS),
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 2**32),
    batch=batches,
)
def test_any_batch_is_drawn_as_on_the_host(
    rigs: dict[int, Rig],
    kind: str,
    vocab: int,
    seed: int,
    batch: list[tuple[SamplingParams, list[int], int]],
) -> None:
    values = make_logits(kind, seed, len(batch), vocab)
    sequences = [
        sequence_of(params, generated=generated, seed=own_seed)
        for params, generated, own_seed in batch
    ]
    assert check(rigs[vocab], values, sequences) <= 1


KINDS = [
    DRAW,
    replace(DRAW, temperature=0.5),
    replace(DRAW, top_k=50),
    replace(DRAW, top_p=0.9),
    replace(DRAW, min_p=0.05),
    replace(DRAW, temperature=0.7, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peaked", "typical", "flat", "ties"])
@pytest.mark.parametrize("vocab", [1000, 49_152])
def test_rounding_hardly_ever_decides(rigs: dict[int, Rig], kind: str, vocab: int) -> None:
    """At most once in a thousand draws; flat logits have the most tokens that are close."""
    num_different = 0
    for seed in range(20):
        values = make_logits(kind, seed, MAX_ROWS, vocab)
        for i, params in enumerate(KINDS):
            sequences = [
                sequence_of(params, seed=seed * 1000 + i * 10 + row) for row in range(MAX_ROWS)
            ]
            num_different += check(rigs[vocab], values, sequences)
    assert num_different <= 1


@pytest.mark.parametrize("params", [SamplingParams(), *KINDS], ids=describe)
def test_a_batch_of_one_kind_stays_on_the_device(
    rigs: dict[int, Rig], monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """It takes one wait, and copies less than one row of logits."""
    rig = rigs[49_152]
    values = make_logits("peaked", 5, 4, 49_152)
    num_waits = rig.memory.num_synchronized
    copied: list[int] = []
    copy = rig.memory.copy

    def watch(*arguments: int) -> None:
        copied.append(arguments[4] * arguments[5])
        copy(*arguments)

    monkeypatch.setattr(rig.memory, "copy", watch)
    check(rig, values, [sequence_of(params, seed=row) for row in range(4)])
    assert rig.host.given == []
    assert rig.memory.num_synchronized == num_waits + 1
    assert sum(copied) < values[0].nbytes


class AnyGrammar:
    """A grammar that allows the even tokens."""

    finished = False
    ready = True
    forced = ()

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        pass

    def num_allowed(self, token_ids: object) -> int:
        return 0

    def wait(self, seconds: float) -> None:
        pass

    def allowed(self) -> NDArray[np.bool_]:
        even: NDArray[np.bool_] = np.arange(self._vocab) % 2 == 0
        return even

    def accept(self, token_id: int) -> None:
        pass


def test_the_host_draws_what_the_device_cannot(rigs: dict[int, Rig]) -> None:
    rig = rigs[1000]
    values = make_logits("typical", 1, 8, 1000)
    for_host = [
        Sequence([1], DRAW, seed=1, grammar=AnyGrammar(1000)),
        sequence_of(replace(DRAW, logit_bias=((4, 9.0),))),
        sequence_of(replace(DRAW, typical_p=0.5)),
        sequence_of(SamplingParams(top_n_tokens=3)),
        sequence_of(SamplingParams(min_new_tokens=2), generated=[4]),
    ]
    for_device = [
        sequence_of(SamplingParams(typical_p=0.5)),
        sequence_of(replace(DRAW, min_new_tokens=2, top_k=5), generated=[4, 4]),
        sequence_of(DRAW),
    ]
    sequences = [s for pair in zip(for_host, for_device, strict=False) for s in pair] + for_host[3:]
    check(rig, values, sequences)
    assert rig.host.given == for_host


def test_bans_and_forced_tokens_are_for_the_host(rigs: dict[int, Rig]) -> None:
    """The best token is 4 in each row, and each request rules it out."""
    rig = rigs[64]
    values = np.zeros((6, 64), np.float32)
    values[:, 4] = 9
    values[:, 6] = 5

    def end(**settings: Any) -> Sequence:
        return Sequence([1, 5], SamplingParams(max_new_tokens=1, **settings))

    sequences = [
        sequence_of(SamplingParams(banned=((4,), (2, 3)))),
        sequence_of(SamplingParams(banned=((5, 4),))),
        sequence_of(SamplingParams(no_repeat_ngram_size=2), prompt=(5, 4, 5)),
        Sequence([5], SamplingParams(no_source_ngram_size=2), source_ids=[5, 4]),
        sequence_of(SamplingParams(forced_first=6)),
        end(forced_last=(6, 7)),
    ]
    samples = rig.sample(values, sequences)
    assert [getattr(sample, "token_id", sample) for sample in samples] == [6] * 6
    assert rig.host.given == sequences


def test_tokens_are_forced_at_the_ends_of_a_text_only(rigs: dict[int, Rig]) -> None:
    rig = rigs[64]
    within = sequence_of(SamplingParams(forced_first=6, forced_last=(6,)), generated=[6])
    check(rig, make_logits("typical", 2, 1, 64), [within])
    assert rig.host.given == []


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (replace(DRAW, top_k=MAX_CANDIDATES), "typical"),
        (replace(DRAW, top_k=900), "typical"),
        (replace(DRAW, top_p=0.99), "flat"),
        (replace(DRAW, min_p=0.9), "flat"),
        (replace(DRAW, top_k=20), "all equal"),
        (replace(DRAW, top_k=20, top_p=0.5), "all equal"),
        (SamplingParams(), "all equal"),
    ],
    ids=describe,
)
def test_the_host_draws_from_more_candidates(
    rigs: dict[int, Rig], params: SamplingParams, kind: str
) -> None:
    rig = rigs[1000]
    values = make_logits(kind, 2, 3, 1000) if kind != "all equal" else np.zeros((3, 1000), "f")
    sequences = [sequence_of(params, seed=row) for row in range(3)]
    check(rig, values, sequences)
    assert rig.host.given == (sequences if not params.greedy else [])


def test_the_most_candidates(rigs: dict[int, Rig]) -> None:
    """The largest top-k whose ties with the next token the device can see."""
    values = make_logits("flat", 3, 1, 1000)
    sequence = sequence_of(replace(DRAW, top_k=MAX_CANDIDATES - 1))
    check(rigs[1000], values, [sequence])
    assert rigs[1000].host.given == []


def test_tokens_as_likely_as_the_kth_stay(rigs: dict[int, Rig]) -> None:
    values = np.zeros((1, 1000), np.float32)
    values[0, 900], values[0, [7, 300, 500]] = 2, 1
    drawn = {draw(rigs[1000], values, replace(DRAW, top_k=2), seed) for seed in range(60)}
    assert drawn == {7, 300, 500, 900}


def test_equally_likely_tokens_enter_the_nucleus_in_order(rigs: dict[int, Rig]) -> None:
    values = np.full((1, 1000), -50, np.float32)
    values[0, [900, 5, 700, 20]] = 1
    drawn = {draw(rigs[1000], values, replace(DRAW, top_p=0.7), seed) for seed in range(60)}
    assert drawn == {5, 20, 700}


@pytest.mark.parametrize("share", [0.0, 1e-9])
def test_the_likeliest_token_is_always_in_the_nucleus(rigs: dict[int, Rig], share: float) -> None:
    values = make_logits("flat", 4, 1, 1000)
    assert draw(rigs[1000], values, replace(DRAW, top_p=share)) == values.argmax()


def draw(rig: Rig, values: Logits, params: SamplingParams, seed: int | None = None) -> int:
    """A token from the device itself."""
    (sample,) = rig.sample(values, [sequence_of(params, seed=seed)])
    assert isinstance(sample, Sample)
    assert rig.host.given == []
    return sample.token_id


def test_the_first_of_the_likeliest_is_greedy(rigs: dict[int, Rig]) -> None:
    values = np.zeros((1, 5000), np.float32)
    values[0, [4000, 333, 2000]] = 4
    assert draw(rigs[5000], values, SamplingParams()) == 333


@pytest.mark.parametrize(
    "rows",
    [
        [0, 2, 3],
        [3],
        [3, 0, 2, 1],
        [1, 1, 1, 2],
        list(range(20))[::-3],
        list(range(MAX_ROWS)),
        list(range(MAX_ROWS + 1)),
    ],
)
def test_any_rows_of_a_pass(rigs: dict[int, Rig], rows: list[int]) -> None:
    rig = rigs[5000]
    values = make_logits("peaked", 6, 20, 5000)
    choices = [SamplingParams(), replace(DRAW, top_k=9), DRAW, KINDS[-1]]
    for shift in range(4):
        params = [choices[(i + shift) % 4] for i in range(len(rows))]
        check(rig, values, [sequence_of(each, seed=4) for each in params], rows)
        assert rig.host.given == []
    check(rig, values, [sequence_of(DRAW) for _ in rows], rows)


def test_rows_left_out_do_not_matter(rigs: dict[int, Rig]) -> None:
    values = make_logits("typical", 7, 3, 5000)
    values[1] = np.nan
    for params in (SamplingParams(), DRAW, replace(DRAW, top_p=0.5)):
        check(rigs[5000], values, [sequence_of(params), sequence_of(params)], [0, 2])


@pytest.mark.parametrize("params", [SamplingParams(), *KINDS], ids=describe)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_logits_that_are_not_finite_fail_their_own_row_only(
    rigs: dict[int, Rig], params: SamplingParams, value: float, everywhere: bool
) -> None:
    rig = rigs[1000]
    values = make_logits("peaked", 8, 3, 1000)
    values[1, slice(None) if everywhere else 77] = value
    first, failed, last = (sequence_of(params, seed=9) for _ in range(3))
    check(rig, values, [first, last], [0, 2])
    good = rig.sample(values, [first, last], [0, 2])
    samples = rig.sample(values, [first, failed, last])
    assert isinstance(samples[1], Sample)
    assert math.isnan(samples[1].logprob)
    assert [samples[0], samples[2]] == good
    assert rig.host.given == [failed]


@pytest.mark.parametrize("params", [SamplingParams(), DRAW, replace(DRAW, top_k=4)], ids=describe)
def test_penalties_that_leave_no_finite_score_are_an_error(
    rigs: dict[int, Rig], params: SamplingParams
) -> None:
    """A huge score divided by next to nothing is infinite."""
    values = make_logits("typical", 9, 2, 1000)
    values[0, 5] = 1e30
    sequences = [sequence_of(replace(params, repetition_penalty=p)) for p in (1e-30, 1.0)]
    with np.errstate(over="ignore"):
        error, sample = rigs[1000].sample(values, sequences)
    assert isinstance(error, GenerationError)
    assert "no token can be chosen" in error.message
    assert isinstance(sample, Sample)


@pytest.mark.parametrize(
    ("last_n", "expected"),
    [
        (None, {5: 0.0, 7: 2.5, 9: 1.5}),
        (-1, {5: 1.5, 7: 2.5, 9: 3.5}),
        (4, {7: 2.5, 9: 2.5}),
        (1, {7: 1.5}),
        (0, None),
    ],
)
def test_penalties_may_be_for_the_last_tokens_only(
    last_n: int | None, expected: dict[int, float] | None
) -> None:
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5, penalty_last_n=last_n
    )
    found = TokenPenalties.of(sequence_of(params, [9, 5, 9], generated=[7, 9, 7]))
    told = found and dict(zip(found.token_ids.tolist(), found.subtracted.tolist(), strict=True))
    assert told == expected


def test_a_row_without_penalized_tokens_stands_beside_others(rigs: dict[int, Rig]) -> None:
    """Its repetition penalty, which is for no token, is not for the first of the vocabulary."""
    values = np.zeros((2, 7), np.float32)
    values[:, 0], values[:, 4] = 7.1, 7.0
    params = SamplingParams(repetition_penalty=1.3)
    rows = [params, replace(params, penalty_last_n=0)]
    assert check(rigs[7], values, [sequence_of(each) for each in rows]) == 0


@pytest.mark.parametrize("penalty", [1.5, 2.0])
def test_any_penalty_is_for_the_prompt_as_well(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    penalties = TokenPenalties.of(sequence_of(params, [9, 5, 9], generated=[7]))
    assert penalties is not None
    assert penalties.token_ids.tolist() == [5, 7, 9]
    assert penalties.subtracted.tolist() == [0.0] * 3
    assert penalties.subtracted.dtype == np.float32
    assert TokenPenalties.of(sequence_of(SamplingParams(), [9, 5, 9], generated=[7])) is None


@pytest.mark.parametrize("num_tokens", [63, 64, 65, MAX_PENALIZED, MAX_PENALIZED + 1])
def test_penalties_of_long_texts(rigs: dict[int, Rig], num_tokens: int) -> None:
    rig = rigs[5000]
    values = make_logits("typical", 10, 3, 5000)
    prompt = np.random.default_rng(1).permutation(5000)[:num_tokens].tolist()
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    long = sequence_of(params, prompt, generated=prompt[:3] * 2, seed=2)
    check(rig, values, [sequence_of(DRAW), long, sequence_of(params, [3])])
    assert rig.host.given == ([long] if num_tokens > MAX_PENALIZED else [])


def test_logits_on_the_host_are_sampled_there(rigs: dict[int, Rig]) -> None:
    rig = rigs[1000]
    values = make_logits("typical", 11, 2, 1000)
    sequences = [sequence_of(DRAW), sequence_of(SamplingParams())]
    rig.host.given.clear()
    samples = rig.sampler.sample(values, sequences)
    assert rig.host.given == sequences
    assert samples == Sampler.sample(rig.host, values, sequences)


def test_no_rows_are_no_samples(rigs: dict[int, Rig]) -> None:
    assert rigs[1000].sampler.sample(rigs[1000].logits(np.zeros((1, 1000), "f"), []), []) == []


@pytest.mark.parametrize("vocab", [7, 64, 5000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        DRAW,
        replace(DRAW, top_k=3),
        replace(DRAW, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
    ],
    ids=describe,
)
def test_tokens_without_text_are_not_drawn(
    device_memory: Callable[..., Any], params: SamplingParams, vocab: int
) -> None:
    never = frozenset({1, 6, vocab + 9})
    rig = Rig(device_memory(), vocab, never)
    for seed in range(10):
        values = make_logits("peaked", seed, MAX_ROWS, vocab)
        values[:, 6] = values.max() + 1
        sequences = [
            sequence_of(params, generated=(6, 1, 2), seed=seed * MAX_ROWS + row)
            for row in range(MAX_ROWS)
        ]
        check(rig, values, sequences)
        drawn = {s.token_id for s in rig.sample(values, sequences) if isinstance(s, Sample)}
        assert not drawn & never
    assert not rig.host.given  # they do not send a row to the host
