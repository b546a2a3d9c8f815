"""What would read the padding: attention does not, as it is masked by the lengths.

Models that join neighboring tokens see zeros where a row is padded, as at a text's end:
MobileBERT's embeddings of three tokens and ConvBERT's convolutions would reach beyond the last
token. Models that summarize a text by its last token, or by the mean, get its own tokens only.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.checkpoint.pooling import POOLINGS

_SUMMARIES = {"last": "last", "cls_index": "last", "mean": "mean"}  # where not by the first token


@contextmanager
def cleared(model: PreTrainedModel, valid: Tensor) -> Iterator[None]:
    """Clears the padding before tokens are joined inside the block; ``valid``: (batch, length)."""
    rows = valid[:, :, None]

    def clear_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * rows.to(output.dtype)

    def clear_input(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * rows.transpose(1, 2).to(args[0].dtype),)  # (batch, channels, length)

    with ExitStack() as hooks:
        if getattr(model.config, "trigram_input", False):
            _hook(hooks, model.get_input_embeddings().register_forward_hook, clear_output)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
                _hook(hooks, module.register_forward_pre_hook, clear_input)
            elif name.endswith(".conv_out_layer"):  # is unfolded
                _hook(hooks, module.register_forward_hook, clear_output)
        yield


@contextmanager
def summarized(model: PreTrainedModel, lengths: Tensor) -> Iterator[None]:
    """Lets sequence summaries (XLNet's, XLM's) read the tokens of each text inside the block."""

    def summarize(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pooled = POOLINGS[_SUMMARIES[module.summary_type]](args[0], lengths)
        return pooled[:, None].to(args[0].dtype), *args[1:]

    with ExitStack() as hooks:
        for module in model.modules():
            if getattr(module, "summary_type", None) in _SUMMARIES:
                _hook(hooks, module.register_forward_pre_hook, summarize)
        yield


def _hook(hooks: ExitStack, register: Callable[..., Any], hook: Callable[..., Any]) -> None:
    hooks.callback(register(hook).remove)
