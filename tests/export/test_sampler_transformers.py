"""The sampler's distributions against transformers' own logits processors."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import narrow
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.processors import process
from maskdial.causal.sequence import Sequence

EOS = 7
PROMPT = [1, 5, 5, 9, 12, 15, 800]
DRAW = SamplingParams(do_sample=True)
MIXED = replace(
    DRAW,
    temperature=0.8,
    top_k=60,
    top_p=0.93,
    min_p=0.004,
    typical_p=0.9,
    repetition_penalty=1.3,
    logit_bias=((4, 9.0), (5, -3.0), (600, 8.0)),
    min_new_tokens=3,
)
TABLE = [
    DRAW,
    replace(DRAW, temperature=0.4),
    replace(DRAW, temperature=1.9),
    replace(DRAW, top_k=1),
    replace(DRAW, top_k=20),
    replace(DRAW, top_k=600),
    replace(DRAW, top_p=0.05),
    replace(DRAW, top_p=0.5),
    replace(DRAW, top_p=0.95),
    replace(DRAW, min_p=0.002),
    replace(DRAW, min_p=0.3),
    replace(DRAW, typical_p=0.2),
    replace(DRAW, typical_p=0.9),
    replace(DRAW, repetition_penalty=0.8),
    replace(DRAW, repetition_penalty=1.9),
    replace(DRAW, logit_bias=((3, 12.0), (EOS, 6.0), (800, -100.0))),
    replace(DRAW, min_new_tokens=2, logit_bias=((EOS, 12.0),)),
    replace(DRAW, temperature=0.7, top_k=40, top_p=0.9),
    replace(DRAW, temperature=1.4, top_p=0.97, typical_p=0.6),
    replace(DRAW, temperature=2.2, typical_p=0.4, min_p=0.001),
    replace(DRAW, top_k=50, min_p=0.05, repetition_penalty=1.2),
    MIXED,
]


def describe(params: SamplingParams) -> str:
    """The settings that differ from the defaults."""
    values = [(field, getattr(params, field.name)) for field in fields(params)]
    return " ".join(f"{f.name}={value}" for f, value in values if value != f.default)


class Allowed:
    """A grammar that allows two thirds of the tokens."""

    finished = False
    ready = True
    forced = ()

    def __init__(self, vocab_size: int) -> None:
        self._allowed = np.arange(vocab_size) % 3 > 0

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


def logits_of(seed: int, vocab_size: int) -> NDArray[np.float32]:
    logits = np.random.default_rng(seed).standard_normal(vocab_size) * 3
    return logits.astype(np.float32)


def by_transformers(
    logits: NDArray[np.float32], params: SamplingParams, allowed: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """The distribution of `generate`'s logits processors, computed in float64."""
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token_id], bias] for token_id, bias in params.logit_bias] or None,
        min_new_tokens=params.min_new_tokens or None,
        num_beams=1,
    )
    config._eos_token_tensor = torch.tensor([EOS])
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=len(logits))
    )
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(PROMPT),
        prefix_allowed_tokens_fn=None
        if allowed is None
        else lambda batch, ids: np.flatnonzero(allowed).tolist(),
        device="cpu",
    )
    scores = processors(torch.tensor([PROMPT]), torch.from_numpy(logits).double()[None])
    probabilities: NDArray[np.float64] = scores.softmax(dim=-1)[0].numpy()
    return probabilities


def distribution(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
    """The probabilities that the next token is drawn with, float64 (vocab_size,)."""
    scores = process(logits, sequence, frozenset({EOS}))
    candidates = narrow(scores, scores.max(), sequence.params)
    probabilities = np.zeros(len(scores))
    drawn = slice(None) if candidates.token_ids is None else candidates.token_ids
    probabilities[drawn] = candidates.weights
    probabilities /= probabilities.sum()
    return probabilities


@pytest.mark.parametrize("params", TABLE, ids=describe)
@pytest.mark.parametrize("seed", range(3))
def test_distribution(params: SamplingParams, seed: int) -> None:
    logits = logits_of(seed, 1000)
    computed = distribution(logits, Sequence(PROMPT, params))
    wanted = by_transformers(logits, params, None)
    assert np.abs(computed - wanted).max() <= 1e-5
    assert np.array_equal(computed > 1e-30, wanted > 1e-30)


@pytest.mark.parametrize("params", [DRAW, MIXED], ids=describe)
def test_distribution_under_a_grammar(params: SamplingParams) -> None:
    logits, grammar = logits_of(4, 1000), Allowed(1000)
    sequence = Sequence(PROMPT, params, grammar=grammar)
    computed = distribution(logits, sequence)
    wanted = by_transformers(logits, params, grammar.allowed())
    assert np.abs(computed - wanted).max() <= 1e-5
    assert np.array_equal(computed > 1e-30, wanted > 1e-30)


@pytest.mark.parametrize(
    "params",
    [
        replace(DRAW, temperature=0.9),
        replace(DRAW, top_k=200),
        replace(DRAW, top_p=0.9),
        replace(DRAW, min_p=0.01),
        replace(DRAW, typical_p=0.8),
        replace(MIXED, top_k=0),
    ],
    ids=describe,
)
def test_distribution_over_a_large_vocabulary(params: SamplingParams) -> None:
    logits = logits_of(5, 50_257)
    computed = distribution(logits, Sequence(PROMPT, params))
    wanted = by_transformers(logits, params, None)
    assert np.abs(computed - wanted).max() <= 1e-5
    assert np.array_equal(computed > 1e-30, wanted > 1e-30)
