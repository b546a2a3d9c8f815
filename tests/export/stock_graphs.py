"""Folders as optimum leaves them: a graph of ONNX with its names, and no weights beside it."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

TASKS = {
    "Model": ("last_hidden_state",),
    "ForMaskedLM": ("logits",),
    "ForSequenceClassification": ("logits",),
    "ForTokenClassification": ("logits",),
    "ForQuestionAnswering": ("start_logits", "end_logits"),
}
_SIZES = {0: "batch_size", 1: "sequence_length"}


class _Traced(torch.nn.Module):
    """A model whose arguments are the graph's inputs, in their order."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, *values: torch.Tensor) -> Any:
        given = dict(zip(self.inputs, values, strict=True))
        if "attention_mask" not in given:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        found = self.model(**given)
        if self.outputs == ("sentence_embedding",):
            mask = given["attention_mask"][:, :, None].float()
            total = (found.last_hidden_state * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(total, dim=1)
        return tuple(getattr(found, name) for name in self.outputs)


def write_graph(
    folder: Path,
    graph: Path,
    *,
    inputs: Sequence[str] = ("input_ids", "attention_mask", "token_type_ids"),
    outputs: Sequence[str] = (),
    opset: int = 14,
    is_dynamic: bool = True,
) -> Path:
    """Writes the graph of a checkpoint by torch's tracer, as optimum does; returns it.

    Args:
        folder: the checkpoint.
        graph: the file.
        inputs: the graph's.
        outputs: the graph's; none for those of its class.
        opset: the version of its operators.
        is_dynamic: whether it takes batches of any shape.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = config.architectures[0]
    made = getattr(transformers, architecture)
    model = made.from_pretrained(folder, attn_implementation="eager").eval()
    kind = "Model" if architecture.endswith("Model") else f"For{architecture.rpartition('For')[2]}"
    outputs = tuple(outputs or TASKS[kind])
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    values = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(4).expand(2, 4).contiguous(),
    }
    graph.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Traced(model, inputs, outputs),
            tuple(values[name] for name in inputs),
            str(graph),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=dict.fromkeys((*inputs, *outputs), _SIZES) if is_dynamic else None,
            opset_version=opset,
            dynamo=False,
        )
    return graph


def without_weights(folder: Path) -> Path:
    """The same folder without its weights in safetensors."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder
