"""What drafts for a model by its hidden states, as a causal model of one layer.

It reads each token together with what the model has of the token before, and predicts the token
after it. `maskdial.bundle.bundle` documents its graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from maskdial.bundle.manifest import KVLayout
from maskdial_export.errors import ExportError
from maskdial_export.session import CausalSession, Floats, Graph
from maskdial_export.tracing import causal
from maskdial_export.tracing.hidden import HiddenStates
from maskdial_export.tracing.survey import Survey

_LENGTH, _CHUNK = 23, 9
_SEED = 20240229


Reference = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head that is exported with its model.

    Attributes:
        kind: of the head.
        model: the head as a causal model, which takes ``previous_hidden``.
        survey: of that.
        of_main: the hidden states of the model that it reads.
        of_itself: its own, which stand for those that the model has not computed yet.
        hidden_size: the columns of both.
        reference: computes in torch, of a text int64 (1, length), the hidden states of all tokens
            but the last, and the logits and own hidden states of all but the first, each
            (length - 1, columns).
        token_ids: int64 (num_columns,), the tokens that its logits stand for; None for all.
        source: its checkpoint, if that is not the model's.
    """

    kind: Literal["mtp", "eagle"]
    model: PreTrainedModel
    survey: Survey
    of_main: HiddenStates
    of_itself: HiddenStates
    hidden_size: int
    reference: Reference
    token_ids: NDArray[np.int64] | None = None
    source: str | None = None

    @property
    def kv(self) -> KVLayout:
        """Its own KV cache."""
        return causal.kv_layout(self.survey)

    @property
    def num_tokens(self) -> int:
        """The tokens of the model."""
        table: Any = self.model.get_input_embeddings()
        return len(table.weight)

    @property
    def num_columns(self) -> int:
        """Of its logits."""
        return self.num_tokens if self.token_ids is None else len(self.token_ids)

    def trace(self) -> ir.Model:
        """Traces it; `maskdial.bundle.bundle` documents inputs and outputs."""
        return causal.trace(self.model, self.survey, self.of_itself, previous_size=self.hidden_size)

    def check(self, graph: Graph, layout: KVLayout, head: Path, tolerance: float) -> None:
        """Compares the fp32 graphs with torch: the hidden states of one text, and what the head
        makes of these, in two pieces over its cache.

        Raises:
            ExportError: they differ by more than the tolerance, which grows with the values.
        """
        ids = np.random.default_rng(_SEED).integers(1, self.num_tokens, _LENGTH)
        with torch.no_grad():
            expected = self.reference(torch.from_numpy(ids[None]))
        session = CausalSession(graph, layout, 1, _LENGTH)
        session.run(0, [ids[:-1]])
        own = CausalSession(head, self.kv, 1, _LENGTH)
        found, last = [], []
        for piece in (slice(_CHUNK), slice(_CHUNK, _LENGTH - 1)):
            found += own.run(0, [ids[1:][piece]], previous_hidden=session.hidden[piece])
            last.append(own.hidden)
        actual = session.hidden, np.concatenate(found), np.concatenate(last)
        names = "the hidden states", "the predictions of its drafts", "the hidden states of these"
        for name, one, other in zip(names, expected, actual, strict=True):
            _compare(name, one.numpy(), other, tolerance)


def _compare(what: str, expected: Floats, actual: Floats, tolerance: float) -> None:
    difference = float(np.abs(expected - actual).max())
    if not difference <= tolerance * max(1.0, float(np.abs(expected).max()) / 10):
        raise ExportError(
            f"ONNX Runtime and torch disagree on {what}: they differ by up to {difference:.2g}"
        )
