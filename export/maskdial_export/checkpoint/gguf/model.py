"""What a GGUF file's model is in transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


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
