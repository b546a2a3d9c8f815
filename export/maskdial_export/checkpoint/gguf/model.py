"""What a GGUF file's model is in transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """Heads of a linear attention's values: several for each of keys, ``size`` entries each.

    llama.cpp has the first one of every head of keys first, then the second ones; transformers has
    all of a head of keys together. ``offset``: how many rows for queries and keys come first, where
    all three are one matrix.
    """

    num_keys: int
    per_key: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """Queries, keys, values and gates of a linear attention as one matrix, by heads of keys.

    llama.cpp has queries, keys and values of all heads as one matrix, and gates as another.
    ``value_size``: rows of the values of a head of keys, and of its gates.
    """

    num_keys: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Model:
    """What a file of an architecture is in transformers.

    Attributes:
        architecture: the class.
        config: config.json, without the architecture.
        names: of weights without ``.weight``; ``{}`` is the layer, ``*`` an expert.
        prefix: of names in transformers, but for the head's.
        permuted: whether rows of queries and keys are in the order of interleaved rotation.
        shifted: whether norms are stored plus one.
        transposed: names, as in the file, of matrices that transformers has as inputs by outputs.
        padding: rows that position embeddings lack at their start.
        pooling: sentence-transformers' name, for models of embeddings.
        squeezed: weights with a dimension of 1 in the middle, which files do not have.
        parameters: weights that are no module's, with their whole names.
        value_heads: how values of a linear attention are reordered.
        packed_heads: how a linear attention's matrices are one in transformers.
        joined: names, as in the file, of matrices that are one in transformers: the first one's, to
            which ``names`` has the name there, and those of the others.
        traceable: whether transformers' class has the weights by the names here, so that a model
            can be traced; otherwise it is written directly alone.
    """

    architecture: str
    config: Config
    names: Mapping[str, str]
    prefix: str = "model."
    permuted: bool = False
    shifted: bool = False
    transposed: frozenset[str] = frozenset()
    padding: int = 0
    pooling: str | None = None
    squeezed: frozenset[str] = frozenset()
    parameters: Mapping[str, str] = field(default_factory=dict)
    value_heads: ValueHeads | None = None
    packed_heads: PackedHeads | None = None
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    traceable: bool = True
