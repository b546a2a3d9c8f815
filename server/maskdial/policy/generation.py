"""GuardedGeneration: an admitted request to write, whose texts go through the rules of a policy."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from maskdial.ask.unmasking import UnmaskedBlock, UnmaskedGeneration
from maskdial.ask.write import AnyGeneration
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.causal.model import CausalModel, WritingModel
from maskdial.causal.prompts import Prompt
from maskdial.causal.request import GenerationRequest
from maskdial.engine.timing import Timings
from maskdial.errors import ValidationError
from maskdial.policy.fit import Fit
from maskdial.policy.guard import GuardedRequest
from maskdial.policy.reply import GuardedText


class GuardedGeneration:
    """What `Generation` and `UnmaskedGeneration` are, under policies.

    Args:
        generation: admitted; its prompts have been read by the rules.
        request: under its policies.
        model: writes.
        asked: what to write; as the rules have left it.

    Raises:
        ValidationError: it would show what a pass unmasks before a rule has read it.
    """

    def __init__(
        self,
        generation: AnyGeneration,
        request: GuardedRequest,
        model: WritingModel,
        asked: GenerationRequest | ChatRequest,
    ) -> None:
        if isinstance(generation, UnmaskedGeneration) and generation.shows_passes:
            raise ValidationError(
                "a policy reads texts before they are shown, so that no pass can be; leave it out",
                field="stream_unmasking",
            )
        chat = asked if isinstance(asked, ChatRequest) else None
        asked = asked.generation if isinstance(asked, ChatRequest) else asked
        self._generation = generation
        self._num_copies = asked.num_sequences
        fit = Fit(
            model.tokenizer,
            model.grammars if isinstance(model, CausalModel) else None,
            asked.grammar,
            {} if chat is None else {each.name: each.parameters for each in chat.callable_tools},
        )
        self._texts = [
            GuardedText(
                request,
                model.tokenizer,
                None if chat is None else ReplyReader(chat, prompt, model),
                prompt.ids,
                fit,
                describes_prompt=asked.params.prompt_logprobs,
            )
            for prompt in generation.prompts
            for _ in range(self._num_copies)
        ]

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Those of the generation."""
        return self._generation.prompts

    @property
    def warnings(self) -> Sequence[str]:
        """Those of the generation."""
        return self._generation.warnings

    def timings(self, completions: Sequence[Completion]) -> Timings:
        """The request's times, once it is complete."""
        return self._generation.timings(completions)

    async def complete(self) -> list[Completion]:
        """Writes all texts; one that a rule refuses is empty.

        Raises:
            MaskdialError: why one of them failed.
        """
        events: list[list[TokenEvent]] = [[] for _ in self._texts]
        async with self.stream() as stream:
            async for index, event in stream:
                events[index].append(event)
        texts = (
            Text([text.nothing(Text(written).finish)] if text.refused else written)
            for text, written in zip(self._texts, events, strict=True)
        )
        return [
            Completion(prompt, [next(texts) for _ in range(self._num_copies)])
            for prompt in self.prompts
        ]

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[tuple[int, TokenEvent]]]:
        """Writes all texts, and yields their tokens once the rules have read them.

        Raises:
            MaskdialError: why one of them failed.
        """
        async with (
            self._generation.stream() as stream,
            contextlib.aclosing(self._read(stream)) as events,
        ):
            try:
                yield events
            finally:
                for text in self._texts:
                    text.abandon()

    async def _read(
        self, stream: AsyncIterator[tuple[int, TokenEvent | UnmaskedBlock]]
    ) -> AsyncGenerator[tuple[int, TokenEvent]]:
        left = len(self._texts)
        async for index, event in stream:
            text = self._texts[index]
            tokens = [event] if isinstance(event, TokenEvent) else event.tokens
            for token in tokens:
                was_ended = text.ended
                for each in await text.push(token):
                    yield index, each
                left -= text.ended and not was_ended
            if not left:
                return  # those that a rule ended are abandoned
