"""BlockText: a text that is written block by block over the KV cache (block diffusion).

Finished blocks are read under the causal mask, once; the block at work is read under the full one,
in each of its passes, and sees all that comes before it (BD3-LM, arXiv:2503.09573; SDAR,
arXiv:2510.06303). What a token is, the row before it says, as in causal models: the last token
before the block is read with it.
"""

import numpy as np
from numpy.typing import NDArray

from maskdial.runtime.piece import Piece
from maskdial.unmasking.text import TextSoFar, UnmaskedText

MOST_TOKENS = 256
"""Tokens of blocks in a pass. Each may be a mask, whose logits have to have room."""


class BlockText:
    """What a sequence does with its logits in place of drawing the next token.

    Args:
        text: what is written, and how.

    Attributes:
        num_final: tokens whose keys and values in the cache are those of the causal mask.
        num_read: tokens that the last pass has read.
    """

    def __init__(self, text: UnmaskedText) -> None:
        self._text = text
        self.num_final = text.block[0] - 1
        self.num_read = 0

    @property
    def num_next(self) -> int:
        """Tokens that the next pass reads."""
        return self._text.block[1] - self.num_final

    def piece(self, slot: int) -> Piece:
        """What the next pass reads: the block before under the causal mask, if that was not done,
        and the block at work.
        """
        text, start = self._text, self.num_final
        first, end = text.block
        (draft,) = text.canvas.drafts
        positions = np.arange(start, end)
        self.num_read = len(positions)
        return Piece(
            slot,
            np.array(draft.input_ids[start:end], np.int64),
            start,
            np.array(text.unmasker.positions(text.canvas, draft)) - 1 - start,
            np.where(positions >= first - 1, end - 1 - positions, 0),
        )

    def advance(self, logits: NDArray[np.float32]) -> TextSoFar:
        """Fills masks by the logits of a pass, float32 (num_logits, vocab_size).

        Raises:
            InferenceError: they are not finite.
        """
        canvas, unmasker = self._text.canvas, self._text.unmasker
        self.num_final = self._text.block[0] - 1
        (draft,) = canvas.drafts
        positions = unmasker.positions(canvas, draft)
        unmasker.advance(canvas, unmasker.grow(canvas, draft, positions, logits))
        return self._text.so_far()
