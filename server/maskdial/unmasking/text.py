"""Text by unmasking: what a model writes behind a prompt by filling as many masks as the text is
long.

The masks are filled block by block, from left to right, and within a block in the order of the
model's confidence: the sampling of LLaDA (arXiv:2502.09992) and Dream (arXiv:2508.15487), with
Fast-dLLM's threshold (arXiv:2505.22618) if one is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from maskdial.bundle.texts import ReadingModel, check_characters, check_ids, check_media
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.engine.philox import draw_seed
from maskdial.errors import ValidationError
from maskdial.kernels.logits import VocabularyKernels
from maskdial.unmasking.canvas import Blank, Block, Canvas, Draft, FilledToken
from maskdial.unmasking.unmasker import Order, Unmasker, Unmasking

BLOCK_LENGTH = 32


@dataclass(frozen=True, slots=True)
class UnmaskingChoice:
    """How a text is to be unmasked, as far as a request says; None: as by default.

    Attributes:
        block_length: masks that are filled before the next ones are.
        steps: passes for the whole text.
        order: which masks of a block are filled first.
        threshold: in place of ``steps``, the probability from which all are filled.
        stream_unmasking: whether a stream shows what each pass unmasks.
    """

    block_length: int | None = None
    steps: int | None = None
    order: Order | None = None
    threshold: float | None = None
    stream_unmasking: bool | None = None

    @property
    def given(self) -> list[str]:
        """The names of those that the request has."""
        return [each.name for each in fields(self) if getattr(self, each.name) is not None]


@dataclass(frozen=True, slots=True)
class TextPlan:
    """How a text is written.

    Attributes:
        num_tokens: its length; a token that ends texts may end it earlier.
        block_length: masks that are filled before the next ones are; None: `BLOCK_LENGTH`, or all.
        steps: passes for the whole text, shared evenly among the blocks; None: a pass for each
            token.
        unmasking: how the masks of a block are filled.
        seed: of the random numbers. None draws one.
        each_pass: whether the text is shown after each pass, and not only after each block.
    """

    num_tokens: int
    block_length: int | None = None
    steps: int | None = None
    unmasking: Unmasking = field(default_factory=Unmasking)
    seed: int | None = None
    each_pass: bool = False

    @property
    def lengths(self) -> list[int]:
        """The lengths of the blocks; the last one may be shorter."""
        length = self.block_length or min(BLOCK_LENGTH, self.num_tokens)
        full, rest = divmod(self.num_tokens, length)
        return [length] * full + [rest] * (rest > 0)

    def check(self) -> None:
        """Refuses what contradicts itself.

        Raises:
            ValidationError: it does; ``field`` says what.
        """
        if self.steps is not None and self.unmasking.threshold is not None:
            raise ValidationError(
                "with it, steps means nothing; send one of them", field="threshold"
            )
        if self.block_length is not None and self.block_length > self.num_tokens:
            raise ValidationError(
                f"must be at most {self.num_tokens}, the tokens to write, not {self.block_length}",
                field="block_length",
            )
        num_blocks = len(self.lengths)
        if self.steps is not None and not num_blocks <= self.steps <= self.num_tokens:
            raise ValidationError(
                f"must be between {num_blocks}, the number of blocks, and {self.num_tokens}, the "
                f"tokens to write, not {self.steps}",
                field="steps",
            )


def read_prompt(
    prompt: TextOrIds,
    model: ReadingModel,
    max_length: int,
    mask_token_id: int | None,
    *,
    rendered: bool = False,
) -> tuple[list[int], list[int]]:
    """The tokens before a text, and those that the model has after every one.

    Args:
        prompt: a text, or token ids, to which nothing is added.
        model: which writes the text.
        max_length: tokens that it takes.
        mask_token_id: of a model that fills masks, of which the prompt has none.
        rendered: whether the prompt has its special tokens, as a chat template writes them.

    Raises:
        ValidationError: the model does not have them.
    """
    if isinstance(prompt, str):
        check_characters(prompt, max_length, model)
        ids = model.tokenizer.encode(prompt, add_special_tokens=not rendered).ids
        _, ends = ([], []) if rendered else model.tokenizer.ends()
    else:
        if not prompt:
            raise ValidationError("has no tokens; send at least one")
        check_ids(prompt, model)
        ids, ends = list(prompt), []
    check_media(ids, model)
    before = ids[: len(ids) - len(ends)]
    if mask_token_id is not None and mask_token_id in before:
        raise ValidationError("has a mask of its own; send texts with masks to /fill-mask")
    return before, ends


def check_fits(num_given: int, num_tokens: int, name: str, max_length: int) -> None:
    """Refuses a text that has no room behind its prompt, in tokens.

    Raises:
        ValidationError: it has none.
    """
    if num_given + num_tokens > max_length:
        raise ValidationError(
            f"has {num_given} tokens, and {num_tokens} are to be written; "
            f"model {name!r} takes {max_length} together; shorten one of them"
        )


@dataclass(frozen=True, slots=True)
class TextSoFar:
    """A text whose first blocks are finished.

    Attributes:
        tokens: those of the finished blocks, in the order of the text, up to the token that ends
            it.
        unmasked: those that the last pass has unmasked, also of a block that is not finished.
        ended: whether a token has ended it.
        finished: whether it has ended, or has all its tokens.
        prompt_ids: the tokens before it, special ones included.
        seed: of the random numbers; None if no token is drawn.
    """

    tokens: tuple[FilledToken, ...]
    unmasked: tuple[FilledToken, ...]
    ended: bool
    finished: bool
    prompt_ids: tuple[int, ...]
    seed: int | None


class UnmaskedText:
    """A text that is being written.

    Args:
        plan: how.
        before: the prompt's tokens.
        after: the tokens after the text.
        model: which writes it.
        mask_token_id: of its mask.
        kernels: for rows of its logits; None for NumPy.

    Attributes:
        canvas: the text with its masks, and what comes before and after it.
        unmasker: fills them.
        seed: of the random numbers.
    """

    def __init__(
        self,
        plan: TextPlan,
        before: Sequence[int],
        after: Sequence[int],
        model: ReadingModel,
        mask_token_id: int,
        kernels: VocabularyKernels | None,
    ) -> None:
        tokenizer, manifest = model.tokenizer, model.manifest
        self._plan = plan
        self._ends = frozenset(manifest.special_tokens.eos)
        self._first = len(before)
        self.seed = draw_seed() if plan.seed is None else plan.seed
        ids = (*before, *[mask_token_id] * plan.num_tokens, *after)
        self.canvas = self._make_canvas(ids)
        never = (tokenizer.special_ids - self._ends) | tokenizer.ids_without_token(
            manifest.vocab_size
        )
        self.unmasker = Unmasker(plan.unmasking, never | {mask_token_id}, kernels)

    @property
    def block(self) -> tuple[int, int]:
        """Where the block at work begins, and where it ends."""
        lengths, at = self._plan.lengths, self.canvas.block
        start = self._first + sum(lengths[:at])
        return start, start + lengths[at]

    def so_far(self) -> TextSoFar:
        """The text of the blocks that are complete, and what the latest pass has filled."""
        canvas, (draft,) = self.canvas, self.canvas.drafts
        end = self._first + sum(self._plan.lengths[: canvas.block])
        filled = sorted(draft.filled, key=lambda each: each.position)
        tokens = tuple(each for each in filled if each.position < end)
        last = next((i for i, each in enumerate(tokens) if each.token in self._ends), None)
        if last is not None:
            tokens = tokens[: last + 1]
        return TextSoFar(
            tokens,
            tuple(each for each in draft.filled if each.step == canvas.step - 1),
            ended=last is not None,
            finished=last is not None or canvas.done,
            prompt_ids=draft.input_ids[: self._first],
            seed=self.seed if self._plan.unmasking.samples else None,
        )

    def _make_canvas(self, ids: tuple[int, ...]) -> Canvas:
        blanks, blocks = [], []
        lengths, steps, at = self._plan.lengths, self._plan.steps, self._first
        for place, length in enumerate(lengths):
            share = None
            if steps is not None:
                share = steps // len(lengths) + (place < steps % len(lengths))
            blanks.append(Blank(tuple(range(at, at + length))))
            blocks.append(Block((place,), share))
            at += length
        return Canvas([Draft(ids)], tuple(blanks), tuple(blocks), seed=self.seed)
