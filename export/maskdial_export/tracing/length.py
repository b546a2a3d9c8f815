"""Bounds on the length of texts: rotary tables have a row for every position, and BigBird attends
otherwise in long texts.
"""

from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from maskdial_export.choices import LONGEST
from maskdial_export.phase import finding
from maskdial_export.tracing.positions import max_length


def bound_positions(model: PreTrainedModel, requested: int | None, console: Console) -> None:
    """Limits a model's rotary positions to ``requested``; None stands for LONGEST."""
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        text = f"texts of up to {max_length(model):,} tokens; in longer ones the model attends to "
        finding(console, text + "random blocks (block_sparse), which is not supported")
    rotates = any("rotary" in name for name, _ in model.named_modules())
    limit = requested or LONGEST
    if not rotates or positions is None or positions <= limit:
        return
    if requested is None:
        text = f"texts of up to {limit:,} of {positions:,} tokens; --max-length allows more"
        finding(console, text)
    config.max_position_embeddings = limit
