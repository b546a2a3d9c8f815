"""The golden check: a short text and some of its logits, which the server compares at load."""

from functools import cached_property

import numpy as np
import torch

from maskdial.bundle.manifest import GoldenCheck
from maskdial_export.checks.parity import expected_output, expected_text
from maskdial_export.golden_check import TEXT, golden_check
from maskdial_export.model import Checkpoint
from maskdial_export.session import (
    CausalSession,
    EncoderDecoderSession,
    Floats,
    Graph,
    MaskedSession,
)


class Golden:
    """The tokens of the text, and the output row that is checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        longest = checkpoint.max_length
        if checkpoint.text_to_text is not None:
            longest = checkpoint.text_to_text.max_source_length
        self.ids = checkpoint.tokenizer.encode(TEXT).ids[:longest] or [0]
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
        """The check for the manifest; see `golden_check`."""
        return golden_check(self.ids, self.row, logits, tolerance, of_kernels, centered=centered)
