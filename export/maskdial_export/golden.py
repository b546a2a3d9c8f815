"""The golden check: a short text and some of its logits, which the server compares at load."""

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from maskdial.bundle.manifest import GoldenCheck
from maskdial_export.checks.parity import expected_output, expected_text
from maskdial_export.model import Checkpoint
from maskdial_export.session import (
    CausalSession,
    EncoderDecoderSession,
    Floats,
    Graph,
    MaskedSession,
)

_TEXT = "The door opened, and there stood the owner of the house."
_NUM_BEST, _NUM_SPREAD = 5, 11
# Another CPU rounds differently from the exporting one, so it gets more room than two libraries on
# the same CPU.
SLACK = 10.0
_QUANTIZED_SLACK = 4.0
_HALF_SLACK = 8.0


class Golden:
    """The tokens of the text, and the output row that is checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        longest = checkpoint.max_length
        if checkpoint.text_to_text is not None:
            longest = checkpoint.text_to_text.max_source_length
        self.ids = checkpoint.tokenizer.encode(_TEXT).ids[:longest] or [0]
        self.row = 0
        if checkpoint.denoising is not None:
            self.row = len(self.ids) - 1
        if checkpoint.text_to_text is not None:
            self.start = checkpoint.text_to_text.start_token_id
        elif checkpoint.kv is not None:
            self.row = len(self.ids) - 1
        elif checkpoint.task == "fill-mask" and checkpoint.tokens.mask is not None:
            self.row = len(self.ids) // 2
            self.ids[self.row] = checkpoint.tokens.mask

    @cached_property
    def expected(self) -> Floats:
        """torch's logits of the row, (columns,)."""
        if self.checkpoint.text_to_text is not None:
            model, start = self.checkpoint.model, np.array([self.start])
            return self._checked(expected_text(model, np.array(self.ids), start))
        if self.checkpoint.denoising is not None:  # the last token is the canvas
            text = torch.tensor([self.ids])
            return self._checked(self.checkpoint.model.read(text, 1, None, 1.0)[0].numpy())
        inputs = {"input_ids": torch.tensor([self.ids])}
        return self._checked(expected_output(self.checkpoint.model, self.checkpoint.pooler, inputs))

    def halved(self) -> Floats:
        """torch's logits of the row in float16."""
        return Golden(self.checkpoint.half()).expected.astype(np.float32)

    def computed(self, graph: Graph) -> Floats:
        """ONNX Runtime's logits of the row."""
        ids = np.array(self.ids)
        if self.checkpoint.kv is None:
            return self._checked(MaskedSession(graph).run([ids])[0])
        if self.checkpoint.text_to_text is not None:
            pair = EncoderDecoderSession(graph, self.checkpoint.kv, 1, 1, len(ids))
            pair.encode(0, [ids])
            return self._checked(pair.step([0], [self.start]))
        session = CausalSession(graph, self.checkpoint.kv, slots=1, room=len(ids))
        return self._checked(session.run(0, [ids])[0])

    def _checked(self, output: Floats) -> Floats:
        row: Floats = output[self.row] if output.ndim == 2 else output
        return row

    def check(
        self,
        logits: Floats,
        tolerance: float,
        of_kernels: Floats | None = None,
        *,
        centered: bool = False,
    ) -> GoldenCheck:
        """The check for the manifest: the largest logits and some spread over the rest.

        ``of_kernels`` are those that the server's kernels compute; ``centered``: whether the
        tolerance is that of logits less their mean.
        """
        best = np.argsort(-logits)[:_NUM_BEST]
        spread = np.linspace(0, len(logits) - 1, min(_NUM_SPREAD, len(logits)), dtype=np.int64)
        columns = np.union1d(best, spread)
        return GoldenCheck(
            input_ids=tuple(self.ids),
            row=self.row,
            columns=tuple(columns.tolist()),
            logits=tuple(logits[columns].tolist()),
            kernel_logits=None if of_kernels is None else tuple(of_kernels[columns].tolist()),
            centered=centered,
            tolerance=tolerance,
        )


def quantized_tolerance(
    before: Floats, computed: Sequence[Floats], fp32: float, *, centered: bool = False
) -> float:
    """How far a quantized graph's logits may drift on another machine; at least ``fp32``.

    ``centered``: less their mean. A shift of all logits is most of what differs in SmolLM2-135M's
    int8, where a tolerance that has room for it is 1.7 instead of 0.6; a missing layer moves
    logits by 3 or more.

    Four times the largest root mean square of the differences between what this machine computes:
    from fp32, and of the kernels from ONNX Runtime's operators. fp32's tolerance would be too
    narrow: where another CPU computes the last bits of a float differently, an activation now and
    then rounds to the other integer, and that tips more of them in later layers. In a deep model
    (seen in BERT-base) two correct machines differ as much as each differs from fp32. Saturating
    kernels can do less harm than that to one text; the kernel check finds them.
    """
    pairs = itertools.combinations([before, *computed], 2)
    measure = _deviation if centered else _root_mean_square
    return max(_QUANTIZED_SLACK * max(measure(a - b) for a, b in pairs), fp32)


def half_tolerance(exact: Floats, halves: Sequence[Floats], fp32: float) -> float:
    """How far a float16 graph's logits may drift on another provider; at least ``fp32``.

    Eight times the root mean square of the change by float16, the largest of ``halves`` (the logits
    of float16 on this machine), and at least two float16 steps at the largest logit. Kernels sum in
    different orders and round at different places: on the CPU, ONNX Runtime computes much in
    float32 and is closer to fp32 than torch is. Measured on 17 models of 0.1M to 135M parameters
    with 24 texts each: torch's float16 differs from ONNX Runtime's by up to 4.4 times the average
    difference of either from fp32.
    """
    change = max(_root_mean_square(half - exact) for half in halves)
    step = np.spacing(np.abs(exact).max().astype(np.float16))
    return max(_HALF_SLACK * change, 2 * float(step), fp32)


def _deviation(values: Floats) -> float:
    return float(np.std(values, dtype=np.float64))


def _root_mean_square(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
