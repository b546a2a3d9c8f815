"""Reference: what torch makes of a checkpoint, at the precision of a bundle and at a finer one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from loadtests.errors import LoadTestError

_TYPES = {"fp16": (torch.float16, torch.float32), "fp32": (torch.float32, torch.float64)}


class Reference:
    """A checkpoint in torch, twice. Log-probabilities are natural, float64 (vocab_size,)."""

    def __init__(self, checkpoint: Path, precision: str, provider: str) -> None:
        """``precision`` is one of `arguments.PRECISIONS`, ``provider`` cpu or cuda.

        Raises:
            LoadTestError: torch has no such device, or there is no such checkpoint.
        """
        if provider == "cuda" and not torch.cuda.is_available():
            raise LoadTestError("torch finds no GPU here; --provider cpu does without")
        self._device = provider
        kind, finer = _TYPES[precision]
        self._model = self._load(checkpoint, kind)
        self._finer = self._load(checkpoint, finer)

    def _load(self, checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=dtype, local_files_only=True
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise LoadTestError(f"{checkpoint} is no causal checkpoint: {reason}") from error
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        return model.eval().to(self._device)

    def write(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest tokens, one after the other, whether or not one ends the text."""
        ids = torch.tensor([prompt], device=self._device)
        with torch.no_grad():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens
            )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def logprobs(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Of the next token, at the precision of the bundle."""
        return self._logprobs(self._model, text)

    def finer_logprobs(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Of the next token, at the next finer precision."""
        return self._logprobs(self._finer, text)

    def _logprobs(self, model: PreTrainedModel, text: Sequence[int]) -> NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.tensor([text], device=self._device)).logits[0, -1]
        logprobs: NDArray[np.float64] = logits.double().log_softmax(0).cpu().numpy()
        return logprobs
