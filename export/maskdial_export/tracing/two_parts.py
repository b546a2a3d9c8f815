"""Tracing classifiers with an encoder and a decoder: both read the whole text in one pass.

The decoder reads the text that the encoder read, behind a start token, and the head reads what it
makes of the last end token. There is no cache: the decoder attends to its own tokens causally, and
to the encoder's states, of which there are as many.
"""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, cast

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from maskdial_export.errors import ExportError, first_line
from maskdial_export.tracing.attention import CausalAttention, MaskedAttention
from maskdial_export.tracing.encoder_decoder import numbered
from maskdial_export.tracing.graph import to_onnx_ir
from maskdial_export.tracing.survey import Layer
from maskdial_export.tracing.swap import swapped

_CROSS = re.compile(r"\.(encoder_attn|EncDecAttention|cross_attn)$")
_LENGTH = 9
_TOLERANCE = 1e-5  # of the largest logit


def reads_twice(model: PreTrainedModel) -> bool:
    """Whether a model is a classifier with an encoder and a decoder."""
    parts = (getattr(model.base_model, name, None) for name in ("encoder", "decoder"))
    return hasattr(model, "classification_head") and None not in parts


def select_end(model: PreTrainedModel) -> None:
    """Lets a classifier find the last end token of each text by itself.

    Its own code takes different paths for different numbers of end tokens, and refuses texts in one
    batch that differ in it. Where a text has none, its last token takes the place.

    Raises:
        ExportError: it computes something else now.
    """
    config: Any = model.config
    if None in (config.eos_token_id, config.decoder_start_token_id, config.pad_token_id):
        raise ExportError(
            f"{type(model).__name__} needs eos_token_id, pad_token_id and decoder_start_token_id "
            "in config.json"
        )
    original = model.forward
    model.forward = _forward(model)
    ids = torch.linspace(0, config.vocab_size - 1, _LENGTH).long()[None]
    ids[0, _LENGTH // 2] = config.eos_token_id
    ids[ids == config.pad_token_id] = config.eos_token_id
    try:
        with torch.no_grad():
            expected = original(input_ids=ids).logits
            found = model(input_ids=ids).logits
    except Exception as error:  # models raise any type
        raise ExportError(
            f"{type(model).__name__} cannot run on token ids alone: {first_line(error)}"
        ) from error
    room = _TOLERANCE * max(1.0, float(expected.abs().max()))
    if expected.shape != found.shape or float((expected - found).abs().max()) > room:
        raise ExportError(
            f"{type(model).__name__} does not read a text's class from the decoder's state of the "
            "last end token, which is not supported"
        )


def _forward(model: Any) -> Callable[..., SequenceClassifierOutput]:
    end, start = model.config.eos_token_id, _start_token(model)

    def forward(
        input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> SequenceClassifierOutput:
        batch, longest = input_ids.shape
        valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        final = valid.sum(1, keepdim=True) - 1  # the last token's place
        first = input_ids.gather(1, final) if start is None else torch.full_like(final, start)
        states = model.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=torch.cat([first, input_ids[:, :-1]], 1),
            use_cache=False,
        )[0]
        place = torch.arange(longest)[None, :]
        ends = (input_ids == end) & (place <= final)
        last = torch.where(ends, place, -1).amax(1)
        last = torch.where(last < 0, final[:, 0], last)
        rows = torch.arange(batch) * longest + last
        logits = model.classification_head(states.flatten(0, 1).index_select(0, rows))
        return SequenceClassifierOutput(logits=logits)

    return forward


def _start_token(model: Any) -> int | None:
    """The token that the decoder reads first; None for the text's last one, as in MBART."""
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is not None and "decoder_start_token_id" not in inspect.signature(shift).parameters:
        return None
    return int(model.config.decoder_start_token_id)


class _Attention:
    """Attends as the layer's place says: to all of the text, to what is before, or across."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = cast(nn.Module, model.get_decoder())
        inside = dict(decoder.named_modules())
        self._across = {id(each) for name, each in inside.items() if _CROSS.search(f".{name}")}
        self._before = {id(each) for each in inside.values()} - self._across
        self._all = MaskedAttention(())
        config: Any = model.config
        heads = int(config.num_attention_heads)
        width = int(getattr(config, "d_kv", None) or config.d_model // heads)
        layers = (Layer(heads, heads, width, width, None),)
        self._causal = CausalAttention(layers * len(inside))

    def begin(self, lengths: Tensor, longest: int) -> None:
        """Starts a forward pass; see `MaskedAttention.begin`."""
        self._all.begin(lengths, longest)
        self._causal.begin(None, lengths - 1, torch.full((), longest, dtype=torch.int32))

    def __call__(self, module: nn.Module, *arguments: Any, **settings: Any) -> tuple[Tensor, None]:
        attend = self._causal if id(module) in self._before else self._all
        return attend(module, *arguments, **settings)


class _Graph(nn.Module):
    """The classifier with the inputs and output that `maskdial.bundle.bundle` documents."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.attention = _Attention(model)
        self.pad_token_id = int(model.config.pad_token_id or 0)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        longest = input_ids.shape[1]
        self.attention.begin(lengths, longest)
        valid = torch.arange(longest)[None, :] < lengths[:, None]
        ids = torch.where(valid, input_ids, self.pad_token_id)
        with (
            numbered(self.model.get_encoder(), None, longest),
            numbered(self.model.get_decoder(), None, longest),
            swapped(self.model, self.attention),
        ):
            output = self.model(input_ids=ids, attention_mask=valid.to(torch.int64))
        logits: Tensor = output.logits.float()
        return logits


def trace(model: PreTrainedModel) -> ir.Model:
    """Traces a classifier whose end token is selected (`select_end`), for any batch and length."""
    batch, length = 2, 5
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "lengths": torch.tensor([length, length - 2], dtype=torch.int32),
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {"input_ids": {0: dynamic, 1: dynamic}, "lengths": {0: dynamic}}
    return to_onnx_ir(_Graph(model), inputs, shapes, list(inputs), ["logits"])
