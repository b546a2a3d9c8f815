"""llama.cpp's samplers against llama.cpp itself, on the logits of ``tests/data``.

`llama_samplers.cpp` recorded them, with the llama.cpp of llama-cpp-python 0.3.36.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.sampling.dry import Breakers, Dry, read_breakers
from maskdial.causal.sampling.llama_chain import narrow_as_llama
from maskdial.causal.sampling.mirostat import Mirostat
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.sampler import Sample, Sampler
from maskdial.causal.sampling.words import read_words
from maskdial.causal.sequence import Sequence

DATA = Path(__file__).parents[2] / "data"

VOCAB = 300
RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (DATA / "llama_samplers.json").read_text(encoding="utf-8")
)


NO_BREAKERS = Breakers.of({}, VOCAB)


def logits(seed: int, scale: float) -> NDArray[np.float32]:
    """As `llama_samplers.cpp` makes them."""
    m = (np.arange(VOCAB) * 7919 + seed * 104729) % 1009 - 504
    return (scale * m * np.abs(m) / 254016.0).astype(np.float32)


def shares(weights: NDArray[np.float32], token_ids: NDArray[np.int64] | None) -> dict[int, float]:
    """The probabilities that matter, by token."""
    ids = np.arange(len(weights)) if token_ids is None else token_ids
    p = weights / weights.sum(dtype=np.float64)
    return {int(i): float(each) for i, each in zip(ids, p, strict=True) if each > 1e-8}


@pytest.mark.parametrize("case", RECORDED["chains"], ids=lambda case: str(case["seed"]))
def test_the_chain(case: dict[str, Any]) -> None:
    scores = logits(case["seed"], case["scale"])
    given = {name: case[name] for name in case if name not in ("seed", "scale", "left")}
    params = SamplingParams(do_sample=True, xtc_probability=1.0, **given)
    found = narrow_as_llama(scores, scores.max(), params, chance=0.5)
    left = {int(token): p for token, p in case["left"].items()}
    computed = shares(found.weights, found.token_ids)
    # Either may lose a token to rounding at the least probability that is written down.
    assert {t for t in left if left[t] > 2e-8} <= computed.keys()
    assert {t for t in computed if computed[t] > 2e-8} <= left.keys()
    for token, p in computed.items():
        assert p == pytest.approx(left.get(token, p), rel=2e-4, abs=1e-8)


@pytest.mark.parametrize("case", RECORDED["mirostats"], ids=lambda case: str(case["seed"]))
def test_mirostat(case: dict[str, Any]) -> None:
    mirostat = Mirostat(case["mirostat_tau"], case["mirostat_eta"])
    for step, draw in enumerate(case["draws"]):
        scores = logits(case["seed"] + step, case["scale"])
        found = mirostat.candidates(scores, scores.max(), case["temperature"])
        assert len(found) == draw["left"]
        assert found.token_ids is not None
        place = int(np.searchsorted(found.token_ids, draw["drawn"]))
        assert math.exp(found.logprob(place)) == pytest.approx(draw["p"], rel=1e-4)
        mirostat.observe(found.logprob(place))


@pytest.mark.parametrize("case", RECORDED["dry"], ids=lambda case: f"base {case['base']}")
def test_dry(case: dict[str, Any]) -> None:
    tails: dict[int, set[tuple[int, ...]]] = {}
    for head, *tail in case["breakers"]:
        tails.setdefault(head, set()).add(tuple(tail))
    breakers = Breakers.of({head: frozenset(each) for head, each in tails.items()}, VOCAB)
    given = {name: case[name] for name in ("multiplier", "base", "allowed_length", "last_n")}
    token_ids, penalties = Dry(**given, breakers=breakers).penalties(np.array(case["tokens"]))
    wanted = {int(token): penalty for token, penalty in case["penalties"].items()}
    assert token_ids.tolist() == list(wanted)
    # Their base is a float32, and raised to the power of 146 in one of these.
    assert penalties.tolist() == pytest.approx(list(wanted.values()), rel=1e-5)


def test_dry_looks_at_the_whole_text_if_asked() -> None:
    tokens = np.array([1, 2, 3, *range(10, 110), 1, 2])
    dry = Dry(multiplier=1, base=2, allowed_length=2, last_n=-1, breakers=Breakers.of({}, 200))
    assert dry.penalties(tokens)[0].tolist() == [3]


def words_tokenizer(*tokens: str) -> Tokenizer:
    """One whose tokens are these, in byte-level spelling, and single letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*tokens, *alphabet))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens())


def test_breakers_are_tokens_that_hold_them_or_end_with_their_beginning() -> None:
    tokenizer = words_tokenizer("hi:", "oh", "ahoy", "aho", "y!", "!", "x")
    found = read_breakers(tokenizer, [":", "hoy!"], 6)
    colon = tokenizer.encode("y!", add_special_tokens=False).ids
    assert found.tails == {
        0: {()},
        1: {tuple(tokenizer.encode("oy!", add_special_tokens=False).ids)},
        2: {tuple(tokenizer.encode("!", add_special_tokens=False).ids)},
        3: {tuple(colon)},
    }
    assert found.single(np.array([0, 1, 5])).tolist() == [True, False, False]
    assert found.num_since(np.array([4, 0, 5, 4])) == 2


def test_texts_become_tokens() -> None:
    tokenizer = words_tokenizer("cat", "Ġcat", "dog", "##s")
    params = SamplingParams(
        logit_bias=((9, 1.0),),
        text_bias=(("cats", -2.0), ("dog", -math.inf)),
        bad_words=("cat", "dogs"),
    )
    read = read_words(params, tokenizer, tokenizer.vocab_size)
    assert read.logit_bias == ((9, 1.0), (0, -2.0), (3, -2.0), (2, -math.inf))
    assert read.banned[:3] == ((0,), (1,), (2, 3))
    assert read.dry is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(do_sample=True, xtc_probability=0.5, xtc_threshold=0.05, top_k=20),
        SamplingParams(do_sample=True, mirostat=2, mirostat_tau=2.0),
        SamplingParams(do_sample=True, dynatemp_range=0.5, top_n_sigma=1.5),
        SamplingParams(
            dry_multiplier=5.0, dry_allowed_length=1, dry_breakers=Breakers.of({}, VOCAB)
        ),
    ],
    ids=["xtc", "mirostat", "dynatemp", "dry"],
)
def test_a_row_is_the_same_alone_and_in_company(params: SamplingParams) -> None:
    """Over several tokens, since Mirostat has a state; the others in the batch draw otherwise."""

    def write(company: int) -> list[int]:
        sampler = Sampler(VOCAB, frozenset())
        own = Sequence([1, 2, 1], params, seed=3)
        others = [
            Sequence([5], replace(params, do_sample=i % 2 == 0), seed=i) for i in range(company)
        ]
        drawn = []
        for step in range(8):
            rows = np.stack([logits(step + 50 * i, 9) for i in range(company + 1)])
            samples = sampler.sample(rows, [own, *others])
            assert isinstance(samples[0], Sample)
            drawn.append(samples[0].token_id)
            own._append(drawn[-1])
        return drawn

    alone = write(0)
    assert alone == write(3)
    assert len(set(alone)) > 1


def test_xtc_applies_by_chance() -> None:
    scores = logits(1, 20)
    params = SamplingParams(do_sample=True, xtc_probability=0.3, xtc_threshold=0.05)
    top = int(scores.argmax())
    kept = [
        shares(found.weights, found.token_ids).get(top, 0.0) > 0
        for chance in (0.0, 0.29, 0.31, 0.99)
        for found in [narrow_as_llama(scores, scores.max(), params, chance)]
    ]
    assert kept == [False, False, True, True]
