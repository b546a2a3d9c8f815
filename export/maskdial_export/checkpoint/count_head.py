"""The queries of a GLiNER2 task's fields, for each occurrence: a GRU over the occurrences.

The GRU starts from a field's hidden state and reads a vector for each occurrence. In `count_lstm`
two layers follow, in `count_lstm_v2` a small transformer in which the fields of an occurrence
attend to each other, in `count_lstm_moe` experts whose outputs a router weighs. The last product of
the spans is applied to the query instead of to each span
(`maskdial_export.checkpoint.entity_heads`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from maskdial_export.checkpoint.entity_heads import Weights

_COUNT = "count_embed."
_SPANS = "span_rep_layer.span_rep_layer.out_project.3."
_NUM_HEADS = 4


class CountHead(nn.Module):
    """From the hidden states of a task's fields (num_fields, hidden_size) and the numbers of the
    occurrences (num_steps,) to (num_steps, num_fields, columns): a query and a bias each.
    """

    output = "queries"

    def __init__(self, stored: Weights, kind: str) -> None:
        super().__init__()
        self.positions = nn.Parameter(stored[f"{_COUNT}pos_embedding.weight"])
        self.gru = nn.GRU(self.positions.shape[1], self.positions.shape[1])
        of_gru = f"{_COUNT}gru."
        self.gru.load_state_dict(
            {n.removeprefix(of_gru): each for n, each in stored.items() if n.startswith(of_gru)}
        )
        self.mix: nn.Module = COUNTING_LAYERS[kind](stored)
        self.query = nn.Parameter(stored[f"{_SPANS}weight"])
        self.bias = nn.Parameter(stored[f"{_SPANS}bias"])

    def forward(self, fields: Tensor, steps: Tensor) -> Tensor:
        inputs = self.positions[steps][:, None].expand(-1, fields.shape[0], -1)
        labels = self.mix(self._states(inputs, fields), fields)
        return torch.cat([labels @ self.query, labels @ self.bias[:, None]], dim=-1)

    def example(self, size: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs of so many fields and occurrences."""
        num_fields, num_steps = size
        fields = torch.randn(num_fields, self.gru.hidden_size, generator=generator)
        return {"fields": fields, "steps": torch.arange(min(num_steps, len(self.positions)))}

    def _states(self, inputs: Tensor, fields: Tensor) -> Tensor:
        """The GRU's states (num_steps, num_fields, hidden_size)."""
        if not torch.onnx.is_in_onnx_export():
            states: Tensor = self.gru(inputs, fields[None])[0]
            return states
        width = self.gru.hidden_size
        weights = []
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            given = getattr(self.gru, name)
            # torch has the gates in the order r, z, n, ONNX as z, r, n
            gates = given.view(3, width, *given.shape[1:])[[1, 0, 2]]
            weights.append(gates.flatten(0, 1)[None])
        output = torch.onnx.ops.symbolic(
            "GRU",
            [inputs, weights[0], weights[1], torch.cat(weights[2:], dim=1), None, fields[None]],
            {"hidden_size": width, "linear_before_reset": 1},
            dtype=torch.float32,
            shape=(inputs.shape[0], 1, inputs.shape[1], width),
        )
        return output[:, 0]


class _Projector(nn.Module):
    def __init__(self, stored: Weights) -> None:
        super().__init__()
        self.layers = _layers(stored, f"{_COUNT}projector.0", f"{_COUNT}projector.2")

    def forward(self, states: Tensor, fields: Tensor) -> Tensor:
        both = torch.cat([states, fields[None].expand_as(states)], dim=-1)
        projected: Tensor = self.layers(both)
        return projected


class _Downscaled(nn.Module):
    """A transformer of fewer columns, beside its input."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        name = f"{_COUNT}transformer."
        blocks = f"{name}transformer.layers."
        numbers = {n.removeprefix(blocks).split(".")[0] for n in stored if n.startswith(blocks)}
        self.inner = _linear(stored, f"{name}in_projector.")
        self.blocks = nn.ModuleList(
            _Block(stored, f"{blocks}{number}.") for number in sorted(numbers, key=int)
        )
        self.outer = _layers(stored, *(f"{name}out_projector.{place}" for place in (0, 2, 4)))

    def forward(self, states: Tensor, fields: Tensor) -> Tensor:
        both = states + fields[None]
        hidden = self.inner(both)
        for block in self.blocks:
            hidden = block(hidden)
        projected: Tensor = self.outer(torch.cat([hidden, both], dim=-1))
        return projected


class _Experts(nn.Module):
    """Two layers for each expert, all of which are computed and weighed."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        self.router = nn.Sequential(
            _linear(stored, f"{_COUNT}router.0."), nn.GELU(), _linear(stored, f"{_COUNT}router.2.")
        )
        self.wide, self.narrow = (nn.Parameter(stored[f"{_COUNT}w{place}"]) for place in (1, 2))
        self.biases = nn.ParameterList(stored[f"{_COUNT}b{place}"][:, None] for place in (1, 2))

    def forward(self, states: Tensor, fields: Tensor) -> Tensor:
        weights = self.router(states).softmax(dim=-1)[..., None, None]
        hidden = nn.functional.gelu(states[..., None, None, :] @ self.wide + self.biases[0])
        each = hidden @ self.narrow + self.biases[1]  # (steps, fields, experts, 1, hidden_size)
        mixed: Tensor = (weights * each).sum(dim=2)[..., 0, :]
        return mixed


COUNTING_LAYERS: Mapping[str, type[nn.Module]] = {
    "count_lstm": _Projector,
    "count_lstm_v2": _Downscaled,
    "count_lstm_moe": _Experts,
}


class _Block(nn.Module):
    """torch's TransformerEncoderLayer, whose norms come last."""

    def __init__(self, stored: Weights, name: str) -> None:
        super().__init__()
        self.attended = _linear(stored, f"{name}self_attn.in_proj_")
        self.output = _linear(stored, f"{name}self_attn.out_proj.")
        self.wide = _linear(stored, f"{name}linear1.")
        self.narrow = _linear(stored, f"{name}linear2.")
        self.norms = nn.ModuleList(_norm(stored, f"{name}norm{place}.") for place in (1, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        width = hidden.shape[-1] // _NUM_HEADS
        heads = self.attended(hidden).unflatten(-1, (3, _NUM_HEADS, width)).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]
        weights = (query * width**-0.5) @ key.transpose(-1, -2)
        mixed = (weights.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        hidden = self.norms[0](hidden + self.output(mixed))
        out: Tensor = self.norms[1](hidden + self.narrow(torch.relu(self.wide(hidden))))
        return out


def _layers(stored: Weights, *names: str) -> nn.Sequential:
    """Products with ReLU between them."""
    layers: list[nn.Module] = []
    for name in names:
        layers += [nn.ReLU(), _linear(stored, f"{name}.")]
    return nn.Sequential(*layers[1:])


def _linear(stored: Weights, name: str) -> nn.Linear:
    weight, bias = stored[f"{name}weight"], stored[f"{name}bias"]
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


def _norm(stored: Weights, name: str) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(stored[f"{name}weight"]))
    norm.weight = nn.Parameter(stored[f"{name}weight"])
    norm.bias = nn.Parameter(stored[f"{name}bias"])
    return norm
