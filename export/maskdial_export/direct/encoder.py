"""What an encoder computes, whatever family it is of: what the graph writer needs to know of it."""

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from maskdial.bundle.manifest import Embedding, ProblemType, TaskName
from maskdial_export.direct.decoder import Attends
from maskdial_export.direct.experts import Experts

Function = Literal["gelu", "gelu_new", "relu", "silu", "tanh", "sigmoid"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, and a function behind it; None: none."""

    module: str
    num_inputs: int
    num_outputs: int
    has_bias: bool = True
    function: Function | None = None

    def shapes(self) -> Shapes:
        """Its weights, by name."""
        found: Shapes = {f"{self.module}.weight": (self.num_outputs, self.num_inputs)}
        return found | ({f"{self.module}.bias": (self.num_outputs,)} if self.has_bias else {})


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm."""

    module: str
    width: int
    epsilon: float
    has_bias: bool = True

    def shapes(self) -> Shapes:
        """Its weights, by name."""
        names = ("weight", "bias") if self.has_bias else ("weight",)
        return {f"{self.module}.{name}": (self.width,) for name in names}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The output layer over the vocabulary.

    ``bias`` is the name of its bias in the checkpoint; None: it has none. ``num_inputs`` are those
    of its own weight; None: that is the embedding table.
    """

    module: str
    bias: str | None
    vocab_size: int
    num_inputs: int | None = None

    def shapes(self) -> Shapes:
        """Its weights, by name."""
        found: Shapes = {} if self.bias is None else {self.bias: (self.vocab_size,)}
        if self.num_inputs is not None:
            found[f"{self.module}.weight"] = (self.vocab_size, self.num_inputs)
        return found


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales vectors to length 1."""

    def shapes(self) -> Shapes:
        """Nothing."""
        return {}


@dataclass(frozen=True, slots=True)
class Leading:
    """The first entries of vectors."""

    count: int

    def shapes(self) -> Shapes:
        """Nothing."""
        return {}


Step = Dense | Norm | Vocabulary | Normalize | Leading


@dataclass(frozen=True, slots=True)
class Head:
    """What stands on the hidden states.

    Attributes:
        task: that of the bundle.
        reads: how a text's tokens become one vector, several ways side by side; none: the head
            reads the tokens that are asked for.
        steps: what is computed of them, in order.
        before: what is computed of every token first.
        labels: of a classifier.
        problem_type: of a text classifier.
        embedding: of a model that embeds.
    """

    task: TaskName
    reads: tuple[str, ...]
    steps: tuple[Step, ...]
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    embedding: Embedding | None = None
    before: tuple[Dense, ...] = ()

    @property
    def is_of_tokens(self) -> bool:
        """Whether it gives something for each token that is asked for."""
        return not self.reads


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a family calls the modules of a layer.

    Attributes:
        attention: query, key and value, or one of all three.
        attention_output: what the attention's result goes through.
        attention_norm: behind the attention, or before it.
        up: into the MLP: one module, or the gate and the other one.
        down: out of the MLP.
        mlp_norm: behind the MLP, or before it.
        second_norm: behind one more sum of what the attention read and ``attention_norm`` gave;
            None: there is none.
        inner_norms: of all heads' queries, and of their keys; none: there are none.
    """

    attention: tuple[str, ...]
    attention_output: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    second_norm: str | None = None
    inner_norms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Positions:
    """A table of positions; ``first`` is that of a text's first token.

    ``skips_padding``: tokens that are the padding's have the position before the first one, and
    those behind them count on, as in RoBERTa.
    """

    module: str
    rows: int
    first: int = 0
    skips_padding: bool = False


@dataclass(frozen=True, slots=True)
class Relative:
    """A table of what is added to scores by the distance of two tokens, one column a head.

    ``buckets`` are its rows: half of them for tokens ahead. Near distances have one each, far ones
    share them by their logarithm, as in T5 (arXiv:1910.10683).
    """

    module: str
    buckets: int


@dataclass(frozen=True, slots=True)
class Disentangled:
    """A table of distances whose rows queries and keys are multiplied by, as in DeBERTa.

    Attributes:
        module: the table, with ``2 * buckets`` rows.
        norm: of its rows.
        buckets: near distances have one each, and far ones share them by their logarithm.
        farthest: the distance beyond which all share the last one.
    """

    module: str
    norm: Norm
    buckets: int
    farthest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePass(abc.ABC):
    """A model that reads a text in one pass.

    Attributes:
        architecture: transformers' class.
        base: the module within it that gives the hidden states, "" for the class itself.
        words: the module that looks tokens up; like all others by its full name.
        max_length: tokens of a text.
        pad: the token of padding.
        num_types: the rows of a table of token types.
        reads_types: whether the graph has token types as an input.
        optional: weights that some checkpoints have and the graph does not need.
        reads_left: whether a token sees those before it alone.
    """

    architecture: str
    base: str
    words: str
    vocab_size: int
    hidden_size: int
    max_length: int
    pad: int
    head: Head
    num_types: int = 0
    reads_types: bool = False
    optional: Shapes = field(default_factory=dict)
    reads_left: bool = False

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The output layer over the vocabulary, if there is one."""
        return next((each for each in self.head.steps if isinstance(each, Vocabulary)), None)

    @property
    @abc.abstractmethod
    def windows(self) -> tuple[int, ...]:
        """How many tokens one sees in layers that do not attend to all."""

    @abc.abstractmethod
    def shapes(self) -> Shapes:
        """The name and the shape of every weight that the graph needs, as the checkpoint has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder(OnePass):
    """An encoder with layer norms, full attention and an MLP.

    Attributes:
        width: of the MLP, without the gate.
        layers: each layer's module; a layer that is there several times shares its weights.
        attends: how each attends.
        positions: None if there is no table.
        types: the module of the table of token types; None if there is none.
        embedding_norm: behind the sum of the embeddings.
        mapping: from the embeddings to the hidden states; None: they are as wide.
        norm_first: whether norms stand before attention and MLP instead of behind the sums.
        final_norm: behind the last layer, with ``norm_first``.
        gated: whether the MLP has a gate.
        attention_bias: whether attention's linear layers have biases; likewise the others.
        up_bias: whether those into the MLP have, if that is not as of the one out of it.
        relative: distances of tokens that count beside positions.
        disentangled: distances that are multiplied by queries and keys.
        alibi: whether scores fall with the distance of two tokens, each head's by a slope of its
            own (arXiv:2108.12409).
        experts: those that some layers have in place of the MLP.
    """

    embedding_size: int
    width: int
    num_heads: int
    names: LayerNames
    layers: tuple[str, ...]
    attends: tuple[Attends, ...]
    function: Function
    embedding_norm: Norm
    positions: Positions | None = None
    types: str | None = None
    mapping: Dense | None = None
    norm_first: bool = False
    final_norm: Norm | None = None
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    up_bias: bool | None = None
    norm_bias: bool = True
    relative: Relative | None = None
    disentangled: Disentangled | None = None
    alibi: bool = False
    experts: Experts | None = None

    @property
    def epsilon(self) -> float:
        """That of all norms of the layers."""
        return self.embedding_norm.epsilon

    @property
    def windows(self) -> tuple[int, ...]:
        """How many tokens one sees in layers that do not attend to all."""
        return tuple(each.window for each in self.attends if each.window is not None)

    def attention(self, layer: str) -> tuple[Dense, ...]:
        """Query, key and value, or one of all three."""
        names, hidden = self.names.attention, self.hidden_size
        outputs = hidden * 3 // len(names)
        return tuple(
            Dense(f"{layer}.{each}", hidden, outputs, self.attention_bias) for each in names
        )

    def attention_output(self, layer: str) -> Dense:
        """What the attention's result goes through."""
        module = f"{layer}.{self.names.attention_output}"
        return Dense(module, self.hidden_size, self.hidden_size, self.attention_bias)

    def up(self, layer: str) -> tuple[Dense, ...]:
        """Into the MLP: with a gate that is one module, as wide as two."""
        outputs = self.width * (2 if self.gated and len(self.names.up) == 1 else 1)
        has_bias = self.mlp_bias if self.up_bias is None else self.up_bias
        return tuple(
            Dense(f"{layer}.{each}", self.hidden_size, outputs, has_bias) for each in self.names.up
        )

    def down(self, layer: str) -> Dense:
        """Out of the MLP."""
        return Dense(f"{layer}.{self.names.down}", self.width, self.hidden_size, self.mlp_bias)

    def norm(self, layer: str, name: str) -> Norm | None:
        """A norm of a layer; None where the first layer's stands behind the embeddings already."""
        if self.norm_first and layer == self.layers[0] and name == self.names.attention_norm:
            return None
        return Norm(f"{layer}.{name}", self.hidden_size, self.epsilon, self.norm_bias)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has."""
        return self.experts is not None and any(self.experts.layers)

    def mixed(self) -> Iterator[tuple[str, Experts]]:
        """The layers that have experts."""
        if self.experts is not None:
            for layer, has_experts in zip(self.layers, self.experts.layers, strict=True):
                if has_experts:
                    yield layer, self.experts

    def shapes(self) -> Shapes:
        """The name and the shape of every weight that the graph needs, as the checkpoint has it."""
        found: Shapes = {f"{self.words}.weight": (self.vocab_size, self.embedding_size)}
        if self.positions is not None:
            table = self.positions.rows, self.embedding_size
            found[f"{self.positions.module}.weight"] = table
        if self.types is not None:
            found[f"{self.types}.weight"] = (self.num_types, self.embedding_size)
        if self.relative is not None:
            found[f"{self.relative.module}.weight"] = (self.relative.buckets, self.num_heads)
        if self.disentangled is not None:
            rows = 2 * self.disentangled.buckets
            found[f"{self.disentangled.module}.weight"] = (rows, self.hidden_size)
            found |= self.disentangled.norm.shapes()
        for part in self._parts():
            found |= part.shapes()
        for layer, experts in self.mixed():
            found |= experts.shapes(layer, self.hidden_size)
        return found

    def _parts(self) -> Iterator[Step]:
        yield self.embedding_norm
        if self.mapping is not None:
            yield self.mapping
        mixed = {layer for layer, _ in self.mixed()}
        names = self.names
        for layer in self.layers:
            yield from self.attention(layer)
            yield self.attention_output(layer)
            if layer not in mixed:
                yield from self.up(layer)
                yield self.down(layer)
            norms = names.attention_norm, names.mlp_norm, names.second_norm, *names.inner_norms
            found = (self.norm(layer, each) for each in norms if each is not None)
            yield from filter(None, found)
        if self.final_norm is not None:
            yield self.final_norm
        yield from self.head.before
        yield from self.head.steps
