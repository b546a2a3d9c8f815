"""The longest text that a model has positions for."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from maskdial_export.errors import ExportError

_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")
# Rotary embeddings that depend on the text's length. Up to the length of the first training they
# equal the plain ones, so such models are limited to it.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# For models whose positions have no end, such as ALiBi's, if config.json names none
_UNBOUNDED = 2048


def check_sizes(model: PreTrainedModel) -> None:
    """Refuses models that have no vocabulary and no single width, by which graphs are described.

    Raises:
        ExportError: a size is missing.
    """
    config: Any = model.config
    widths = (
        "hidden_size",
        "d_model",
    )  # where a configuration has other names, it has one of these
    for names, what in ((("vocab_size",), "vocabulary"), (widths, "width of its hidden states")):
        if not any(isinstance(getattr(config, name, None), int) for name in names):
            raise ExportError(
                f"{type(model).__name__} is not supported: its configuration ({config.model_type}) "
                f"has no {what} ({names[0]})"
            )


def max_length(model: PreTrainedModel) -> int:
    """The longest text in tokens; for causal models prompt and generated text together."""
    config: Any = model.config
    given = (getattr(config, name, None) for name in _NAMES)
    positions = next((int(length) for length in given if length and length > 0), _UNBOUNDED)
    lengths = *_plain_rope(config, positions), *_plain_attention(config), *_tables(model)
    return min([positions, *lengths])


def _plain_rope(config: Any, positions: int) -> Iterator[int]:
    """The lengths up to which rotary embeddings do not depend on the text's length."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in parameters.values() if isinstance(each, dict)]
    for rope in by_layer_type or [parameters]:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            beside = getattr(config, "original_max_position_embeddings", None) or positions
            yield int(rope.get("original_max_position_embeddings") or beside)


def _plain_attention(config: Any) -> Iterator[int]:
    """The lengths up to which attention is that of the graph.

    Llama 4's local layers attend within chunks, the others sharpen their scores at later positions.
    BigBird attends to all tokens of short texts, and to random blocks of longer ones; MiniMax M3 to
    as many blocks as it chooses.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        yield (5 + 2 * int(config.num_random_blocks)) * int(config.block_size)
    if chooses_blocks(config):
        yield int(config.index_topk_blocks) * int(config.index_block_size)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:
        yield int(chunk)
    if getattr(config, "attn_temperature_tuning", False):
        yield int(config.floor_scale) - 1


def chooses_blocks(config: Any) -> bool:
    """Whether some layers attend to blocks of tokens that an indexer chooses."""
    kinds = getattr(config, "layer_types", None) or ()
    return hasattr(config, "index_topk_blocks") and any("sparse" in kind for kind in kinds)


def _tables(model: PreTrainedModel) -> Iterator[int]:
    """The rows of position tables that start after the padding token's, as RoBERTa's do."""
    for name, module in model.named_modules():
        padding, table = (getattr(module, each, None) for each in ("padding_idx", "weight"))
        if padding is not None and table is not None and "position" in name.rpartition(".")[2]:
            yield table.shape[0] - int(padding) - 1
