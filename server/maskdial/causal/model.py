"""CausalModel: a loaded causal or encoder-decoder model, with its engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.engine import CausalEngine
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.engine.model import Model
from maskdial.errors import ValidationError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.kernels.logits import VocabularyKernels


class WritingModel(Protocol):
    """What a request to write is read against: a `CausalModel`, or a model that writes by
    unmasking.
    """

    @property
    def name(self) -> str: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_length(self) -> int: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    @property
    def reply_format(self) -> ReplyFormat: ...
    @property
    def defaults(self) -> GenerationDefaults: ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a masked model that writes is given conversations, and what its replies are like."""

    template: ChatTemplate
    reply_format: ReplyFormat

    def close(self) -> None:
        """Ends the child processes that render the chat template."""
        self.template.close()


@dataclass(frozen=True, slots=True)
class CausalModel(Model):
    """A causal model being served, or an encoder-decoder model, whose decoder is one.

    ``slots`` sequences run at once. ``max_length`` is the context in tokens, as configured;
    ``max_source_length`` that of the encoder, None if there is none. ``reply_format`` says how its
    tool calls and its reasoning are told from its text. ``defaults`` apply where a request leaves a
    field out. ``kv_cache_dtype`` is what the KV cache consists of. ``max_full_tokens`` tokens of a
    pass may see each other in both directions; 0 where passes know the causal mask only.
    ``mask_token_id`` is what masks are, of a model that runs under both masks. ``kernel_library``
    is the file of the kernels, if it uses them.
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
    max_full_tokens: int
    mask_token_id: int | None = field(default=None, kw_only=True)
    kernel_library: Path | None = field(default=None, kw_only=True)

    def check_looks_ahead(self, mask: str) -> None:
        """Refuses a mask under which tokens see later ones, where passes know the causal one only.

        Raises:
            ValidationError: they do.
        """
        if not self.max_full_tokens:
            raise ValidationError(
                f"model {self.name!r} cannot write under the {mask} mask here; that takes the "
                "kernels for the CPU, and layers that all attend to all tokens",
                field="mask",
            )

    def vocabulary_kernels(self) -> VocabularyKernels | None:
        """Kernels for rows of its logits, for one thread at a time; None if it uses none."""
        if self.kernel_library is None:
            return None
        return VocabularyKernels(self.kernel_library, self.manifest.vocab_size)

    def stop(self) -> None:
        """Stops the engine at once, and the child processes with it."""
        self.engine.stop(0)
        self.grammars.close()
        self.chat_template.close()
