"""A mixture of experts, as a configuration describes it."""

from dataclasses import dataclass
from typing import Literal

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of experts, one beside the other, of which a token is given some.

    Attributes:
        count: how many there are.
        chosen: how many of them a token's experts are of.
        best: the scores whose sum ranks a group.
        otherwise: the score of the experts of others.
    """

    count: int
    chosen: int
    best: int
    otherwise: float


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of a token, and weighs them.

    Attributes:
        module: its name among those of the mixture.
        scores: the weights: of a softmax over all experts, of one over those that are chosen, or
            a sigmoid of each.
        has_bias: whether its product has one.
        correction: a vector that is added to the scores where they choose and not where they
            weigh, by its name in the mixture; None: there is none.
        normalizes: whether the weights of those that are chosen add up to 1.
        least_sum: what is added to the sum by which that divides.
        factor: what weights are multiplied by; None: nothing.
        groups: those that are chosen first; None: there are none.
        is_sorted: whether the weights are added up from the largest one on.
        scale: a vector that the stream is multiplied by, after a norm without a weight and over
            the root of its width, to be what the router reads; None: that is what experts read.
        expert_scale: a vector with a factor of each expert's weights; None: there is none.
    """

    module: str = "gate"
    scores: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    has_bias: bool = False
    correction: str | None = None
    normalizes: bool = False
    least_sum: float | None = None
    factor: float | None = None
    groups: Groups | None = None
    is_sorted: bool = True
    scale: str | None = None
    expert_scale: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms around a mixture that stands beside an MLP, by their names in the layer.

    Attributes:
        before: of the stream that experts read.
        after: of what they give.
        beside: of what the MLP gives.
    """

    before: str
    after: str
    beside: str


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that computes every token, beside those that are chosen.

    Attributes:
        module: its name in the mixture.
        width: of its gated MLP.
        gate: the module in the mixture whose sigmoid it is multiplied by; None: there is none.
    """

    width: int
    module: str = "shared_expert"
    gate: str | None = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class Fused:
    """How a checkpoint holds the matrices of all experts as two tensors.

    Attributes:
        first: gate and up, (experts, 2 * width, hidden_size), by its name in the mixture.
        second: down, (experts, hidden_size, width).
        is_transposed: whether their last two dimensions are exchanged.
        is_interleaved: whether rows of gate and up take turns.
    """

    first: str = "experts.gate_up_proj"
    second: str = "experts.down_proj"
    is_transposed: bool = False
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss's gate: ``(up + 1) * gate * sigmoid(alpha * gate)``, both within the limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, each an MLP, in place of some layers' MLP.

    Attributes:
        count: how many there are.
        chosen: how many compute a token.
        width: of each.
        layers: whether each layer has them.
        router: what chooses them.
        module: the module in the checkpoint that has them; "" for the layer.
        graph_module: the same in transformers' class.
        names: an expert's matrices in the checkpoint: gate, up and down.
        bias: what is added to the sum of all, by its name in the mixture; None: nothing.
        shared: an expert for every token; None: there is none.
        has_biases: whether the experts' matrices have them.
        clamp: how a gate multiplies; None: as SiLU.
        fused: how a checkpoint may hold all experts in one.
        beside: whether a layer has its MLP, too, and adds both.
        is_gated: whether each has the first of them, as the shared one; otherwise the activation is
            between the others.
        norms: those around them; None: they read what the MLP reads.
        activation: of the gate, or of what is without one.
    """

    count: int
    chosen: int
    width: int
    layers: tuple[bool, ...]
    router: Router = Router()
    module: str = "mlp"
    graph_module: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: SharedExpert | None = None
    has_biases: bool = False
    clamp: Clamp | None = None
    fused: Fused = Fused()
    beside: bool = False
    is_gated: bool = True
    norms: ExpertNorms | None = None
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2"] = "silu"
    bias: str | None = None

    def within(self, layer: str) -> str:
        """The module of a layer's mixture in the checkpoint."""
        return f"{layer}.{self.module}" if self.module else layer

    def within_graph(self, layer: str) -> str:
        """The same in transformers' class."""
        return f"{layer}.{self.graph_module}" if self.graph_module else layer

    def shapes(self, layer: str, hidden: int) -> Shapes:
        """The name and the shape of every weight of a layer's experts."""
        module, (gate, up, down) = self.within(layer), self.names
        router, found = self.router, Shapes()
        if self.norms is not None:
            norms = self.norms.before, self.norms.after, self.norms.beside
            found |= {f"{layer}.{norm}.weight": (hidden,) for norm in norms}
        if router.scale is not None:
            found[f"{module}.{router.scale}"] = (hidden,)
        if router.expert_scale is not None:
            found[f"{module}.{router.expert_scale}"] = (self.count,)
        found[f"{module}.{router.module}.weight"] = (self.count, hidden)
        if self.bias is not None:
            found[f"{module}.{self.bias}"] = (hidden,)
        if router.has_bias:
            found[f"{module}.{router.module}.bias"] = (self.count,)
        if router.correction is not None:
            found[f"{module}.{router.correction}"] = (self.count,)
        for expert in range(self.count):
            one = f"{module}.experts.{expert}"
            for name in (gate, up) if self.is_gated else (up,):
                found[f"{one}.{name}.weight"] = (self.width, hidden)
            found[f"{one}.{down}.weight"] = (hidden, self.width)
            if self.has_biases:
                biases = {gate: self.width, up: self.width, down: hidden}
                found |= {f"{one}.{name}.bias": (size,) for name, size in biases.items()}
        if self.shared is not None:
            one = f"{module}.{self.shared.module}"
            for name in ("gate_proj", "up_proj") if self.is_gated else ("up_proj",):
                found[f"{one}.{name}.weight"] = (self.shared.width, hidden)
            found[f"{one}.down_proj.weight"] = (hidden, self.shared.width)
            if self.shared.gate is not None:
                found[f"{module}.{self.shared.gate}.weight"] = (1, hidden)
        return found

    def parts(self, layer: str) -> dict[str, tuple[str, ...]]:
        """The weights of the modules that the graph has: gate and up are one product."""
        module, (gate, up, down) = self.within(layer), self.names
        ours = self.within_graph(layer)
        router = self.router.module
        found: dict[str, tuple[str, ...]] = {f"{ours}.{router}": (f"{module}.{router}.weight",)}
        for expert in range(self.count):
            one, product = f"{module}.experts.{expert}", f"{ours}.experts.products.{expert}"
            first = (gate, up) if self.is_gated else (up,)
            found[f"{product}.0"] = tuple(f"{one}.{name}.weight" for name in first)
            found[f"{product}.1"] = (f"{one}.{down}.weight",)
        return found
