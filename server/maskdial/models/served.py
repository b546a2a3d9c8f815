"""Served models: a bundle with its engine, of either family."""

from dataclasses import dataclass, field
from typing import Protocol

from maskdial.causal.chat import ChatTemplate
from maskdial.causal.engine import CausalEngine
from maskdial.causal.grammar.compiler import GrammarCompiler
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.config import Config
from maskdial.masked.engine import MaskedEngine
from maskdial.metrics import PassMetrics
from maskdial.models.bundle import Bundle, Manifest
from maskdial.models.generation_config import GenerationDefaults
from maskdial.models.tokenizer import Tokenizer
from maskdial.runtime.providers import find_provider


class Task(Protocol):
    """Something that models can be asked for."""

    @property
    def name(self) -> str: ...
    def serves(self, manifest: Manifest) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Model:
    """What served models of both families have.

    ``kernels`` is the instruction set of our own kernels, empty if the model does not use them.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    metrics: PassMetrics
    provider: str
    kernels: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        return self.bundle.name

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def batch_invariant(self) -> bool:
        """Whether answers are the same to the last bit in any batch: as measured at export, and
        only with a provider whose kernels are batch-invariant.
        """
        return self.manifest.batch_invariant and find_provider(self.provider).batch_invariant


@dataclass(frozen=True, slots=True)
class MaskedModel(_Model):
    """A masked model being served."""

    engine: MaskedEngine

    @property
    def max_length(self) -> int:
        """Maximum length of an input in tokens."""
        return self.manifest.max_length

    @property
    def max_queue(self) -> int:
        """Inputs that may wait."""
        return self.engine.max_queue

    def stop(self) -> None:
        """Stops the engine at once."""
        self.engine.stop(0)


@dataclass(frozen=True, slots=True)
class CausalModel(_Model):
    """A causal model being served, or an encoder-decoder model, whose decoder is one.

    ``slots`` sequences run at once. ``max_length`` is the context in tokens, as configured;
    ``max_source_length`` that of the encoder, None if there is none. ``reply_format`` says how its
    tool calls and its reasoning are told from its text. ``defaults`` apply where a request leaves a
    field out. ``kv_cache_dtype`` is what the KV cache consists of.
    """

    engine: CausalEngine
    slots: int
    max_length: int
    max_source_length: int | None
    chat_template: ChatTemplate
    reply_format: ReplyFormat
    grammars: GrammarCompiler
    defaults: GenerationDefaults
    kv_cache_dtype: str

    def stop(self) -> None:
        """Stops the engine at once, and the child processes with it."""
        self.engine.stop(0)
        self.grammars.close()
        self.chat_template.close()


ServedModel = MaskedModel | CausalModel


def max_length(manifest: Manifest, config: Config) -> int:
    """Maximum length of an input in tokens, or the context of a causal model, when it is loaded."""
    if manifest.family == "masked":
        return manifest.max_length
    return min(manifest.max_length, config.max_context)


def max_source_length(manifest: Manifest, config: Config) -> int | None:
    """Maximum length of a source text in tokens; None for a model without an encoder."""
    if manifest.text_to_text is None:
        return None
    return min(manifest.text_to_text.max_source_length, config.max_context)
