"""What loaded models of both families have in common, and how long their texts may be."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from maskdial.bundle.adapter import Projection
from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.config import Config
from maskdial.engine.questions import PromptWriter
from maskdial.metrics import PassMetrics
from maskdial.runtime.adapter import Adapter
from maskdial.runtime.providers import find_provider

LEAST_CONTEXT = 4096
"""Tokens of a context that is chosen here, if the model's is as long; also of a source text."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model of either family.

    ``kernels`` is the instruction set of our own kernels, empty if the model does not use them.
    ``numerics``: two servers that have the same one for a bundle answer with the same bits; empty:
    this is not promised.
    ``prompts`` writes those of decisions; None if the model is not asked by prompts.
    ``auto_truncate``: whether texts that are too long are cut where a request does not say.
    ``projections`` are the layers that adapters may change; ``adapter`` is what this model's texts
    have added to the weights, if the model is an adapter's base under the adapter's name.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    metrics: PassMetrics
    provider: str
    kernels: str = field(default="", kw_only=True)
    numerics: str = field(default="", kw_only=True)
    prompts: PromptWriter | None = field(default=None, kw_only=True)
    auto_truncate: bool = field(default=False, kw_only=True)
    projections: Mapping[str, Projection] = field(default_factory=dict, kw_only=True)
    adapter: Adapter | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.bundle.name

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def why_no_adapters(self) -> str:
        """Why adapters cannot change it, after its name; empty if they can."""
        if self.projections:
            return ""
        if self.manifest.text_to_text is not None:
            return "is an encoder-decoder model, which takes none; merge it with `maskdial export`"
        if self.provider != "cpu":
            return (
                f"runs on {self.provider}, and only the CPU computes adapters; use --provider cpu"
            )
        if not self.kernels:
            return "runs without the kernels, which compute adapters; build them (docs/kernels.md)"
        return (
            "does not name its layers, or was loaded without adapters; export it again, and serve "
            "it with --adapter or --adapters-memory"
        )

    @property
    def batch_invariant(self) -> bool:
        """Whether answers are the same to the last bit in any batch."""
        return is_batch_invariant(self.manifest, self.provider, self.kernels)


def is_batch_invariant(manifest: Manifest, provider: str, kernels: str) -> bool:
    """Whether a model's answers are the same to the last bit in any batch: as measured at export,
    and only with a provider whose kernels are batch-invariant.

    Products in blocks were measured with our kernels; ONNX Runtime's differ for a single row.
    ``kernels`` is the instruction set of ours, empty without them.
    """
    quality = manifest.quality
    if (
        quality is not None
        and quality.measured_with == "kernels"
        and not (quality.by_row or kernels)
    ):
        return False
    return manifest.batch_invariant and find_provider(provider).batch_invariant


def max_length(manifest: Manifest, config: Config) -> int:
    """Maximum length of an input in tokens, or the context of a causal model: when it is loaded,
    the memory may leave less of it.
    """
    if manifest.family == "masked" or config.max_context is None:
        return manifest.max_length
    return min(manifest.max_length, config.max_context)


def max_source_length(manifest: Manifest, config: Config) -> int | None:
    """Maximum length of a source text in tokens; None for a model without an encoder."""
    if manifest.text_to_text is None:
        return None
    return min(manifest.text_to_text.max_source_length, config.max_context or LEAST_CONTEXT)
