"""Text by unmasking: a masked model fills as many masks behind a prompt as the text is long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.masked.tasks import passes
from maskdial.masked.tasks.fill_passes import step
from maskdial.masked.tasks.passes import Passes
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest
from maskdial.unmasking.text import TextPlan, TextSoFar, UnmaskedText

_SECONDS_PER_LOGIT = 5e-9


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text whose first blocks are finished, and the passes of the next block, or the next pass;
    None if the text is finished.
    """

    text: TextSoFar
    rest: "Reading[TextPart] | None"


@dataclass(frozen=True, slots=True)
class WriteRequest(TaskRequest[TextPart]):
    """A text to write, and how.

    Attributes:
        before: the tokens of its prompt.
        after: the tokens that the model has after every text.
        plan: how.
    """

    task: ClassVar[str] = "generate"

    before: Sequence[int]
    after: Sequence[int]
    plan: TextPlan

    @property
    def num_texts(self) -> int:
        return 1

    @property
    def read_seconds(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class UnmaskRequest(WriteRequest):
    """A text that is written by filling masks."""

    head: ClassVar[TaskName] = "fill-mask"

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.task == cls.head and not manifest.reads_left

    def check(self, model: TaskModel) -> None:
        self.plan.check()

    def read(self, model: TaskModel) -> Reading[TextPart]:
        """The answer is the first block's, or pass's; `TextPart.rest` goes on."""
        mask = model.tokenizer.mask_token_id
        assert mask is not None, "every bundle for fill-mask has one"
        kernels = model.vocabulary_kernels()
        text = UnmaskedText(self.plan, self.before, self.after, model, mask, kernels)
        num_logits = model.manifest.vocab_size * max(self.plan.lengths)

        def block() -> Reading[TextPart]:
            return passes.reading(run(), 0, num_logits * _SECONDS_PER_LOGIT)

        def run() -> Passes[TextPart]:
            canvas = text.canvas
            index = canvas.block
            while canvas.block == index:
                yield from step(text.unmasker, [canvas])
                if self.plan.each_pass:
                    break
            so_far = text.so_far()
            return TextPart(so_far, None if so_far.finished else block())

        return block()
