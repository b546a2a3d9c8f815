"""ReplyFormat: all that a bundle tells about how its model replies."""

from dataclasses import dataclass

from maskdial.causal.chat import ChatTemplate
from maskdial.causal.tools.derive import derive_format
from maskdial.causal.tools.format import ToolFormat
from maskdial.causal.tools.thinking import ThinkingMarks
from maskdial.models.bundle import Bundle
from maskdial.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes calls, and what is around its reasoning; None for what it does not have.

    Each is the manifest's (``tool_format``, ``thinking_marks``) where that has one, and else what
    the chat template shows.
    """

    calls: ToolFormat | None
    thinking: ThinkingMarks | None

    @classmethod
    def of_bundle(
        cls, bundle: Bundle, tokenizer: Tokenizer, template: ChatTemplate
    ) -> "ReplyFormat":
        """Reads the manifest, and asks the template for what is not there.

        Raises:
            BundleError: the manifest's format is not usable.
        """
        manifest = bundle.manifest
        special = {tokenizer.id_to_token(token_id): token_id for token_id in tokenizer.special_ids}
        ends = [tokenizer.id_to_token(token_id) for token_id in manifest.special_tokens.eos]
        if manifest.tool_format is not None:
            calls: ToolFormat | None = ToolFormat.from_json(
                manifest.tool_format, special_tokens=special
            )
        else:
            calls = derive_format(template, special_tokens=special, end_tokens=ends)
        if manifest.thinking_marks is not None:
            begin, end = manifest.thinking_marks
            thinking: ThinkingMarks | None = ThinkingMarks(begin, end).with_special(special)
        else:
            thinking = ThinkingMarks.derive(template, special_tokens=special)
        return cls(calls, thinking)
