"""Tracing causal models, and the layout of their KV cache."""

import inspect
import re
from contextlib import ExitStack
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial_export.checkpoint.decision import Decider
from maskdial_export.errors import ExportError
from maskdial_export.tracing.attention import CausalAttention, attending
from maskdial_export.tracing.graph import gather_rows, to_onnx_ir, trunk
from maskdial_export.tracing.hidden import HiddenStates
from maskdial_export.tracing.recurrence import Recurrence, is_traceable, recurring
from maskdial_export.tracing.repeat import trace_by_layers
from maskdial_export.tracing.survey import Survey

# Layers of transformers that carry a state from token to token; most others have a convolution
_RECURRENT = re.compile(
    r"Mamba|SSM|Rwkv|xLSTM|Lightning|Recurrent|DeltaNet|DeltaAttention|ShortConv"
)

# Layers that attend by code of their own, which no graph's mask or cache takes the place of
_OWN_ATTENTION = re.compile(
    r"(BigBirdPegasus(Self|BlockSparse)|LongT5(Local|TransientGlobal)|LEDEncoderSelf"
    r"|PegasusXGlobalLocal|ProphetNetNgramSelf|DiffLlama)Attention|FSMTDecoder"
)
# What a text model has within it for images and sound, as Phi-4-multimodal does; it reads no text
_TOWERS = re.compile(r"(^|\.)\w*(vision|image|audio|video)\w*")
# Mixtures of experts of encoder-decoder models, which are not computed as others are
_OWN_EXPERTS = re.compile(r"SwitchTransformersLayerFF|NllbMoeSparseMLP")


def check(model: PreTrainedModel) -> None:
    """Refuses models with layers whose state from token to token the graph cannot carry, or that
    attend or choose experts by code of their own.

    Raises:
        ExportError: there is such a layer; the message names its class.
    """
    for name, module in model.named_modules():
        if _TOWERS.search(name):
            continue
        if _OWN_ATTENTION.fullmatch(type(module).__name__):
            raise ExportError(
                f"{type(model).__name__} is not supported: {name} is a {type(module).__name__}, "
                "which does not attend through transformers' attention interface"
            )
        if isinstance(module, PreTrainedModel) or is_traceable(module):
            continue
        if _OWN_EXPERTS.fullmatch(type(module).__name__):
            raise ExportError(
                f"{type(model).__name__} is not supported: its mixture of experts ({name} is a "
                f"{type(module).__name__}) is not one that can be exported"
            )
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves or _RECURRENT.search(type(module).__name__):
            raise ExportError(
                f"{type(model).__name__} keeps a state from token to token ({name} is a "
                f"{type(module).__name__}), which the exported graph cannot carry"
            )


def kv_layout(survey: Survey, dtype: torch.dtype = torch.float32) -> KVLayout:
    """The KV cache that the exported graph of a ``dtype`` model reads and writes.

    Raises:
        ExportError: the model has no such cache.
    """
    if not survey.causal:
        raise ExportError("each token of this model attends to later ones, so it cannot generate")
    if not survey.layers and not survey.states:
        raise ExportError(
            "the layers of this model do not attend through transformers' attention interface, so "
            "they cannot be given a KV cache"
        )
    if any(layer.value_dim > layer.head_dim for layer in survey.layers):
        raise ExportError("the values of this model are larger than its keys, which have no cache")
    return KVLayout(
        layers=tuple(Heads(layer.num_kv_heads, layer.head_dim) for layer in survey.layers),
        dtype="float16" if dtype == torch.float16 else "float32",
        states=survey.states,
    )


def can_continue(model: PreTrainedModel, survey: Survey) -> bool:
    """Whether the graph can go on with a text from what it keeps of the tokens before."""
    try:
        check(model)
        kv_layout(survey)
    except ExportError:
        return False
    return True


class CausalGraph(nn.Module):
    """A causal model with the inputs and outputs that `maskdial.bundle.bundle` documents.

    With ``hidden``, these are also hidden states of all tokens.
    """

    def __init__(
        self, model: PreTrainedModel, survey: Survey, hidden: HiddenStates | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.hidden = hidden
        self.attention = CausalAttention(survey.layers)
        self.recurrence = Recurrence()
        # The head of a decision model hands everything to what it stands on
        reader: Any = model.model if isinstance(model, Decider) else model
        self.numbers_positions = "position_ids" in inspect.signature(reader.forward).parameters

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        rows: Tensor,
        lengths: Tensor,
        past: list[tuple[Tensor, Tensor]],
        states: list[Tensor],
        previous_hidden: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
        self.attention.begin(past, seqlens_k, total_sequence_length)
        settings: dict[str, Any] = {"position_ids": position_ids} if self.numbers_positions else {}
        if states:
            self.recurrence.begin(states, lengths, input_ids.shape[1])
            settings["use_cache"] = False  # of transformers, whose layers would fill it
        if previous_hidden is not None:
            settings["previous_hidden"] = previous_hidden
        with gather_rows(trunk(self.model), rows) as read, ExitStack() as noting:
            noted = {} if self.hidden is None else noting.enter_context(self.hidden.noted())
            output = self.model(input_ids=input_ids, **settings)
        present = self.attention.present, self.recurrence.present
        hidden = [] if self.hidden is None else [self.hidden(noted, read[0])]
        return output.logits.squeeze(0).float(), *present, hidden


def trace(
    model: PreTrainedModel,
    survey: Survey,
    hidden: HiddenStates | None = None,
    *,
    previous_size: int = 0,
) -> ir.Model:
    """Traces a causal model, float32 or float16, for any batch, length and cache size.

    Args:
        model: the model.
        survey: of the model.
        hidden: the hidden states of all tokens that are an output. Default: none.
        previous_size: the columns of the input ``previous_hidden``, for a model that reads
            another's hidden states.
    """
    graph = CausalGraph(model, survey, hidden)
    layout = kv_layout(survey)
    with attending(model, survey, graph.attention), recurring(model, graph.recurrence):
        return trace_by_layers(
            model, survey, graph, lambda count: _trace(graph, layout, count, previous_size)
        )


def _trace(graph: CausalGraph, layout: KVLayout, num_layers: int, previous_size: int) -> ir.Model:
    batch, length, room = 2, 5, 11
    empties = [
        torch.zeros(batch, heads.num_heads, room, heads.head_dim, dtype=graph.model.dtype)
        for heads in layout.layers[:num_layers]
    ]
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(batch, length),
        "seqlens_k": torch.full((batch,), length - 1, dtype=torch.int32),
        "total_sequence_length": torch.tensor(length, dtype=torch.int32),
        "rows": torch.tensor([4, 8, 9]),
        "lengths": torch.full((batch,), length, dtype=torch.int32),
        "past": [(empty, empty.clone()) for empty in empties],
        "states": [torch.zeros(batch, *shape) for shape in layout.states],
    }
    dynamic = torch.export.Dim.DYNAMIC
    past_shape = ({0: dynamic, 2: dynamic}, {0: dynamic, 2: dynamic})
    shapes: dict[str, Any] = {
        "input_ids": {0: dynamic, 1: dynamic},
        "position_ids": {0: dynamic, 1: dynamic},
        "seqlens_k": {0: dynamic},
        "total_sequence_length": {},
        "rows": {0: dynamic},
        "lengths": {0: dynamic},
        "past": [past_shape] * num_layers,
        "states": [{0: dynamic}] * len(layout.states),
    }
    if previous_size:
        inputs["previous_hidden"] = torch.zeros(batch, length, previous_size)
        shapes["previous_hidden"] = {0: dynamic, 1: dynamic}
    layers = range(num_layers)
    pasts = [name for i in layers for name in (f"past_key.{i}", f"past_value.{i}")]
    presents = [name for i in layers for name in (f"present_key.{i}", f"present_value.{i}")]
    states = range(len(layout.states))
    input_names = [*list(inputs)[:6], *pasts, *(f"past_state.{i}" for i in states)]
    input_names += ["previous_hidden"] * bool(previous_size)
    output_names = ["logits", *presents, *(f"present_state.{i}" for i in states)]
    output_names += ["hidden"] * (graph.hidden is not None)
    return to_onnx_ir(graph, inputs, shapes, input_names, output_names)
