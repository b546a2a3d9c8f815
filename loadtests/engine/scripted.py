"""ScriptedRunner: a model's passes at their real cost, and a given text as their outcome."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.executor import Cache, ModelRunner

_LEAD = np.float32(10.0)


class ScriptedRunner:
    """Makes greedy decoding write a given text, whatever the model would say.

    What guessing ahead gains depends on the text that is written, and a model with random weights
    writes none that repeats its prompt. So every pass runs as it is, and then the next token of the
    script is made the likeliest. For one sequence at a time, in slot 0.

    Args:
        runner: the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._script: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def cache(self) -> Cache:
        return self._runner.cache

    def follow(self, token_ids: Sequence[int]) -> None:
        """Sets the script: the prompt and the text to write. To be called between two texts."""
        self._script = np.array(token_ids, np.int64)

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        logits = np.array(self._runner.prefill(slot, token_ids, start, num_logits))
        self._direct(logits, start + len(token_ids) - num_logits)
        return logits

    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        raise NotImplementedError("a scripted model reads one prompt at a time")

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        logits = np.array(self._runner.decode(token_ids, lengths, rows))
        self._direct(logits, int(lengths[0]))
        return logits

    def warm_up(self) -> None:
        self._runner.warm_up()

    def _direct(self, logits: NDArray[np.float32], position: int) -> None:
        """Row i of the logits follows the token at ``position + i``."""
        for row, token_id in zip(logits, self._script[position + 1 :], strict=False):
            row[token_id] = row.max() + _LEAD
