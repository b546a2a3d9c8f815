"""The head that an adapter brings for its base: what follows the hidden states, as a graph.

The transformers class with the head is loaded with the adapter merged into it. Its body is then
replaced by hidden states that are given, so that the rest is computed by the class's own code.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from maskdial.bundle.manifest import ProblemType
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.errors import ExportError
from maskdial_export.tracing.graph import optimize, to_onnx_ir
from maskdial_export.tracing.masked import head_logits

HeadTask = Literal["classify", "token-classify"]
ReadRows = Literal["first", "last", "all"]

TASKS: Mapping[str, HeadTask] = {"SEQ_CLS": "classify", "TOKEN_CLS": "token-classify"}
"""The task by PEFT's name for it."""
_MAX_LABELS = 2**20
_CLOSE = 1e-5
_LENGTH = 5  # of the texts by which is found what a head reads


class Labels(NamedTuple):
    """The names of a head's labels, and the problem type if one is named."""

    names: tuple[str, ...]
    problem_type: ProblemType | None


def read_labels(adapter: Path, checkpoint: Path) -> Labels:
    """The labels of an adapter.

    PEFT saves neither. They are in a config.json beside the adapter's weights, or in that of the
    checkpoint, as transformers writes them.

    Raises:
        ExportError: neither has labels.
    """
    for folder in (adapter, checkpoint):
        config = read_json(folder / "config.json")
        names, count = config.get("id2label"), config.get("num_labels")
        if names is None and isinstance(count, int) and 0 < count <= _MAX_LABELS:
            names = {str(index): f"LABEL_{index}" for index in range(count)}
        if names is None:
            continue
        kind = config.get("problem_type")
        keys = [str(index) for index in range(len(names))] if isinstance(names, dict) else []
        if not keys or not all(isinstance(names.get(key), str) for key in keys):
            raise ExportError(f"id2label in {folder / 'config.json'} is not a name for each number")
        if kind not in (None, *get_args(ProblemType)):
            raise ExportError(f"problem_type in {folder / 'config.json'} is none: {kind!r}")
        return Labels(tuple(names[key] for key in keys), kind)
    raise ExportError(
        f"{adapter} does not name its labels, nor does the checkpoint: put the config.json of the "
        "trained model there, with id2label"
    )


class _Given:
    """What the body returns: no attribute of a module, which tracing may not assign to."""

    hidden: Tensor


class AdapterHead(nn.Module):
    """What a model makes of hidden states that its body is not asked for.

    Args:
        model: loses its body, except what follows the hidden states there.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        body: Any = model.base_model
        for name, _ in list(body.named_children()):
            if not name.startswith("pooler"):
                setattr(body, name, nn.Identity())
        body.forward = self._body
        self.model = model
        self._given = _Given()
        pad = getattr(model.config, "pad_token_id", None) or 0
        self._token = (pad + 1) % model.config.vocab_size

    def _body(self, *_args: Any, **_kwargs: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        hidden = self._given.hidden
        body: Any = self.model.base_model
        pooled = None
        if getattr(body, "pooler", None) is not None:
            pooled = body.pooler(hidden)
            if hasattr(body, "pooler_activation"):  # ALBERT's pooler is a layer alone
                pooled = body.pooler_activation(body.pooler(hidden[:, 0]))
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Of (num_rows, hidden_size): (num_labels,), or (num_rows, num_labels) of tokens."""
        self._given.hidden = hidden[None]
        tokens = torch.full((1, hidden.shape[0]), self._token)
        logits = head_logits(self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)))
        return logits[0].float()

    def covers(self, name: str) -> bool:
        """Whether a module or a weight belongs to the head."""
        module = name if name in dict(self.model.named_modules()) else name.rpartition(".")[0]
        found = dict(self.model.named_modules()).get(module)
        return module != "" and found is not None and any(True for _ in found.parameters())

    def read_rows(self, task: HeadTask) -> ReadRows:
        """Which tokens of a text the head reads, found by trial."""
        if task == "token-classify":
            return "all"
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(_LENGTH, self.model.config.hidden_size, generator=generator)
        with torch.no_grad():
            whole = self(hidden)
            if torch.allclose(whole, self(hidden[:1]), rtol=_CLOSE, atol=_CLOSE):
                return "first"
            alike = torch.allclose(whole, self(hidden[-1:]), rtol=_CLOSE, atol=_CLOSE)
            return "last" if alike else "all"

    def trace(self, rows: ReadRows) -> ir.Model:
        """The graph, as `maskdial.bundle.adapter.AdapterHead` describes it."""
        num_rows = _LENGTH if rows == "all" else 1
        hidden = torch.zeros(num_rows, self.model.config.hidden_size)
        shapes = {"hidden": {0: torch.export.Dim.DYNAMIC} if rows == "all" else {}}
        return optimize(to_onnx_ir(self, {"hidden": hidden}, shapes, ["hidden"], ["logits"]))
