"""Text by unmasking: a masked model fills as many masks behind a prompt as the text is long.

The masks are filled block by block, from left to right, and within a block in the order of the
model's confidence: the sampling of LLaDA (arXiv:2502.09992) and Dream (arXiv:2508.15487), with
Fast-dLLM's threshold (arXiv:2505.22618) if one is given.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.bundle.texts import (
    check_characters,
    check_ids,
    check_media,
    tokenizing_seconds,
)
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.engine.philox import draw_seed
from maskdial.errors import ValidationError, about
from maskdial.masked.tasks import passes
from maskdial.masked.tasks.canvas import Blank, Block, Canvas, Draft, FilledToken
from maskdial.masked.tasks.passes import Passes
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest
from maskdial.masked.tasks.unmasking import Unmasker, Unmasking

BLOCK_LENGTH = 32
_SECONDS_PER_LOGIT = 5e-9


@dataclass(frozen=True, slots=True)
class TextSoFar:
    """A text whose first blocks are finished.

    Attributes:
        tokens: those of the finished blocks, in the order of the text, up to the token that ends
            it.
        unmasked: those that the last pass has unmasked, also of a block that is not finished.
        ended: whether a token has ended it.
        prompt_ids: the tokens before it, special ones included.
        seed: of the random numbers; None if no token is drawn.
        rest: the passes of the next block, or the next pass; None if the text is finished.
    """

    tokens: tuple[FilledToken, ...]
    unmasked: tuple[FilledToken, ...]
    ended: bool
    prompt_ids: tuple[int, ...]
    seed: int | None
    rest: "Reading[TextSoFar] | None"


@dataclass(frozen=True, slots=True)
class UnmaskRequest(TaskRequest[TextSoFar]):
    """A prompt that a text is written behind.

    Attributes:
        prompt: the text before it, or its token ids, to which nothing is added.
        rendered: whether the text has its special tokens, as a chat template writes them.
        num_tokens: its length; a token that ends texts may end it earlier.
        block_length: masks that are filled before the next ones are; None: `BLOCK_LENGTH`, or all.
        steps: passes for the whole text, shared evenly among the blocks; None: a pass for each
            token.
        unmasking: how the masks of a block are filled; its ``steps`` are ignored.
        seed: of the random numbers. None draws one.
        each_pass: whether there is an answer after each pass, and not only after each block.
    """

    task: ClassVar[str] = "generate"
    head: ClassVar[TaskName] = "fill-mask"

    prompt: TextOrIds
    num_tokens: int
    block_length: int | None = None
    steps: int | None = None
    unmasking: Unmasking = field(default_factory=Unmasking)
    seed: int | None = None
    rendered: bool = False
    each_pass: bool = False

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.task == cls.head and not manifest.reads_left

    @property
    def num_texts(self) -> int:
        return 1

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([self.prompt] if isinstance(self.prompt, str) else [])

    def check(self, model: TaskModel) -> None:
        if self.steps is not None and self.unmasking.threshold is not None:
            raise ValidationError(
                "with it, steps means nothing; send one of them", field="threshold"
            )
        if self.block_length is not None and self.block_length > self.num_tokens:
            raise ValidationError(
                f"must be at most {self.num_tokens}, the tokens to write, not {self.block_length}",
                field="block_length",
            )
        num_blocks = len(self._lengths())
        if self.steps is not None and not num_blocks <= self.steps <= self.num_tokens:
            raise ValidationError(
                f"must be between {num_blocks}, the number of blocks, and {self.num_tokens}, the "
                f"tokens to write, not {self.steps}",
                field="steps",
            )

    def read(self, model: TaskModel) -> Reading[TextSoFar]:
        """The answer is the first block's, or pass's; `TextSoFar.rest` goes on."""
        tokenizer, manifest = model.tokenizer, model.manifest
        mask_token_id = tokenizer.mask_token_id
        assert mask_token_id is not None, "every bundle for fill-mask has one"
        with about("prompt"):
            before, after = self._prompt_ids(model)
            if mask_token_id in before:
                raise ValidationError("has a mask of its own; send texts with masks to /fill-mask")
            num_given = len(before) + len(after)
            if num_given + self.num_tokens > manifest.max_length:
                raise ValidationError(
                    f"has {num_given} tokens, and {self.num_tokens} are to be written; "
                    f"model {model.name!r} takes {manifest.max_length} together; shorten one of "
                    "them"
                )
        at = len(before)
        ids = [*before, *[mask_token_id] * self.num_tokens, *after]
        seed = draw_seed() if self.seed is None else self.seed
        canvas = self._canvas(tuple(ids), at, seed)
        written = frozenset(manifest.special_tokens.eos)
        never = (tokenizer.special_ids - written) | tokenizer.ids_without_token(manifest.vocab_size)
        unmasker = Unmasker(self.unmasking, never | {mask_token_id}, model.vocabulary_kernels())
        num_logits = manifest.vocab_size * max(self._lengths())

        def block() -> Reading[TextSoFar]:
            return passes.reading(run(), 0, num_logits * _SECONDS_PER_LOGIT)

        def run() -> Passes[TextSoFar]:
            index = canvas.block
            while canvas.block == index:
                yield from unmasker.step([canvas])
                if self.each_pass:
                    break
            (draft,) = canvas.drafts
            tokens = _finished(draft, sum(self._lengths()[: canvas.block]) + at)
            last = next((i for i, each in enumerate(tokens) if each.token in written), None)
            ended = last is not None
            if last is not None:
                tokens = tokens[: last + 1]
            return TextSoFar(
                tokens,
                tuple(each for each in draft.filled if each.step == canvas.step - 1),
                ended,
                canvas.drafts[0].input_ids[:at],
                seed if self.unmasking.samples else None,
                None if ended or canvas.done else block(),
            )

        return block()

    def _prompt_ids(self, model: TaskModel) -> tuple[list[int], list[int]]:
        """The tokens before the text, and those that the model has after every text."""
        if not isinstance(self.prompt, str):
            if not self.prompt:
                raise ValidationError("has no tokens; send at least one")
            check_ids(self.prompt, model)
            ids, ends = list(self.prompt), list[int]()
        else:
            check_characters(self.prompt, model.manifest.max_length, model)
            ids = model.tokenizer.encode(self.prompt, add_special_tokens=not self.rendered).ids
            _, ends = ([], []) if self.rendered else model.tokenizer.ends()
        check_media(ids, model)
        return ids[: len(ids) - len(ends)], ends

    def _lengths(self) -> list[int]:
        """The lengths of the blocks; the last one may be shorter."""
        length = self.block_length or min(BLOCK_LENGTH, self.num_tokens)
        full, rest = divmod(self.num_tokens, length)
        return [length] * full + [rest] * (rest > 0)

    def _canvas(self, ids: tuple[int, ...], at: int, seed: int) -> Canvas:
        blanks, blocks = [], []
        lengths = self._lengths()
        for place, length in enumerate(lengths):
            steps = None
            if self.steps is not None:
                steps = self.steps // len(lengths) + (place < self.steps % len(lengths))
            blanks.append(Blank(tuple(range(at, at + length))))
            blocks.append(Block((place,), steps))
            at += length
        return Canvas([Draft(ids)], tuple(blanks), tuple(blocks), seed=seed)


def _finished(draft: Draft, end: int) -> tuple[FilledToken, ...]:
    tokens = sorted(draft.filled, key=lambda each: each.position)
    return tuple(each for each in tokens if each.position < end)
