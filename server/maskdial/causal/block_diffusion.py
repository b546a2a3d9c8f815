"""Text by unmasking over the KV cache, block by block: a request, admitted and run."""

from collections.abc import AsyncGenerator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from maskdial.causal.block_text import MOST_TOKENS, BlockText
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.engine.timing import Deadline, Timed, Timings
from maskdial.errors import ValidationError
from maskdial.unmasking.text import TextPlan, TextSoFar, UnmaskedText


def check_block(model: CausalModel) -> None:
    """Refuses a model that does not write under the block mask.

    Raises:
        ValidationError: it does not.
    """
    if model.manifest.text_to_text is not None:
        raise ValidationError(
            f"model {model.name!r} has an encoder and writes token by token; leave out the "
            "block mask",
            field="mask",
        )
    if model.mask_token_id is None:
        raise ValidationError(
            f"model {model.name!r} fills no masks, so it cannot write under the block mask; "
            "export it with both masks (maskdial export --mask both)",
            field="mask",
        )
    model.check_looks_ahead("block")


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A text to write, and how.

    Attributes:
        before: the tokens of its prompt.
        after: the tokens that the model has after every text.
        plan: how.
        priority: of the request, as `GenerationRequest.priority`.
    """

    before: SequenceOf[int]
    after: SequenceOf[int]
    plan: TextPlan
    priority: int = 0

    def checked(self, model: CausalModel) -> "BlockRequest":
        """The request with blocks of a length that the model's passes have room for.

        Raises:
            ValidationError: the plan contradicts itself, or the model; ``field`` says what.
        """
        self.plan.check()
        most = min(model.max_full_tokens, MOST_TOKENS)
        longest = (most - 1) // 2
        if (self.plan.block_length or 0) > longest:
            raise ValidationError(
                f"must be at most {longest}: a pass reads two blocks, and at most {most} tokens",
                field="block_length",
            )
        length = min(max(self.plan.lengths), longest)
        plan = replace(self.plan, block_length=length)
        plan.check()
        return replace(self, plan=plan)

    async def write(
        self, model: CausalModel, deadline: Deadline
    ) -> AsyncGenerator[Timed[TextSoFar]]:
        """The text after each of its blocks, or of its passes; of a request that was checked.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: the time is up.
        """
        sequence = self._sequence(model)
        stream = model.engine.stream_blocks(sequence, deadline.remaining())
        async with stream:
            with deadline.explained():
                async for event in stream:
                    if event.num_new or event.finish or self.plan.each_pass:
                        finish = event.finish
                        timings = Timings(0.0, 0.0, 0)
                        if finish is not None:
                            timings = Timings(
                                finish.queue_seconds,
                                finish.inference_seconds,
                                sequence.num_prompt + finish.generated_tokens,
                            )
                        yield Timed(event.text, timings)

    def _sequence(self, model: CausalModel) -> Sequence:
        mask = model.mask_token_id
        assert mask is not None, "it was checked"
        kernels = model.vocabulary_kernels()
        text = UnmaskedText(self.plan, self.before, self.after, model, mask, kernels)
        unmasking = self.plan.unmasking
        return Sequence(
            self.before,
            SamplingParams(
                max_new_tokens=self.plan.num_tokens,
                do_sample=unmasking.samples,
                temperature=unmasking.temperature,
            ),
            seed=text.seed,
            priority=self.priority,
            adapter=model.adapter,
            block_text=BlockText(text),
        )
