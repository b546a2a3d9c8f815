"""Parity of models that write canvases: two passes over texts that end in one.

The second pass reads what torch made of the first. transformers' own code computes what is
expected, with its encoder, its cache and its decoder.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maskdial.bundle.manifest import Denoising, ParityReport
from maskdial_export.checkpoint.block_diffusion import CanvasModel
from maskdial_export.checks.parity import Judge, Measured, identical, random_texts
from maskdial_export.checks.reach import NEAR, Reach
from maskdial_export.session import CanvasSession, Floats, Graph, Ids

_PROMPTS = (40, 13, 1, 26)
_CANVAS = 24  # tokens; of more, the logits of a large vocabulary would take gigabytes


class CanvasParity:
    """Parity of a graph that reads a prompt and the canvas behind it."""

    def __init__(
        self,
        model: CanvasModel,
        graph: Graph,
        max_length: int,
        denoising: Denoising,
        reach: Reach = NEAR,
    ) -> None:
        self.model = model
        self.reach = reach
        self.denoising = denoising
        self.session = CanvasSession(graph)
        self.num_canvas = min(denoising.canvas_length, _CANVAS, max_length - 1)
        config: Any = model.config
        longest = max_length - self.num_canvas
        self.texts = random_texts(config, _PROMPTS, longest, self.num_canvas)
        self.far: list[Ids] = []
        if reach.length is not None:
            prompt = min(reach.length, longest)
            self.far = random_texts(config, [prompt], longest, self.num_canvas)
        spread = np.linspace(denoising.t_min, denoising.t_max, len(self.texts) + 1)[1:]
        self.temperatures = spread.tolist()

    def _expect(self, texts: Sequence[Ids]) -> tuple[list[Floats], list[Floats]]:
        """torch's output in two passes, (num_canvas, vocab_size + hidden_size) for each text."""
        first, second = [], []
        columns = self.model.config.vocab_size
        for text, temperature in zip(texts, self.temperatures, strict=False):
            self.reach.restore()
            ids = torch.from_numpy(text[None])
            once = self.model.read(ids, self.num_canvas, None, temperature)
            soft = once[None, :, :columns] / temperature
            twice = self.model.read(ids, self.num_canvas, soft, temperature)
            first.append(once.numpy())
            second.append(twice.numpy())
        return first, second

    def _run(self, texts: Sequence[Ids], soft: Sequence[Floats]) -> list[Floats]:
        given = self.temperatures[: len(texts)]
        return self.session.run(texts, soft, given)

    def _soft(self, outputs: Sequence[Floats]) -> list[Floats]:
        return [np.ascontiguousarray(each[:, self.model.config.vocab_size :]) for each in outputs]

    def measure(self, tolerance: float) -> Measured:
        """Compares with torch; raises ExportError if outputs differ by more than the tolerance."""
        first, second = self._expect(self.texts)
        judge = Judge(tolerance, [*first, *second])
        nothing = [np.zeros_like(each) for each in self._soft(first)]
        once = judge.difference("a first pass", first, self._run(self.texts, nothing))
        together = self._run(self.texts, self._soft(first))
        report = ParityReport(
            tolerance=judge.tolerance,
            ragged_batch=max(once, judge.difference("a second pass", second, together)),
            long_text=self._read_far(judge),
        )
        return Measured(report, identical(together, self._alone(self._soft(first))))

    def _read_far(self, judge: Judge) -> float | None:
        if not self.far:
            return None
        first, second = self._expect(self.far)
        return judge.difference(self.reach.title, second, self._run(self.far, self._soft(first)))

    def batch_invariant(self) -> bool:
        """Whether each row has the same bits in a batch as alone; torch is not asked."""
        soft = self._soft(self._expect(self.texts)[0])
        return identical(self._run(self.texts, soft), self._alone(soft))

    def _alone(self, soft: Sequence[Floats]) -> list[Floats]:
        parts = zip(self.texts, soft, self.temperatures, strict=True)
        return [self.session.run([text], [each], [t])[0] for text, each, t in parts]
