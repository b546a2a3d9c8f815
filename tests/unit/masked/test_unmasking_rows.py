"""Rows of logits that are filled: the kernels and NumPy choose the same tokens."""

from typing import get_args

import numpy as np
import pytest

from maskdial.engine.logits import largest_indices, summarize
from maskdial.errors import InferenceError
from maskdial.kernels.build import library_path
from maskdial.kernels.logits import VocabularyKernels
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.fill_passes import fill
from maskdial.unmasking.canvas import Blank, Block, Canvas, Draft
from maskdial.unmasking.unmasker import Order, Unmasker, Unmasking

VOCAB = 300
EXCLUDED = (0, 7, 8)


@pytest.fixture(scope="module")
def kernels() -> VocabularyKernels:
    if not library_path().exists():
        pytest.skip("the kernels are not built")
    return VocabularyKernels(library_path(), VOCAB)


def rows(seed: int, num: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Logits with ties, whose greatest one is often a token that is never written."""
    found = (np.random.default_rng(seed).integers(-40, 40, (num, VOCAB)) / 8).astype(np.float32)
    found[::2, 7] = 9
    return found


def filled(how: Unmasking, kernels: VocabularyKernels | None) -> Canvas:
    positions = tuple(range(1, 10))
    canvas = Canvas([Draft((5,) * 11)], (Blank(positions),), (Block((0,), 4),), seed=3)
    passes = fill(Unmasker(how, EXCLUDED, kernels), [canvas])
    inputs = next(passes)
    for step in range(100):
        results = [MaskedResult(rows(step, len(each.rows)), 0, 0, 1, 1) for each in inputs]
        try:
            inputs = passes.send(results)
        except StopIteration:
            break
    assert canvas.done
    return canvas


@pytest.mark.parametrize(
    "how",
    [
        *(Unmasking(order) for order in get_args(Order)),
        Unmasking(threshold=0.02),
        Unmasking(num_beams=3),
        Unmasking(temperature=0.7),
    ],
)
def test_kernels_fill_masks_as_numpy_does(how: Unmasking, kernels: VocabularyKernels) -> None:
    ours, plain = filled(how, kernels).drafts, filled(how, None).drafts
    assert [draft.input_ids for draft in ours] == [draft.input_ids for draft in plain]
    for ours_, plain_ in zip(ours, plain, strict=True):
        assert [(each.position, each.step) for each in ours_.filled] == [
            (each.position, each.step) for each in plain_.filled
        ]
        assert [each.logprob for each in ours_.filled] == pytest.approx(
            [each.logprob for each in plain_.filled], rel=1e-6
        )
    written = {each.token for draft in ours for each in draft.filled}
    assert written.isdisjoint(EXCLUDED)


def test_the_largest_logits_are_the_same(kernels: VocabularyKernels) -> None:
    for row in rows(1, 5):
        for k in (1, 2, 9, VOCAB):
            assert largest_indices(row, k, kernels).tolist() == largest_indices(row, k).tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(value: float, kernels: VocabularyKernels) -> None:
    broken = rows(1, 2)
    broken[1, 4] = value
    for each in (kernels, None):
        with pytest.raises(InferenceError, match="not finite"):
            list(summarize(broken, each))


class EvenOnly:
    """A constraint that allows the tokens up to 20, and is completed by the even ones."""

    def next_tokens(self, before: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(range(1, 21))

    def completes(self, before: tuple[int, ...], num_left: int) -> bool:
        return before[-1] % 2 == 0


@pytest.mark.parametrize("temperature", [0.7, 1e-4])
def test_tokens_that_complete_a_blank_are_drawn_by_their_probabilities(temperature: float) -> None:
    """With the likeliest token rejected, also where the others' share of all rounds to nothing."""
    num = 4000
    row = np.zeros(VOCAB, np.float32)
    row[1], row[2:21] = 30, np.linspace(-1, 1, 19)
    blanks = (Blank((0,), constraint=EvenOnly()),)
    counts = np.zeros(VOCAB)
    for seed in range(num):
        canvas = Canvas([Draft((5, 5))], blanks, (Block((0,)),), seed=seed)
        unmasker = Unmasker(Unmasking(temperature=temperature))
        (draft,) = unmasker.grow(canvas, canvas.drafts[0], (0,), row[None])
        counts[draft.filled[0].token] += 1
    even = row[2:21:2].astype(np.float64) / temperature
    expected = np.exp(even - even.max()) / np.exp(even - even.max()).sum()
    np.testing.assert_allclose(counts[2:21:2] / num, expected, atol=0.02)
