"""ReplyFormat: how the model of a bundle writes tool calls, reasoning and its answer."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.stop import Reasoning
from maskdial.causal.tools import harmony
from maskdial.causal.tools.derive import derive_format
from maskdial.causal.tools.format import ToolFormat
from maskdial.causal.tools.grammar import write_content_grammar, write_grammar
from maskdial.causal.tools.incremental import IncrementalParser
from maskdial.causal.tools.lark import ContentKind, LarkWriter
from maskdial.causal.tools.marks import AnswerMarks, ThinkingMarks
from maskdial.causal.tools.parser import ReplyParser
from maskdial.causal.tools.response_template import calls_of, thinking_of
from maskdial.causal.tools.tool import Tool, ToolChoice
from maskdial.grammar.source import GrammarSource, GrammarValue

# Tokens that are text may be marks as well, as Qwen's <tool_call>; others are words or spaces.
_TAG = re.compile(r"<.*[^<>\s].*>|\[.*\w.*\]|◁.+▷|｜.+｜", re.DOTALL)

Content = tuple[ContentKind, GrammarValue]


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes a reply; None for what it does not have.

    What a manifest says (``tool_format``, ``thinking_marks``) comes first, then the chat template,
    then the checkpoint's ``response_template``.

    Attributes:
        calls: the format of tool calls.
        thinking: the marks around the reasoning.
        answer: the marks around the answer.
        harmony: the reply is a row of messages on channels, as gpt-oss writes them.
        free_ids: special tokens without a meaning here, which free text may contain.
    """

    calls: ToolFormat | None
    thinking: ThinkingMarks | None
    answer: AnswerMarks | None = None
    harmony: bool = False
    free_ids: tuple[int, ...] = ()

    @classmethod
    def of_bundle(
        cls, bundle: Bundle, tokenizer: Tokenizer, template: ChatTemplate
    ) -> "ReplyFormat":
        """Reads the manifest, and derives from the template what it does not say.

        Raises:
            BundleError: the manifest's ``tool_format`` is unusable.
        """
        manifest = bundle.manifest
        special = {
            text: token_id
            for text, token_id in tokenizer.added_ids.items()
            if token_id in tokenizer.special_ids or _TAG.fullmatch(text)
        }
        eos = manifest.special_tokens.eos
        if manifest.tool_format is None and harmony.is_harmony(template):
            return cls._of_channels(special)
        ends = [tokenizer.id_to_token(token_id) for token_id in eos]
        if manifest.tool_format is not None:
            calls: ToolFormat | None = ToolFormat.from_json(manifest.tool_format)
        else:
            calls = derive_format(template, end_tokens=ends) or calls_of(manifest.response_template)
        if manifest.thinking_marks is not None:
            begin, end = manifest.thinking_marks
            thinking: ThinkingMarks | None = ThinkingMarks(begin, end)
        else:
            thinking = ThinkingMarks.derive(template) or thinking_of(manifest.response_template)
        answer = AnswerMarks.derive(template)
        return cls(
            calls and calls.with_special(special),
            thinking and thinking.with_special(special),
            answer and answer.with_special(special),
            free_ids=tuple(sorted(tokenizer.special_ids.difference(eos))),
        )

    @classmethod
    def _of_channels(cls, special: dict[str, int]) -> "ReplyFormat":
        known = {tag: special[tag] for tag in harmony.TAGS if tag in special}
        return cls(
            dataclasses.replace(harmony.CALLS, special_ids=known),
            harmony.THINKING.with_special(special),
            harmony=True,
        )

    def opens(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the reply goes on with it."""
        if self.harmony:
            return harmony.open_channel(prompt) == "analysis"
        return self.thinking is not None and self.thinking.opened_by(prompt)

    def answers(self, prompt: str) -> bool:
        """Whether a prompt ends inside an answer that has a header: the reply has none then."""
        return self.harmony and harmony.open_channel(prompt) not in (None, "analysis")

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice | None,
        *,
        parallel: bool = True,
        content: Content | None = None,
        opened: bool = False,
        answering: bool = False,
    ) -> GrammarSource | None:
        """The grammar of a reply, of the kind ``structural``; None if it may be any text.

        Args:
            tools: the tools of the request.
            choice: which of them it may or must call; None for none.
            parallel: allow several calls, if the format does.
            content: what its content must match.
            opened: the prompt ends inside the reasoning.
            answering: as `answers` says of the prompt.

        Raises:
            ValidationError: as `write_grammar`.
        """
        if choice is None and content is None:
            return None
        if self.harmony:
            assert self.calls is not None
            writer = LarkWriter(self.calls.special_ids)
            return harmony.write_harmony_grammar(
                writer, tools, choice, content=content, opened=opened, answering=answering
            )
        if choice is not None:
            return write_grammar(
                self.calls,
                tools,
                choice,
                parallel=parallel,
                content=content,
                thinking=self.thinking,
                thinking_opened=opened,
                answer=self.answer,
                free_ids=self.free_ids,
            )
        if self.thinking is None and self.answer is None:
            return None
        assert content is not None
        return write_content_grammar(
            *content, self.thinking, thinking_opened=opened, answer=self.answer
        )

    def parser(
        self,
        tools: Sequence[Tool],
        *,
        opened: bool = False,
        answering: bool = False,
        plain: bool = False,
    ) -> IncrementalParser:
        """A parser of one reply.

        Args:
            tools: what it may call.
            opened: the prompt ends inside the reasoning.
            answering: as `answers` says of the prompt.
            plain: the reply is content from its first token, without marks.
        """
        if plain:
            return ReplyParser(self.calls, tools)
        if self.harmony:
            return harmony.HarmonyParser(tools, opened=opened, answering=answering)
        return ReplyParser(
            self.calls,
            tools,
            thinking=self.thinking,
            thinking_opened=opened,
            answer=self.answer,
        )

    def reasoning(
        self,
        *,
        opened: bool,
        answering: bool = False,
        budget: int | None,
        closing: tuple[int, ...],
    ) -> Reasoning | None:
        """What a reply may begin with, where no stop string counts."""
        if self.thinking is None or answering:
            return None
        header = harmony.HEADER if self.harmony else ()
        return Reasoning(self.thinking.begin, self.thinking.end, opened, budget, closing, header)
