"""Generation: a request to generate text, admitted and run.

Every dialect parses its bodies into a `GenerationRequest` and renders the result.
"""

import contextlib
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.model import CausalModel
from maskdial.causal.prompts import Prompt, read_prompts
from maskdial.causal.request import GenerationRequest
from maskdial.causal.stream import MergedStreams, NumberedEvent, TokenStream
from maskdial.config import Config
from maskdial.engine.timing import Deadline, Timings
from maskdial.errors import DeadlineError, about


@dataclass(frozen=True, slots=True)
class Text:
    """One generated text, token by token."""

    events: list[TokenEvent]

    @property
    def finish(self) -> Finish:
        """Takes in how and why the text ended."""
        finish = self.events[-1].finish
        assert finish is not None, "a stream ends with its finish or an error"
        return finish

    @property
    def mean_logprob(self) -> float:
        """Mean natural log-probability of its tokens, which ranks the texts of ``best_of``."""
        return statistics.fmean(event.logprob for event in self.events)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the texts generated for it."""

    prompt: Prompt
    texts: list[Text]

    def best(self, n: int) -> list[Text]:
        """All texts, in order; if there are more than ``n``, the most likely first."""
        if len(self.texts) <= n:
            return self.texts
        return sorted(self.texts, key=lambda text: text.mean_logprob, reverse=True)


class Generation:
    """An admitted request: its prompts are tokenized, its sequences ready to run.

    Create it with `prepare`; then either `complete` it or `stream` it, once.
    """

    def __init__(self, prompts: list[Prompt], model: CausalModel, deadline: Deadline) -> None:
        self.prompts = prompts
        self._model = model
        self._deadline = deadline

    @property
    def warnings(self) -> Sequence[str]:
        """A sentence for each constraint of the request's schemas that is not enforced."""
        return self.prompts[0].warnings

    @classmethod
    async def prepare(
        cls, request: GenerationRequest, model: CausalModel, config: Config, deadline: Deadline
    ) -> "Generation":
        """Checks a request against the model, compiles its grammar and tokenizes its prompts.

        Raises:
            ValidationError: the model cannot do what is asked; ``field`` says what.
            OverloadedError: the queue has no room for it.
            DeadlineError: the time is up.
        """
        try:
            async with deadline.enforced():
                return cls(await read_prompts(request, model, config), model, deadline)
        except DeadlineError:
            model.metrics.cancelled["timeout"].inc()
            raise

    def timings(self, completions: Sequence[Completion]) -> Timings:
        """The request's times, once it is complete; see `timings`."""
        return timings(completions)

    async def complete(self) -> list[Completion]:
        """Runs all sequences; if one fails, all are abandoned.

        Raises:
            MaskdialError: why one of them failed.
        """
        async with self._streams() as started:
            streams = iter(started)
            with about_grammar(), self._deadline.explained():
                return [
                    Completion(prompt, [await _read(next(streams)) for _ in prompt.sequences])
                    for prompt in self.prompts
                ]

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[NumberedEvent]]:
        """Runs all sequences and yields their events as they come, each with its sequence's index.

        Sequences are numbered prompt by prompt, and copy by copy within a prompt. Leaving the block
        abandons those that run.

        Raises:
            OverloadedError: the queue is full.
            MaskdialError: why one of them failed.
        """
        # The streams are left before their readers are cancelled, so that an expired timeout is not
        # counted as a disconnect.
        async with (
            contextlib.aclosing(MergedStreams[TokenEvent]()) as merged,
            self._streams() as streams,
        ):
            with about_grammar(), self._deadline.explained():
                async with contextlib.aclosing(merged.read(streams)) as events:
                    yield events

    def _streams(self) -> contextlib.AbstractAsyncContextManager[list[TokenStream]]:
        sequences = [sequence for prompt in self.prompts for sequence in prompt.sequences]
        return self._model.engine.streams(sequences, self._deadline.remaining())


async def _read(stream: TokenStream) -> Text:
    return Text([event async for event in stream])


def count_generated(completions: Sequence[Completion]) -> int:
    """Counts the tokens of all texts, including those that ``best_of`` discards."""
    return sum(len(text.events) for each in completions for text in each.texts)


def timings(completions: Sequence[Completion]) -> Timings:
    """A request's times are those of its slowest sequence; each prompt is prefilled once."""
    finishes = [text.finish for each in completions for text in each.texts]
    return Timings(
        queue_seconds=max(finish.queue_seconds for finish in finishes),
        inference_seconds=max(finish.inference_seconds for finish in finishes),
        compute_tokens=sum(len(each.prompt.ids) for each in completions)
        + sum(finish.generated_tokens for finish in finishes),
        truncated_tokens=sum(each.prompt.num_truncated for each in completions),
    )


@contextlib.contextmanager
def about_grammar() -> Iterator[None]:
    """Has a ValidationError name the grammar, which may also fail while it is used."""
    with about("grammar"):
        yield
