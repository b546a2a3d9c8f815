"""The golden check: a short text and some of torch's logits for it."""

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from maskdial.bundle import Embedding, GoldenCheck, SpecialTokens, Task
from maskdial_export.parity import expected_output

_TEXT = "The door opened, and there stood the owner of the house."
_NUM_BEST, _NUM_SPREAD = 5, 11
# Another processor rounds otherwise than the one that exported, so it is given more room
# than two libraries on the same one.
_SLACK = 10.0


def golden_check(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    tokens: SpecialTokens,
    task: Task,
    embedding: Embedding | None,
    max_length: int,
    tolerance: float,
) -> GoldenCheck:
    """What the server repeats when it loads the bundle; logits are torch's, in one piece."""
    ids = tokenizer.encode(_TEXT).ids[:max_length] or [0]
    row = 0
    if task == "generate":
        row = len(ids) - 1
    elif task == "fill-mask" and tokens.mask is not None:
        row = len(ids) // 2
        ids[row] = tokens.mask
    output = expected_output(model, embedding, {"input_ids": torch.tensor([ids])})
    values = output[row] if output.ndim == 2 else output
    best = np.argsort(-values)[:_NUM_BEST]
    spread = np.linspace(0, len(values) - 1, min(_NUM_SPREAD, len(values)), dtype=np.int64)
    columns = np.union1d(best, spread)
    return GoldenCheck(
        input_ids=tuple(ids),
        row=row,
        columns=tuple(columns.tolist()),
        logits=tuple(values[columns].tolist()),
        tolerance=_SLACK * tolerance,
    )
