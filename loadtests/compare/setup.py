"""Setup: a model, where its files are, and how it runs."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests import LoadTestError
from loadtests.checkpoints import CAUSAL_WORDS, MASKED_WORDS, bert_config, llama_config
from loadtests.compare.work import ROOM, Family, Load, Provider, Room

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

USUAL: dict[Provider, tuple[str, ...]] = {
    "cpu": ("135m", "bert-base"),
    "cuda": ("135m", "1.1b", "7b", "bert-base", "bert-large"),
}
"""The shapes measured by default."""

BUNDLE = "bundle"

HALF = ("fp16", "int4-fp16")
"""Precisions of bundles that are written without the export's comparisons."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights.

    Attributes:
        name: on the command line and in file names.
        family: causal (Llama) or masked (BERT).
        heading: of its table.
        measures: what its configuration changes in the family's default.
        is_large: whether the exporter's comparisons would take too long.
    """

    name: str
    family: Family
    heading: str
    measures: dict[str, Any]
    is_large: bool = False

    @property
    def config(self) -> "PreTrainedConfig":
        make = llama_config if self.family == "causal" else bert_config
        return make(**self.measures)

    @property
    def num_words(self) -> int:
        """The vocabulary size of a causal model."""
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
        "tiny-llama",
        "causal",
        "A tiny Llama shape, to try the command",
        _llama(2, 64, 128, 4, 2) | {"vocab_size": 2_000},
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
        is_large=True,
    ),
    Shape(
        "7b",
        "causal",
        "A 7B Llama shape",
        _llama(32, 4096, 11_008, 32, 32) | {"vocab_size": 32_000, "max_position_embeddings": 4096},
        is_large=True,
    ),
    Shape(
        "8b",
        "causal",
        "An 8B Llama shape with grouped queries",
        _llama(32, 4096, 14_336, 32, 8) | {"vocab_size": 128_256, "max_position_embeddings": 4096},
        is_large=True,
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


@dataclass(frozen=True, slots=True)
class _ModernBert(Shape):
    """ModernBERT's, with the vocabulary of our BERT."""

    @property
    def config(self) -> "PreTrainedConfig":
        from transformers import ModernBertConfig

        special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
        return ModernBertConfig(
            vocab_size=MASKED_WORDS, bos_token_id=2, eos_token_id=3, **special, **self.measures
        )


MODERN_BERT = _ModernBert("modernbert-base", "masked", "ModernBERT-base", {})


@dataclass(frozen=True, slots=True)
class _Deberta(Shape):
    """DeBERTa-v3's, with the vocabulary of our BERT."""

    @property
    def config(self) -> "PreTrainedConfig":
        from transformers import DebertaV2Config

        return DebertaV2Config(
            vocab_size=MASKED_WORDS,
            relative_attention=True,
            position_buckets=256,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
            type_vocab_size=0,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            **self.measures,
        )


DEBERTA = _Deberta("deberta-v3-base", "masked", "DeBERTa-v3-base", {})

SHAPES = {shape.name: shape for shape in _ALL}


def find(names: tuple[str, ...]) -> list[Shape]:
    """Looks shapes up by name.

    Raises:
        LoadTestError: a name is unknown.
    """
    for name in names:
        if name not in SHAPES:
            raise LoadTestError(f"unknown shape {name!r}; choose from {', '.join(SHAPES)}")
    return [SHAPES[name] for name in names]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a child process is told.

    Attributes:
        folder: keeps the models between runs.
        shape: name of the model's.
        variant: the entrant's own, such as a quantization.
        makes: what the entrant converts the checkpoint to, once: ``bundle``, a name of its own, or
            nothing.
        precision: of our bundle.
        exporter: `exporter_digest` at the start of the run.
        threads: per pass.
        seed: draws weights, prompts and texts.
        provider: where passes run.
        load: the amount of work.
    """

    folder: str
    shape: str
    variant: str
    makes: str
    precision: str
    exporter: str
    threads: int
    seed: int
    provider: Provider = "cpu"
    load: Load = "small"

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def room(self) -> Room:
        return ROOM[self.load]

    @property
    def checkpoint(self) -> Path:
        """On CUDA it has no weights: every entrant draws them."""
        name = self.shape if self.provider == "cpu" else f"{self.shape}-cuda"
        return Path(self.folder) / f"{name}-{self.seed}"

    @property
    def bundle(self) -> Path:
        """Its name contains the exporter's digest, so that an outdated bundle is not measured."""
        return self.cached(f"bundle-{self.precision}-{self.exporter}")

    def bundles(self) -> list[Path]:
        """The bundles of all exporters, newest last."""
        made = Path(self.folder).glob(self.cached(f"bundle-{self.precision}-*").name)
        return sorted(made, key=lambda path: path.stat().st_mtime)

    @property
    def product(self) -> Path:
        """What the entrant runs: its conversion, or the checkpoint if it makes none."""
        if not self.makes:
            return self.checkpoint
        return self.bundle if self.makes == BUNDLE else self.cached(self.makes)

    def cached(self, name: str) -> Path:
        """The path of something made from the checkpoint."""
        return self.checkpoint.with_name(f"{self.checkpoint.name}-{name}")


def exporter_digest() -> str:
    """A hash of the exporter's sources, eight hexadecimal digits."""
    spec = importlib.util.find_spec("maskdial_export")
    assert spec is not None, "this project's own package"
    assert spec.origin is not None, "a package with a file"
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
