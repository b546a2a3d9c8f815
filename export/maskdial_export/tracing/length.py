"""Bounds on the length of texts: rotary tables have a row for every position, and BigBird and
MiniMax M3 attend otherwise in long texts.
"""

from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from maskdial_export.choices import LONGEST
from maskdial_export.phase import finding
from maskdial_export.tracing.positions import chooses_blocks, max_length


def bound_positions(model: PreTrainedModel, requested: int | None, console: Console) -> None:
    """Limits a model's rotary positions to ``requested``; None stands for LONGEST."""
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    kinds = {
        "random blocks (block_sparse)": getattr(config, "attention_type", None) == "block_sparse",
        "blocks that it chooses (index_topk_blocks)": chooses_blocks(config),
    }
    for blocks in (kind for kind, applies in kinds.items() if applies):
        text = f"texts of up to {max_length(model):,} tokens; in longer ones the model attends to "
        finding(console, f"{text}{blocks}, which is not supported")
    rotates = any("rotary" in name for name, _ in model.named_modules())
    limit = requested or LONGEST
    if not rotates or positions is None or positions <= limit:
        return
    if requested is None:
        text = f"texts of up to {limit:,} of {positions:,} tokens; --max-length allows more"
        finding(console, text)
    config.max_position_embeddings = limit
