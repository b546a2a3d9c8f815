"""Models with a dense vector, sparse weights and a vector for each token from one pass: BGE-M3.

Chen et al., arXiv:2402.03216, in the layout of FlagEmbedding: two linear layers stand beside the
encoder's weights, ``sparse_linear.pt`` and ``colbert_linear.pt``.
"""

import pickle
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from maskdial.bundle.manifest import Embedding, Hybrid, MultiVector, SpecialTokens
from maskdial_export.checkpoint.hub import HYBRID_HEADS
from maskdial_export.checkpoint.pooling import Normalize, Pooler
from maskdial_export.checkpoint.sentence import read_prompts
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line


class HybridHead(nn.Module):
    """All vectors of each token side by side: (..., columns) to (..., columns + width + 1).

    First what is its text's dense vector if it is the first token, then its own vector, both of
    length 1, then its weight.
    """

    def __init__(self, weigh: nn.Linear, project: nn.Linear) -> None:
        super().__init__()
        self.weigh = weigh
        self.project = project
        self.normalize = Normalize()

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        hidden = hidden.float()
        own = self.normalize(self.project(hidden))
        return torch.cat([self.normalize(hidden), own, self.weigh(hidden).relu()], dim=-1)


def read_hybrid(
    source: Source, columns: int, tokenizer: Tokenizer, tokens: SpecialTokens
) -> Pooler:
    """What follows the hidden states of each token.

    Args:
        source: the checkpoint.
        columns: of a hidden state.
        tokenizer: the checkpoint's.
        tokens: its special tokens.

    Raises:
        ExportError: a file of the heads is damaged or does not fit the encoder.
    """
    sparse, multi_vector = (source.path / name for name in HYBRID_HEADS)
    weigh, project = _linear(sparse, columns), _linear(multi_vector, columns)
    if weigh.out_features != 1:
        raise ExportError(f"{sparse} has {weigh.out_features} outputs; it must have 1")
    prompts, default = read_prompts(source)
    embedding = Embedding(
        dimension=columns,
        pooling="cls",
        normalized=True,
        prompts={"query": "", "document": "", **prompts},
        default_prompt=default,
        multi_vector=MultiVector(),
        hybrid=Hybrid(
            token_dimension=project.out_features,
            unweighted=_unweighted(source, tokenizer, tokens),
        ),
    )
    return Pooler(HybridHead(weigh, project), [], embedding).eval()


def _unweighted(source: Source, tokenizer: Tokenizer, tokens: SpecialTokens) -> tuple[int, ...]:
    """The ids that FlagEmbedding leaves out: those of cls, eos, pad and unk."""
    named = {**source.read_json("special_tokens_map.json")}
    named |= {
        key: each
        for key, each in source.read_json("tokenizer_config.json").items()
        if key.endswith("_token") and each is not None
    }
    found = {token for token in (tokens.pad, *tokens.eos) if token is not None}
    for key in ("cls_token", "eos_token", "pad_token", "unk_token"):
        each = named.get(key)
        text = each.get("content") if isinstance(each, dict) else each
        token = tokenizer.token_to_id(text) if isinstance(text, str) else None
        found |= set() if token is None else {token}
    return tuple(sorted(found))


def _linear(path: Path, columns: int) -> nn.Linear:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weight, bias = state["weight"].float(), state["bias"].float()
    except (OSError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise ExportError(f"{path} has no linear layer: {first_line(error)}") from error
    if weight.ndim != 2 or weight.shape[1] != columns or bias.shape != weight.shape[:1]:
        raise ExportError(
            f"{path} has a weight of the shape {tuple(weight.shape)} and a bias of "
            f"{tuple(bias.shape)}; the weight must have {columns} columns, the bias one value a row"
        )
    with torch.device("meta"):
        linear = nn.Linear(columns, weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
