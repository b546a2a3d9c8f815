"""Models that join neighboring tokens see zeros where a row is padded, as at a text's end.

Attention is masked by the lengths, but MobileBERT's embeddings of three tokens and ConvBERT's
convolutions would reach beyond the last token.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


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


def _hook(hooks: ExitStack, register: Callable[..., Any], hook: Callable[..., Any]) -> None:
    hooks.callback(register(hook).remove)
