"""Shapes: the models that are measured, by their measures alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtests.checkpoints import CAUSAL_WORDS, bert_config, llama_config
from loadtests.compare.work import Family, Provider
from loadtests.errors import LoadTestError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights.

    Attributes:
        name: on the command line, and in the names of its files.
        heading: over its table.
        measures: what its configuration does not have from the family's own.
    """

    name: str
    family: Family
    heading: str
    measures: dict[str, Any]

    @property
    def config(self) -> "PreTrainedConfig":
        make = llama_config if self.family == "causal" else bert_config
        return make(**self.measures)

    @property
    def num_words(self) -> int:
        """Of a causal model's vocabulary."""
        return int(self.measures.get("vocab_size", CAUSAL_WORDS))


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


TINY: dict[Family, Shape] = {
    "causal": Shape(
        "tiny-llama", "causal", "A tiny Llama shape, to try the command", _llama(2, 64, 128, 4, 2)
    ),
    "masked": Shape(
        "tiny-bert",
        "masked",
        "A tiny BERT shape, to try the command",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
        },
    ),
}
_ALL = (
    Shape(
        "135m",
        "causal",
        "A 135M Llama shape",
        _llama(30, 576, 1536, 9, 3)
        | {
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
        },
    ),
    Shape(
        "1.1b",
        "causal",
        "A 1.1B Llama shape",
        _llama(22, 2048, 5632, 32, 4) | {"vocab_size": 32_000, "max_position_embeddings": 2048},
    ),
    Shape(
        "7b",
        "causal",
        "A 7B Llama shape",
        _llama(32, 4096, 11_008, 32, 32) | {"vocab_size": 32_000, "max_position_embeddings": 4096},
    ),
    Shape("bert-base", "masked", "BERT-base, fill-mask (texts x tokens)", {}),
    Shape(
        "bert-large",
        "masked",
        "BERT-large, fill-mask (texts x tokens)",
        {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
        },
    ),
    *TINY.values(),
)
SHAPES = {shape.name: shape for shape in _ALL}
USUAL: dict[Provider, tuple[str, ...]] = {
    "cpu": ("135m", "bert-base"),
    "cuda": ("135m", "1.1b", "7b", "bert-base", "bert-large"),
}
"""What is measured if nothing else is asked for."""


def find(names: tuple[str, ...]) -> list[Shape]:
    """The shapes of some names.

    Raises:
        LoadTestError: there is no such shape.
    """
    for name in names:
        if name not in SHAPES:
            raise LoadTestError(f"{name!r} is no shape; there are {', '.join(SHAPES)}")
    return [SHAPES[name] for name in names]
