"""`/score` over HTTP against torch, by hand: each token masked in turn, and each after those before
it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import torch

TOLERANCE = 1e-4
MASK = 4
MASKED = ["bert", "roberta", "modernbert", "deberta-v2"]
CAUSAL = ["gpt2", "llama"]
TEXTS = [
    "the cat sat, and that was that.",
    "Ça va, ÉTÉ  à Orléans",
    "a\nb  c\td",
    "it is 😀 or [MASK] or [SEP].",
    "שלום",
    "x" * 40,
    "a",
]

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def http(bundle: Callable[[str], Path], serve: Callable[..., str]) -> Iterator[httpx.Client]:
    url = serve(**{name: bundle(name) for name in (*MASKED, *CAUSAL)})
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def encode(folder: Path, text: str) -> tokenizers.Encoding:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.encode(text)


def masked_by_hand(model: Any, encoding: tokenizers.Encoding) -> list[float | None]:
    """The log-probability of each of the text's own tokens when masked, one pass per token."""
    logprobs: list[float | None] = []
    for position, (token_id, added) in enumerate(
        zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    ):
        if added:
            continue
        if token_id < 5:  # [UNK], [MASK] and [SEP] in the text
            logprobs.append(None)
            continue
        ids = torch.tensor([encoding.ids])
        ids[0, position] = MASK
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, position]
        logprobs.append(float(torch.log_softmax(logits.double(), -1)[token_id]))
    return logprobs


def causal_by_hand(model: Any, encoding: tokenizers.Encoding) -> list[float | None]:
    with torch.no_grad():
        logits = model(torch.tensor([encoding.ids])).logits[0].double()
    after = torch.log_softmax(logits, -1)
    return [
        float(after[position - 1, encoding.ids[position]])
        for position, added in enumerate(encoding.special_tokens_mask)
        if not added
    ]


def compare(scores: list[dict[str, Any]], expected: list[list[float | None]], method: str) -> None:
    assert len(scores) == len(expected)
    for score, logprobs in zip(scores, expected, strict=True):
        actual = [token["logprob"] for token in score["tokens"]]
        assert [each is None for each in actual] == [each is None for each in logprobs]
        scored = [each for each in logprobs if each is not None]
        np.testing.assert_allclose(
            [each for each in actual if each is not None], scored, atol=TOLERANCE, rtol=0
        )
        assert score["method"] == method
        assert score["log_likelihood"] == pytest.approx(sum(scored), abs=TOLERANCE * 50)
        if scored:
            assert score["perplexity"] == pytest.approx(np.exp(-np.mean(scored)), rel=TOLERANCE)
        else:
            assert score["perplexity"] is None


@pytest.mark.parametrize("name", MASKED)
def test_masked_scores_equal_torch(
    name: str, http: httpx.Client, checkpoint: Checkpoint, load_reference: Callable[[Path], Any]
) -> None:
    folder = checkpoint(name)
    reply = http.post("/score", json={"inputs": TEXTS, "model": name})
    assert reply.status_code == 200, reply.text
    model = load_reference(folder)
    compare(reply.json(), [masked_by_hand(model, encode(folder, t)) for t in TEXTS], "pseudo")


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_scores_equal_torch(
    name: str, http: httpx.Client, checkpoint: Checkpoint, load_reference: Callable[[Path], Any]
) -> None:
    """This tokenizer begins every text with a special token, so the first token has a score."""
    folder = checkpoint(name)
    reply = http.post("/score", json={"inputs": TEXTS, "model": name})
    assert reply.status_code == 200, reply.text
    model = load_reference(folder)
    compare(reply.json(), [causal_by_hand(model, encode(folder, t)) for t in TEXTS], "causal")
