"""ReplyFormat: how the model of a bundle writes tool calls and reasoning."""

from dataclasses import dataclass

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools.derive import derive_format
from maskdial.causal.tools.format import ToolFormat
from maskdial.causal.tools.response_template import calls_of, thinking_of
from maskdial.causal.tools.thinking import ThinkingMarks


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes tool calls and reasoning; None for what it does not have.

    Both come from the manifest (``tool_format``, ``thinking_marks``), otherwise from the chat
    template, otherwise from the checkpoint's ``response_template``.
    """

    calls: ToolFormat | None
    thinking: ThinkingMarks | None

    @classmethod
    def of_bundle(
        cls, bundle: Bundle, tokenizer: Tokenizer, template: ChatTemplate
    ) -> "ReplyFormat":
        """Reads the manifest, and derives from the template what it does not say.

        Raises:
            BundleError: the manifest's ``tool_format`` is unusable.
        """
        manifest = bundle.manifest
        special = {tokenizer.id_to_token(token_id): token_id for token_id in tokenizer.special_ids}
        ends = [tokenizer.id_to_token(token_id) for token_id in manifest.special_tokens.eos]
        if manifest.tool_format is not None:
            calls: ToolFormat | None = ToolFormat.from_json(manifest.tool_format)
        else:
            calls = derive_format(template, end_tokens=ends) or calls_of(manifest.response_template)
        if manifest.thinking_marks is not None:
            begin, end = manifest.thinking_marks
            thinking: ThinkingMarks | None = ThinkingMarks(begin, end)
        else:
            thinking = ThinkingMarks.derive(template) or thinking_of(manifest.response_template)
        return cls(
            calls and calls.with_special(special), thinking and thinking.with_special(special)
        )
