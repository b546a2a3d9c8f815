"""CausalModel: a loaded causal or encoder-decoder model, with its engine."""

from dataclasses import dataclass

from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.engine import CausalEngine
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.grammar.compiler import GrammarCompiler
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.engine.model import Model


@dataclass(frozen=True, slots=True)
class CausalModel(Model):
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
