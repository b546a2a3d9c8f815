"""The sampler against a plain float64 implementation of the same definitions."""

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from maskdial.causal.events import PromptLogprob
from maskdial.causal.sampling.candidates import Candidates, narrow
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.processors import process
from maskdial.causal.sampling.sampler import Sample, Sampler, prompt_logprobs
from maskdial.causal.sequence import Constraint, Sequence
from maskdial.engine.philox import Philox
from maskdial.errors import GenerationError, MaskdialError, ValidationError
from maskdial.runtime.logits import SummarizedLogits

VOCAB = 1000
uniform = Philox().uniform
EOS = 7


class Mask:
    """A grammar that always allows the same tokens."""

    finished = False
    ready = True
    forced = ()

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self._allowed = allowed

    @classmethod
    def of(cls, *token_ids: int, vocab: int = VOCAB) -> "Mask":
        allowed = np.zeros(vocab, np.bool_)
        allowed[list(token_ids)] = True
        return cls(allowed)

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        pass

    def num_allowed(self, token_ids: object) -> int:
        return 0

    def wait(self, seconds: float) -> None:
        pass

    def allowed(self) -> NDArray[np.bool_]:
        return self._allowed

    def accept(self, token_id: int) -> None:
        pass


class BrokenGrammar(Mask):
    """A grammar that fails when it is asked."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def allowed(self) -> NDArray[np.bool_]:
        raise self._error


class SilentDetokenizer:
    """Every token is the empty text."""

    special_ids: frozenset[int] = frozenset()

    def decoder(self, prompt_ids: SequenceOf[int]) -> "SilentDetokenizer":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def describe(params: SamplingParams) -> str:
    """The parameters that differ from the defaults."""
    values = [(field, getattr(params, field.name)) for field in fields(params)]
    return " ".join(f"{f.name}={value}" for f, value in values if value != f.default)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


def reference_scores(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
    """The scores by which a token is chosen, before the temperature."""
    params, scores = sequence.params, logits.astype(np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    penalized, counted = sequence.token_ids.tolist(), sequence.generated_ids.tolist()
    if params.penalty_last_n is not None:
        num_left_out = len(penalized) - params.penalty_last_n
        if params.penalty_last_n >= 0:
            penalized = penalized[max(num_left_out, 0) :]
        counted = penalized
    for token in set(penalized):
        factor = params.repetition_penalty
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    for token, count in Counter(counted).items():
        scores[token] -= count * params.frequency_penalty + params.presence_penalty
    if sequence.grammar is not None:
        scores[~sequence.grammar.allowed()] = -np.inf
    if sequence.num_generated < params.min_new_tokens:
        held = scores.copy()
        held[[t for t in {EOS} | params.stop_token_ids if t < len(scores)]] = -np.inf
        if held.max() > -np.inf:
            scores = held
    return scores


def reference(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
    """The definitions, one by one: it sorts everything, in float64."""
    params = sequence.params
    scores = reference_scores(logits, sequence) / params.temperature
    if params.top_k:
        kth = np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
        scores[scores < kth] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(softmax(scores)[order]) - softmax(scores)[order]
        dropped = before >= params.top_p
        dropped[0] = False
        scores[order[dropped]] = -np.inf
    scores[softmax(scores) < params.min_p * softmax(scores).max()] = -np.inf
    if params.typical_p < 1:
        p = softmax(scores)
        left = np.flatnonzero(p)
        entropy = -np.sum(p[left] * np.log(p[left]))
        distance = np.full(len(p), np.inf)
        distance[left] = np.abs(-np.log(p[left]) - entropy)
        order = np.argsort(distance, kind="stable")
        reached = min(int(np.sum(np.cumsum(p[order]) < params.typical_p)), len(order) - 1)
        scores[distance > distance[order[reached]]] = -np.inf
    return softmax(scores)


def random_logits(seed: int, n: int = 1, vocab: int = VOCAB) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * 3).astype(np.float32)


def sample_row(one: Sampler, logits: NDArray[np.float32], sequence: Sequence) -> Sample:
    """The sample of a sequence that is alone."""
    (sample,) = one.sample(logits[None], [sequence])
    if isinstance(sample, MaskdialError):
        raise sample
    return sample


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, frozenset({EOS, vocab + 5}))


def distribution(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
    """The probabilities that the next token is drawn with, float64 (vocab_size,)."""
    scores = process(logits, sequence, frozenset({EOS}))
    probabilities = np.zeros(len(scores))
    if sequence.params.greedy:
        probabilities[scores.argmax()] = 1
        return probabilities
    candidates = narrow(scores, scores.max(), sequence.params)
    drawn = slice(None) if candidates.token_ids is None else candidates.token_ids
    probabilities[drawn] = candidates.weights
    probabilities /= probabilities.sum()
    return probabilities


def sequence_of(
    params: SamplingParams,
    prompt: SequenceOf[int] = (1, 5, 5, 9),
    generated: SequenceOf[int] = (),
    grammar: Constraint | None = None,
    seed: int | None = None,
) -> Sequence:
    # Nothing ends the sequence while its tokens are generated here.
    endless = replace(params, max_new_tokens=10**6)
    sequence = Sequence(prompt, endless, grammar=grammar, seed=seed)
    for token_id in generated:
        sequence.accept(
            token_id,
            0.0,
            detokenizer=SilentDetokenizer(),
            eos_token_ids=frozenset(),
            max_length=10**9,
        )
    return sequence


DRAW = SamplingParams(do_sample=True)
NARROWED = [
    DRAW,
    replace(DRAW, temperature=0.3),
    replace(DRAW, temperature=2.5),
    replace(DRAW, top_k=1),
    replace(DRAW, top_k=40),
    replace(DRAW, top_k=5000),
    replace(DRAW, top_p=0.0),
    replace(DRAW, top_p=0.01),
    replace(DRAW, top_p=0.9),
    replace(DRAW, temperature=3.0, top_p=0.999),
    replace(DRAW, min_p=0.02),
    replace(DRAW, min_p=1.0),
    replace(DRAW, typical_p=1e-9),
    replace(DRAW, typical_p=0.1),
    replace(DRAW, typical_p=0.95),
    replace(DRAW, temperature=4.0, typical_p=0.5),
    replace(DRAW, temperature=0.7, top_k=50, top_p=0.95),
    replace(DRAW, temperature=1.5, top_k=200, top_p=0.9, min_p=0.01, typical_p=0.8),
]
PROCESSED = [
    replace(DRAW, logit_bias=((3, 5.0), (900, -100.0), (4, 100.0))),
    replace(DRAW, repetition_penalty=1.7),
    replace(DRAW, frequency_penalty=0.9),
    replace(DRAW, presence_penalty=-1.5),
    replace(DRAW, min_new_tokens=9, stop_token_ids=frozenset({11, 12})),
    replace(
        DRAW,
        temperature=0.8,
        typical_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        logit_bias=((2, 6.5), (5, 4.0)),
        min_new_tokens=9,
        stop_token_ids=frozenset({2}),
    ),
]
GENERATED = (2, 3, 3, 900, 2, 3)


@pytest.mark.parametrize("params", [*NARROWED, *PROCESSED], ids=describe)
@pytest.mark.parametrize("vocab", [VOCAB, 20_000])
@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
def test_distribution(params: SamplingParams, vocab: int, spread: float) -> None:
    logits = random_logits(1, vocab=vocab)[0] * np.float32(spread)
    sequence = sequence_of(params, generated=GENERATED)
    computed = distribution(logits, sequence)
    wanted = reference(logits, sequence)
    assert np.abs(computed - wanted).max() <= 1e-6
    # The two may differ below what a float32 weight can represent next to 1.
    assert np.array_equal(computed > 1e-30, wanted > 1e-30)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([2, 17, 300, 3000]),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.01, 1),
)
def test_distribution_for_any_top_k_and_top_p(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    logits, sequence = random_logits(seed, vocab=vocab)[0], sequence_of(params, [0])
    computed, wanted = distribution(logits, sequence), reference(logits, sequence)
    # Rounding may decide whether a token at the edge of the nucleus is in it.
    assert np.abs(computed - wanted).max() <= 1e-5 or np.sum((computed > 0) != (wanted > 0)) == 1


mixes = st.builds(
    SamplingParams,
    do_sample=st.booleans(),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.01, 1),
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    penalty_last_n=st.none() | st.integers(-1, 12),
    logit_bias=st.dictionaries(st.integers(0, 15), st.floats(-100, 100), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    min_new_tokens=st.integers(0, 8),
    stop_token_ids=st.frozensets(st.integers(0, 20), max_size=3),
    top_n_tokens=st.integers(0, 5),
)


@settings(max_examples=150)
@given(
    params=mixes,
    seed=st.integers(0, 2**32),
    own_seed=st.integers(0, 2**64 - 1),
    vocab=st.sampled_from([16, 17, 300, 3000]),
    generated=st.lists(st.integers(0, 15), max_size=8),
    num_allowed=st.integers(1, 3000),
)
def test_any_mix_of_parameters(
    params: SamplingParams,
    seed: int,
    own_seed: int,
    vocab: int,
    generated: list[int],
    num_allowed: int,
) -> None:
    logits = random_logits(seed, n=3, vocab=vocab)
    grammar = None
    if num_allowed < vocab:
        chosen = np.random.default_rng(seed).choice(vocab, num_allowed, replace=False)
        grammar = Mask.of(*chosen.tolist(), vocab=vocab)
    mixed = sequence_of(params, (1, 2), generated, grammar, own_seed)
    batch = [sequence_of(DRAW, seed=1), mixed, sequence_of(SamplingParams())]
    one = sampler(vocab)

    samples = one.sample(logits, batch)
    assert samples == [sample_row(one, row.copy(), s) for row, s in zip(logits, batch, strict=True)]
    sample = samples[1]
    assert isinstance(sample, Sample)
    probabilities = distribution(logits[1], mixed)
    assert np.isclose(probabilities.sum(), 1)
    assert probabilities[sample.token_id] > 0
    assert grammar is None or grammar.allowed()[sample.token_id]
    if params.greedy:
        scores = reference_scores(logits[1], mixed)
        assert scores[sample.token_id] == pytest.approx(scores.max(), abs=1e-4)


def test_tokens_as_likely_as_the_kth_stay() -> None:
    logits = np.array([1, 3, 2, 2, 2, 0], np.float32)
    kept = distribution(logits, sequence_of(replace(DRAW, top_k=2))) > 0
    assert kept.tolist() == [False, True, True, True, True, False]


def test_equally_likely_tokens_enter_the_nucleus_in_order() -> None:
    """Every other token is likelier by a little: those and half of the rest are the nucleus."""
    logits = np.tile(np.array([0, 1e-3], np.float32), 2000)
    drawn = distribution(logits, sequence_of(replace(DRAW, top_p=0.75)))
    assert np.flatnonzero(drawn).tolist() == [*range(2000), *range(2001, 4000, 2)]


def test_tokens_as_typical_as_the_last_stay() -> None:
    """Two thirds of the tokens are equally typical, and a share of 10% needs few of them."""
    logits = np.tile(np.array([0, 0, 5], np.float32), 1000)
    logits[::3] -= np.float32(20)
    sequence = sequence_of(replace(DRAW, typical_p=0.1))
    assert np.flatnonzero(distribution(logits, sequence)).tolist() == list(range(2, 3000, 3))


def test_light_tokens_may_be_more_typical_than_heavy_ones() -> None:
    """One token has 30% of the probability, and still the flat rest is nearer to the entropy."""
    logits = np.zeros(10_001, np.float32)
    logits[0] = math.log(10_000 * 3 / 7)
    sequence = sequence_of(replace(DRAW, typical_p=0.2))
    assert np.flatnonzero(distribution(logits, sequence)).tolist() == list(range(1, 10_001))


def draw(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: list[int],
    seed: int | None = None,
) -> int:
    sequence = Sequence(prompt, params, seed=seed)
    return sample_row(Sampler(len(logits), frozenset()), logits, sequence).token_id


def test_repetition_penalty_applies_to_prompt_and_output() -> None:
    logits = np.array([2.0, 1.9, 1.8, -1.0], np.float32)
    params = SamplingParams(repetition_penalty=1.2)
    one = Sampler(4, frozenset())
    assert sample_row(one, logits, sequence_of(params, [0, 0, 3])).token_id == 1
    assert sample_row(one, logits, sequence_of(params, [0, 0, 3], [1])).token_id == 2
    assert logits.tolist() == np.array([2.0, 1.9, 1.8, -1.0], np.float32).tolist()


def test_frequency_and_presence_penalties_apply_to_the_output_only() -> None:
    """OpenAI's formula: logit - count * frequency_penalty - (count > 0) * presence_penalty."""
    logits = random_logits(4)[0]
    params = replace(DRAW, frequency_penalty=0.25, presence_penalty=0.5)
    scores = logits.astype(np.float64)
    scores[8] -= 3 * 0.25 + 0.5
    scores[9] -= 1 * 0.25 + 0.5
    sequence = sequence_of(params, [3, 4, 8], [8, 9, 8, 8])
    assert distribution(logits, sequence) == pytest.approx(softmax(scores), abs=1e-7)


@pytest.mark.parametrize(
    ("last_n", "counts"),
    [
        (None, {8: 3, 9: 1}),
        (-1, {3: 1, 4: 1, 8: 4, 9: 1}),
        (100, {3: 1, 4: 1, 8: 4, 9: 1}),
        (5, {8: 4, 9: 1}),
        (2, {8: 2}),
        (0, {}),
    ],
)
def test_penalties_may_look_at_the_last_tokens_only(
    last_n: int | None, counts: dict[int, int]
) -> None:
    """As in llama.cpp: the prompt's are among them, and the repetition penalty comes first."""
    logits = random_logits(4)[0]
    params = replace(
        DRAW,
        repetition_penalty=1.3,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        penalty_last_n=last_n,
    )
    scores = logits.astype(np.float64)
    for token in {3, 4, 8, 9} if last_n is None else counts:
        scores[token] *= 1.3 if scores[token] < 0 else 1 / 1.3
    for token, count in counts.items():
        scores[token] -= count * 0.25 + 0.5
    sequence = sequence_of(params, [3, 4, 8], [8, 9, 8, 8])
    assert distribution(logits, sequence) == pytest.approx(softmax(scores), abs=1e-7)


def test_biases_of_one_token_add_up() -> None:
    params = SamplingParams(logit_bias=((2, 1.0), (2, 1.5), (1, 2.0)))
    assert draw(np.zeros(4, np.float32), params, [0]) == 2


def test_ends_are_held_back_until_there_are_enough_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[EOS, 12, 13]] = 9, 8, 7
    params = SamplingParams(min_new_tokens=2, stop_token_ids=frozenset({12, VOCAB + 1}))
    chosen = [
        sample_row(sampler(), logits, sequence_of(params, generated=[1] * n)).token_id
        for n in range(4)
    ]
    assert chosen == [13, 13, EOS, EOS]


def test_ignore_eos_leaves_the_end_token_likely() -> None:
    logits = random_logits(3)[0]
    plain, ignoring = sequence_of(DRAW), sequence_of(replace(DRAW, ignore_eos=True))
    ignored = distribution(logits, ignoring)
    assert np.array_equal(ignored, distribution(logits, plain))


def test_a_grammar_that_allows_nothing_but_an_end_ends_early() -> None:
    params = SamplingParams(min_new_tokens=5)
    sequence = sequence_of(params, grammar=Mask.of(EOS))
    assert sample_row(sampler(), random_logits(1)[0], sequence).token_id == EOS
    sequence = sequence_of(params, grammar=Mask.of(EOS, 40))
    assert sample_row(sampler(), random_logits(1)[0], sequence).token_id == 40


@pytest.mark.parametrize("params", [SamplingParams(), DRAW], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("grammar", "expected", "words"),
    [
        (Mask.of(), GenerationError, "no token can be chosen"),
        (BrokenGrammar(ValidationError("too deep")), ValidationError, "too deep"),
        (BrokenGrammar(RuntimeError("lost")), GenerationError, "lost"),
        (Mask.of(vocab=3), GenerationError, "choosing a token failed"),
    ],
    ids=["nothing allowed", "refused", "crashed", "too short"],
)
def test_an_error_fails_its_own_row_only(
    params: SamplingParams, grammar: Constraint, expected: type[MaskdialError], words: str
) -> None:
    logits = random_logits(2, n=3)
    good, bad = sequence_of(DRAW, seed=3), sequence_of(params, grammar=grammar)
    first, error, last = sampler().sample(logits, [good, bad, good])
    assert type(error) is expected
    assert words in error.message
    assert first == sample_row(sampler(), logits[0], good)
    assert last == sample_row(sampler(), logits[2], good)
    with pytest.raises(expected, match=words):
        sample_row(sampler(), logits[1], bad)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3, typical_p=0.1),
        SamplingParams(do_sample=True, temperature=0.0),
        SamplingParams(do_sample=True, temperature=1e-30),
    ],
    ids=describe,
)
def test_greedy_takes_the_most_likely(params: SamplingParams) -> None:
    logits = random_logits(1, n=6)
    samples = [sample_row(sampler(), row, sequence_of(params)) for row in logits]
    assert [sample.token_id for sample in samples] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        DRAW,
        replace(DRAW, logit_bias=((0, 1.5), (3, -1.0))),
        replace(DRAW, temperature=0.5, top_p=0.9),
        replace(DRAW, temperature=2.0, top_k=5),
        replace(DRAW, temperature=2.0, typical_p=0.6),
    ],
    ids=describe,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 4,000 seeds; with at most 8 degrees of freedom, 26.1 is the 0.1% point."""
    logits = random_logits(2, vocab=9)[0] / 3
    wanted = distribution(logits, sequence_of(params))
    counts = Counter(draw(logits, params, [0], seed) for seed in range(4000))
    assert set(counts) <= set(np.flatnonzero(wanted).tolist())
    chi_square = sum(
        (counts[token] - 4000 * p) ** 2 / (4000 * p) for token, p in enumerate(wanted) if p > 0
    )
    assert chi_square < 26.1


def test_a_large_vocabulary_is_drawn_from_in_proportion() -> None:
    """The search by blocks must find the token that one cumulative sum over everything finds."""
    logits = random_logits(3, vocab=5003)[0]
    edges = np.cumsum(softmax(logits.astype(np.float64)))
    for seed in range(300):
        u = uniform(seed, 0)
        token = draw(logits, DRAW, [0], seed)
        low = edges[token - 1] if token else 0.0
        assert low - 1e-5 <= u <= edges[token] + 1e-5


def test_each_token_has_a_random_number_of_its_own() -> None:
    flat = np.zeros(VOCAB, np.float32)
    for n in range(20):
        sequence = sequence_of(DRAW, generated=[1] * n, seed=6)
        token_id = sample_row(sampler(), flat, sequence).token_id
        assert token_id == int(uniform(6, n) * VOCAB)


def test_the_last_share_falls_on_a_token_with_weight() -> None:
    """Sums in float32 and float64 differ: the draw must not end beyond the last such token."""
    for seed in range(20):
        weights = np.random.default_rng(seed).random(700, np.float32)
        weights[600:] = 0
        candidates = Candidates(None, np.log(np.maximum(weights, np.float32(1e-9))), weights)
        assert candidates.pick(1 - 2**-53) == 599


@pytest.mark.parametrize("params", [*NARROWED, *PROCESSED], ids=describe)
def test_a_row_is_the_same_alone_and_in_a_batch(params: SamplingParams) -> None:
    logits = random_logits(5, n=7, vocab=1237)
    sequences = [
        sequence_of(replace(params, top_n_tokens=3), [3, 4, row], GENERATED[:row], seed=row)
        for row in range(7)
    ]
    one = sampler(1237)
    together = one.sample(logits, sequences)
    assert together == [
        one.sample(logits[row : row + 1].copy(), [sequence])[0]
        for row, sequence in enumerate(sequences)
    ]
    assert together == [
        sample_row(one, row, sequence) for row, sequence in zip(logits, sequences, strict=True)
    ]


def test_random_numbers_depend_on_seed_and_index_only() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(1, 7) == numbers[50 + 7]
    generator = np.random.Generator(np.random.Philox(key=1, counter=7))
    assert uniform(1, 7) == generator.random()


def test_logprob_is_the_models_own() -> None:
    logits = random_logits(6)[0]
    params = replace(DRAW, temperature=0.4, top_k=5, repetition_penalty=2.0, logit_bias=((8, 9.0),))
    sample = sample_row(sampler(), logits, sequence_of(params))
    wanted = math.log(softmax(logits.astype(np.float64))[sample.token_id])
    assert sample.logprob == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("vocab", [10, VOCAB, 50_257])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 20, 600])
def test_top_tokens(vocab: int, num_tokens: int) -> None:
    logits = np.round(random_logits(8, vocab=vocab)[0], 1)  # many are equal
    params = SamplingParams(top_n_tokens=num_tokens, repetition_penalty=1.5)
    sample = sample_row(sampler(vocab), logits, sequence_of(params))
    order = np.argsort(-logits, kind="stable")[:num_tokens]
    assert [token_id for token_id, _ in sample.top] == order.tolist()
    wanted = np.log(softmax(logits.astype(np.float64))[order])
    assert [logprob for _, logprob in sample.top] == pytest.approx(wanted.tolist(), abs=1e-5)
    if sample.token_id in dict(sample.top):
        assert dict(sample.top)[sample.token_id] == sample.logprob


def test_prompt_logprobs() -> None:
    logits = random_logits(9, n=20, vocab=5003)
    token_ids = np.arange(20) * 250
    wanted = [
        math.log(softmax(row.astype(np.float64))[token_id])
        for row, token_id in zip(logits, token_ids, strict=True)
    ]
    computed = prompt_logprobs(logits, token_ids)
    assert {each.top for each in computed} == {()}
    assert [each.logprob for each in computed] == pytest.approx(wanted, abs=1e-5)
    greedy = sample_row(sampler(5003), logits[0], sequence_of(SamplingParams(top_n_tokens=3)))
    described = prompt_logprobs(logits[:1], np.array([greedy.token_id]), 3)
    assert described == [PromptLogprob(greedy.logprob, greedy.top)]
    logits[0, 77], logits[1, 77] = math.nan, math.inf
    spoilt = prompt_logprobs(logits, token_ids)
    assert [math.isnan(each.logprob) for each in spoilt] == [True] * 2 + [False] * 18
    assert spoilt[2:] == computed[2:]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_own_row_only(bad: float) -> None:
    logits = random_logits(7, n=2)
    logits[0, 3] = bad
    sequence = sequence_of(replace(DRAW, top_n_tokens=2), seed=1)
    first, second = sampler().sample(logits, [sequence, sequence])
    assert isinstance(first, Sample)
    assert math.isnan(first.logprob)
    assert second == sample_row(sampler(), logits[1], sequence)


def test_drawn_seeds_differ_and_survive_json_numbers() -> None:
    seeds = {Sequence([1], SamplingParams()).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(int(float(seed)) == seed for seed in seeds)
    assert Sequence([1], SamplingParams(), seed=5).seed == 5


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(do_sample=True, top_k=2)])
def test_tokens_without_text_need_a_bias_to_be_drawn(params: SamplingParams) -> None:
    logits = np.array([0, 9, 8, 1, 0], np.float32)
    one = Sampler(5, frozenset({EOS}), frozenset({1, 2, 77}))
    drawn = {
        sample_row(one, logits, sequence_of(params, (0,), seed=seed)).token_id for seed in range(40)
    }
    assert drawn <= {0, 3, 4}
    biased = replace(params, logit_bias=((2, 5.0),))
    sample = sample_row(one, logits, sequence_of(biased, (0,)))
    assert sample.token_id == 2
    # Its log-probability is the model's own, among all tokens.
    assert sample.logprob == pytest.approx(math.log(np.exp(8) / np.exp(logits).sum()), abs=1e-5)


def summarized(logits: NDArray[np.float32]) -> SummarizedLogits:
    """As a graph with the kernels gives them."""
    peaks = logits.max(axis=1)
    totals = np.exp(logits.astype(np.float64) - peaks[:, None]).sum(axis=1)
    return SummarizedLogits(logits, logits.argmax(axis=1), peaks, totals)


def test_summaries_give_the_same_samples() -> None:
    logits = random_logits(5, n=40, vocab=5003)
    for params in (SamplingParams(), SamplingParams(do_sample=True, top_k=20)):
        sequences = [sequence_of(params, seed=3) for _ in logits]
        wanted = sampler(5003).sample(logits, sequences)
        given = sampler(5003).sample(summarized(logits), sequences)
        for one, other in zip(wanted, given, strict=True):
            assert isinstance(one, Sample)
            assert isinstance(other, Sample)
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    prompt = prompt_logprobs(summarized(logits), np.arange(40) * 100, 3)
    for known, found in zip(prompt_logprobs(logits, np.arange(40) * 100, 3), prompt, strict=True):
        assert known.logprob == pytest.approx(found.logprob, abs=1e-5)
        assert [each for each, _ in known.top] == [each for each, _ in found.top]


def test_some_rows_of_summarized_logits_keep_their_summaries() -> None:
    logits = summarized(random_logits(6, n=5, vocab=30))
    for rows in (slice(1, 4), [3, 0], np.array([4])):
        some = logits[rows]
        assert len(some) == len(logits.values[rows])
        np.testing.assert_array_equal(some, logits.values[rows])
        assert some.summaries == summarized(logits.values[rows]).summaries
    assert not np.shares_memory(np.array(logits[:2]), logits.values)
    assert np.asarray(logits, np.float64).dtype == np.float64


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(min_new_tokens=3)])
def test_what_is_never_drawn_is_not_the_greedy_choice(params: SamplingParams) -> None:
    never, logits = frozenset({17, 8}), random_logits(7, n=4, vocab=5003)
    logits[0, [17, 8, 100]] = 90.0, 80.0, 70.0  # both are better than any other token
    logits[1, [100, 8]] = 90.0, 80.0
    logits[2, [EOS, 17, 100]] = 90.0, 80.0, 70.0
    logits[3, 17] = -90.0
    samples = Sampler(5003, frozenset({EOS}), never).sample(
        logits, [sequence_of(params) for _ in logits]
    )
    allowed = logits.copy()
    allowed[:, [17, 8]] = -np.inf
    if params.min_new_tokens:
        allowed[:, EOS] = -np.inf
    assert [each.token_id for each in samples if isinstance(each, Sample)] == (
        allowed.argmax(axis=1).tolist()
    )


def left_out(text: SequenceOf[int], source: SequenceOf[int] = (), **params: object) -> list[int]:
    """The tokens that cannot come after a prompt of one token and the rest of the text."""
    given = SamplingParams(**{"max_new_tokens": 10**6, **params})  # type: ignore[arg-type]
    sequence = Sequence(text[:1], given, source_ids=source)
    for token_id in text[1:]:
        sequence._append(token_id)
    scores = process(np.zeros(VOCAB, np.float32), sequence, frozenset())
    return np.flatnonzero(np.isneginf(scores)).tolist()


@pytest.mark.parametrize(
    ("text", "size", "banned"),
    [
        ([1, 2, 3, 1], 2, [2]),
        ([1, 2, 1, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 9, 2], 3, []),
        ([1, 2, 3, 9, 1, 2], 3, [3]),
        ([4, 5], 1, [4, 5]),
        ([1, 2], 3, []),
        ([1, 2, 3, 1], 0, []),
    ],
)
def test_no_sequence_of_tokens_comes_twice(text: list[int], size: int, banned: list[int]) -> None:
    assert left_out(text, no_repeat_ngram_size=size) == banned


@pytest.mark.parametrize(
    ("text", "size", "banned"),
    [([0, 1], 2, [2]), ([0, 1, 2], 3, [3]), ([0, 2], 2, [3, 5]), ([0, 3], 2, [2]), ([0, 5], 2, [])],
)
def test_no_sequence_of_the_source_comes(text: list[int], size: int, banned: list[int]) -> None:
    assert left_out(text, [1, 2, 3, 2, 5], no_source_ngram_size=size) == banned


@pytest.mark.parametrize(
    ("text", "banned"),
    [([0], [9]), ([0, 4], [5, 9]), ([0, 6, 7], [8, 9]), ([0, 7, 6], [9]), ([6, 7], [8, 9])],
)
def test_banned_sequences_are_not_completed(text: list[int], banned: list[int]) -> None:
    assert left_out(text, banned=((9,), (4, 5), (6, 7, 8))) == banned


@pytest.mark.parametrize(("num_written", "kept"), [(0, [3]), (1, None), (2, [EOS, 8]), (3, None)])
def test_the_first_and_the_last_token_may_be_given(
    num_written: int, kept: list[int] | None
) -> None:
    text = [1, *[2] * num_written]
    out = left_out(text, max_new_tokens=3, forced_first=3, forced_last=(EOS, 8))
    assert out == ([] if kept is None else sorted(set(range(VOCAB)) - set(kept)))
