"""Text in canvases: a model writes behind a prompt by passes that change all tokens of a canvas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from maskdial.bundle.manifest import TaskName
from maskdial.engine.philox import draw_seed
from maskdial.errors import ValidationError
from maskdial.masked.request import CanvasInput, MaskedInput
from maskdial.masked.tasks import passes
from maskdial.masked.tasks.masked_diffusion import TextPart, WriteRequest
from maskdial.masked.tasks.passes import Passes
from maskdial.masked.tasks.task import Reading, TaskModel
from maskdial.unmasking.canvas import FilledToken
from maskdial.unmasking.denoiser import Denoiser
from maskdial.unmasking.text import TextSoFar

_SECONDS_PER_LOGIT = 2e-8


@dataclass(frozen=True, slots=True)
class DenoiseRequest(WriteRequest):
    """A text that is written in canvases.

    They are written whole, and what is beyond the plan's number of tokens is cut off; its
    ``steps`` are the passes of one canvas. The model has its own way of unmasking.
    """

    head: ClassVar[TaskName] = "block-diffusion"

    def check(self, model: TaskModel) -> None:
        how = model.manifest.denoising
        assert how is not None, "every bundle for block-diffusion says how"
        if self.plan.steps is not None and self.plan.steps > how.steps:
            raise ValidationError(
                f"must be at most {how.steps}, the passes that model {model.name!r} makes for a "
                f"canvas, not {self.plan.steps}",
                field="steps",
            )

    def read(self, model: TaskModel) -> Reading[TextPart]:
        """The answer is the first canvas's; `TextPart.rest` goes on."""
        manifest, how = model.manifest, model.manifest.denoising
        assert how is not None, "every bundle for block-diffusion says how"
        seed = draw_seed() if self.plan.seed is None else self.plan.seed
        denoiser = Denoiser(how, manifest.vocab_size, self.plan.steps, seed)
        ends = frozenset(manifest.special_tokens.eos)
        text = _Text(tuple(self.before), self.plan.num_tokens, ends, seed)
        num_logits = manifest.vocab_size * how.canvas_length

        def canvas() -> Reading[TextPart]:
            return passes.reading(run(), 0, num_logits * _SECONDS_PER_LOGIT)

        def run() -> Passes[TextPart]:
            if denoiser.finished:
                denoiser.begin()
            while not denoiser.finished:
                yield from text.step(denoiser)
            text.keep(denoiser)
            so_far = text.so_far()
            return TextPart(so_far, None if so_far.finished else canvas())

        return canvas()


class _Text:
    """A text that is being written behind a prompt, up to a number of tokens or an end."""

    def __init__(
        self, before: tuple[int, ...], num_tokens: int, ends: frozenset[int], seed: int
    ) -> None:
        self._before = before
        self._num_tokens = num_tokens
        self._ends = ends
        self._seed = seed
        self._tokens: list[FilledToken] = []

    def step(self, denoiser: Denoiser) -> Passes[None]:
        """One pass over the text and its canvas."""
        written = (*self._before, *(each.token for each in self._tokens))
        ids = (*written, *denoiser.tokens)
        rows = tuple(range(len(written), len(ids)))
        beside = CanvasInput(denoiser.soft, denoiser.temperature)
        (result,) = yield [MaskedInput(ids, rows, canvas=beside)]
        denoiser.advance(result.logits)

    def keep(self, denoiser: Denoiser) -> None:
        """Adds a finished canvas to the text."""
        first = len(self._before) + len(self._tokens)
        self._tokens += [
            FilledToken(first + place, token, logprob, denoiser.num_passes - 1)
            for place, (token, logprob) in enumerate(
                zip(denoiser.best, denoiser.logprobs, strict=True)
            )
        ]

    def so_far(self) -> TextSoFar:
        """What is written: canvases up to the text's end."""
        tokens: Sequence[FilledToken] = self._tokens[: self._num_tokens]
        last = next((i for i, each in enumerate(tokens) if each.token in self._ends), None)
        if last is not None:
            tokens = tokens[: last + 1]
        return TextSoFar(
            tuple(tokens),
            unmasked=(),
            ended=last is not None,
            finished=last is not None or len(tokens) == self._num_tokens,
            prompt_ids=self._before,
            seed=self._seed,
        )
