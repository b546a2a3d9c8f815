"""GenerationRequest: what to continue, how, until when; independent of the wire format.

Errors name the fields of `GenerationRequest` and of its `SamplingParams`.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.beam_search import EarlyStopping
from maskdial.causal.chat.template import Rendered
from maskdial.causal.model import WritingModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.stop import Reasoning
from maskdial.errors import about
from maskdial.grammar.source import GrammarRequest
from maskdial.unmasking.text import UnmaskingChoice

T = TypeVar("T")

MAX_BEAMS = 8

WritingTask = Literal["summarization", "translation"]


@dataclass(frozen=True, slots=True)
class Writing:
    """How a text is searched for, and what encoder-decoder models are told beside it.

    None: as an encoder-decoder checkpoint has it, or nothing of the kind.

    Attributes:
        num_beams: texts that a beam search follows; 1 for none.
        length_penalty: exponent of a text's length, by which its log-probability is divided.
        early_stopping: whether the search ends as soon as it has ``num_beams`` texts; ``never``
            goes on until none can become better.
        no_repeat_ngram_size: no sequence of so many tokens occurs twice; 0 allows it.
        task: whose settings of the checkpoint apply, if it has any for it; as the other fields
            below, for encoder-decoder models only.
        source_language: code of the language of the source text.
        target_language: code of the language to write in.
        truncate_source: whether a source text that is too long is cut.
    """

    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    no_repeat_ngram_size: int | None = None
    task: WritingTask | None = None
    source_language: str | None = None
    target_language: str | None = None
    truncate_source: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is rendered from, by the model's chat template.

    Attributes:
        messages: mappings of ``role``, ``content`` and other fields of templates.
        tools: what the model may call, in OpenAI's form.
        variables: further variables of the template.
        add_generation_prompt: whether to open the assistant's next turn.
        continue_final_message: whether the reply goes on with the final message; no turn is opened.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    async def render(self, model: WritingModel) -> str:
        """The prompt.

        Raises:
            ValidationError: the model has no chat template, or it fails; ``field`` says on what.
        """
        with about("messages"):
            return await asyncio.wrap_future(self._asked(model.chat_template.submit))

    async def render_with_borders(self, model: WritingModel) -> Rendered:
        """The prompt, and where the next one may part from it.

        Raises:
            As `render`.
        """
        with about("messages"):
            submit = model.chat_template.submit_with_borders
            return await asyncio.wrap_future(self._asked(submit))

    def _asked(self, submit: Callable[..., Future[T]]) -> Future[T]:
        return submit(
            self.messages,
            tools=self.tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


@dataclass(frozen=True, slots=True)
class Snippet:
    """A part of another file, which the gap's file may refer to."""

    text: str
    filename: str = "tmp"


@dataclass(frozen=True, slots=True)
class Infilling:
    """What a prompt's text is written before, in place of its end.

    Attributes:
        suffix: the text after the gap.
        beginning: the text that the gap begins with; it is tokenized apart from the prompt.
        snippets: parts of other files.
        cut: whether prefix and suffix are cut at their outer ends, three parts to one, and snippets
            at their beginning, where the context has no room for them.
    """

    suffix: str
    beginning: str = ""
    snippets: Sequence[Snippet] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts or a conversation to continue.

    Attributes:
        prompts: texts, or token ids that are used unchanged: no special tokens are added. Empty
            for a conversation. For an encoder-decoder model, source texts.
        conversation: rendered as the prompt, in place of ``prompts``.
        params: how to sample; its ``max_new_tokens`` is ignored.
        seed: of the first text's random numbers, below 2**63; copy i has the seed plus i. None
            draws one.
        max_new_tokens: limit per text. None: the model's default, or 100, or less if the context is
            shorter.
        is_limited: whether the client set that limit, and is told where the context leaves less.
        num_sequences: texts to generate for each prompt.
        grammar: what the texts must match.
        grammar_for: chooses the grammar once a conversation is rendered, in place of ``grammar``.
        reasoning_for: likewise, what the text may begin with.
        spelled_tokens: pairs of a special token's id and its spelling in the text, where other
            special tokens leave nothing.
        truncate: keep only this many of a prompt's last tokens, or of a source text's first ones.
        writing: what encoder-decoder models are told beside it.
        infill: what the texts are written before, for models with fill-in-the-middle tokens.
        priority: lower values are scheduled earlier.
        cache_salt: prompts share cached prefixes only with requests of the same key and salt.
        describe_tokens: whether the reply describes each token.
        prediction: a text that the reply is expected to be like. It changes how fast the reply
            comes, and nothing else.
        full_prompt: whether prompts are read under the full mask, and the texts behind them under
            the causal one (a prefix-LM).
        unmasking: how the text is unmasked, for models that write so.
    """

    prompts: Sequence[TextOrIds] = ()
    conversation: Conversation | None = None
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int | None = None
    max_new_tokens: int | None = None
    is_limited: bool = True
    num_sequences: int = 1
    grammar: GrammarRequest | None = None
    grammar_for: Callable[[str], GrammarRequest | None] | None = None
    reasoning_for: Callable[[str], Reasoning | None] | None = None
    spelled_tokens: Sequence[tuple[int, str]] = ()
    truncate: int | None = None
    writing: Writing = dataclasses.field(default_factory=Writing)
    infill: Infilling | None = None
    priority: int = 0
    cache_salt: str = ""
    describe_tokens: bool = False
    prediction: str = ""
    full_prompt: bool = False
    unmasking: UnmaskingChoice = dataclasses.field(default_factory=UnmaskingChoice)
