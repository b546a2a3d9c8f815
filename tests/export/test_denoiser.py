"""The denoiser of canvases, pass for pass as transformers' sampler of DiffusionGemma."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma import generation_diffusion_gemma as published

from maskdial.bundle.manifest import Denoising
from maskdial.engine.philox import Philox
from maskdial.errors import InferenceError
from maskdial.unmasking.denoiser import Denoiser

VOCABULARY, SOFT = 37, 5
HOW = Denoising(
    canvas_length=11,
    hidden_size=SOFT,
    steps=9,
    entropy_bound=1.5,
    stability_threshold=2,
    confidence_threshold=0.6,
)


class Draws:
    """The random numbers of a denoiser, for what draws them in torch."""

    def __init__(self, seed: int, length: int, vocab_size: int) -> None:
        self.philox = Philox()
        self.seed, self.length, self.vocab_size = seed, length, vocab_size
        self.num_passes = self.num_canvases = 0
        self.drew = False

    def _uniform(self, number: int, stream: int) -> list[float]:
        first = number * self.length
        return [self.philox.uniform(self.seed, first + i, stream) for i in range(self.length)]

    def multinomial(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        """In place of ``torch.multinomial``."""
        assert num_samples == 1
        self.drew = True
        heights = probabilities.double().cumsum(-1)
        u = torch.tensor(self._uniform(self.num_passes, 0)).double()[:, None] * heights[:, -1:]
        return torch.searchsorted(heights, u, right=True)

    def randint(self, low: int, high: int, size: Any, **_: Any) -> torch.Tensor:
        """In place of ``torch.randint``: before a canvas's first pass, and after each."""
        assert (low, high) == (0, self.vocab_size)
        if self.drew:
            numbers = self._uniform(self.num_passes, 1)
            self.num_passes += 1
        else:
            numbers = self._uniform(self.num_canvases, 2)
            self.num_canvases += 1
        self.drew = False
        return torch.tensor([int(each * high) for each in numbers]).reshape(size)


def logits(generator: np.random.Generator, certain: float) -> np.ndarray[Any, Any]:
    """Rows that agree more and more on some tokens."""
    rows = generator.normal(size=(HOW.canvas_length, VOCABULARY))
    rows[np.arange(HOW.canvas_length), np.arange(HOW.canvas_length)] += certain
    return rows.astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("growth", [0.3, 1.5, 4.0])
def test_canvases_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, seed: int, growth: float
) -> None:
    draws = Draws(seed, HOW.canvas_length, VOCABULARY)
    monkeypatch.setattr(torch, "randint", draws.randint)
    sampler = published.EntropyBoundSampler(
        published.EntropyBoundSamplerConfig(HOW.entropy_bound),
        HOW.canvas_length,
        VOCABULARY,
        HOW.steps,
    )
    schedule = published.LinearTemperatureScheduleLogitsProcessor(HOW.t_min, HOW.t_max, HOW.steps)
    stopping = published.StableAndConfidentStoppingCriteria(
        HOW.stability_threshold, HOW.confidence_threshold
    )
    denoiser = Denoiser(HOW, VOCABULARY, None, seed)
    generator = np.random.default_rng(seed)
    for _ in range(2):
        canvas = sampler.initialize_canvas(1, torch.device("cpu"))
        stopping.reset()
        for step in range(HOW.steps, 0, -1):
            assert denoiser.tokens == canvas[0].tolist()
            raw = logits(generator, growth * (HOW.steps - step))
            soft = generator.normal(size=(HOW.canvas_length, SOFT)).astype(np.float32)
            z = schedule(canvas, torch.from_numpy(raw)[None], cur_step=step)
            assert torch.equal(z[0], torch.from_numpy(raw / np.float32(denoiser.temperature)))
            drawn = draws.multinomial(z[0].softmax(-1), 1).T
            accepted = sampler.accept_canvas(canvas, drawn, z, step)
            canvas = sampler.renoise_canvas(accepted, step)
            finished = bool(stopping(z.argmax(-1), z)) or step == 1
            denoiser.advance(np.concatenate([raw, soft], axis=1))
            assert denoiser.best == z[0].argmax(-1).tolist()
            assert np.array_equal(denoiser.soft, soft)
            assert denoiser.finished == finished
            if finished:
                logprobs = torch.from_numpy(raw).log_softmax(-1).amax(-1)
                assert torch.allclose(torch.tensor(denoiser.logprobs), logprobs, atol=1e-5)
                break
        assert (step == 1) == (growth < 1), "some canvases end before their last pass"
        denoiser.begin()
        assert not denoiser.soft.any()
    assert (denoiser.num_passes, denoiser.num_canvases) == (draws.num_passes, 2)


def test_a_canvas_need_not_be_stable() -> None:
    how = HOW.model_copy(update={"stability_threshold": 0})
    denoiser = Denoiser(how, VOCABULARY, None, seed=1)
    output = np.zeros((HOW.canvas_length, VOCABULARY + SOFT), np.float32)
    denoiser.advance(output)
    assert not denoiser.finished, "it is not confident"
    output[:, 3] = 9
    denoiser.advance(output)
    assert denoiser.finished


def test_fewer_passes_have_a_schedule_of_their_own() -> None:
    denoiser = Denoiser(HOW, VOCABULARY, 4, seed=1)
    temperatures = []
    while not denoiser.finished:
        temperatures.append(denoiser.temperature)
        denoiser.advance(np.zeros((HOW.canvas_length, VOCABULARY + SOFT), np.float32))
    assert temperatures == pytest.approx([0.8, 0.7, 0.6, 0.5])


def test_logits_that_are_not_finite_are_an_error() -> None:
    output = np.zeros((HOW.canvas_length, VOCABULARY + SOFT), np.float32)
    output[3, 4] = np.nan
    with pytest.raises(InferenceError, match="not finite"):
        Denoiser(HOW, VOCABULARY, None, seed=1).advance(output)
