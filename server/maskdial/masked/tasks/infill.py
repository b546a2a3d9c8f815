"""Infilling with a masked model: a gap of unknown length between two texts.

The gap is filled at each length from one token to the longest, all lengths in the same passes, and
the fillings are ranked by their pseudo-log-likelihood per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tokenizers import Encoding

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.texts import check_characters, check_media, tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.engine.philox import draw_seed, told_seed
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError, about
from maskdial.grammar.fixed_length import FixedLength
from maskdial.grammar.source import GrammarRequest
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.fill_jointly import (
    DEFAULT_BLANK,
    MAX_BEAMS,
    MAX_BLANK,
    SECONDS_OF_SEARCH,
    Contents,
    JointFilling,
    compile_constraint,
    lengths_of,
    rank_fillings,
    resolve_words,
    spread,
)
from maskdial.masked.tasks.fill_mask import mask_positions, write_masks
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest
from maskdial.unmasking.unmasker import Unmasking


@dataclass(frozen=True, slots=True)
class InfillRequest(TaskRequest[list[JointFilling]]):
    """Two texts with a gap between them.

    Attributes:
        prefix: the text before the gap.
        suffix: the text after it.
        max_tokens: the longest gap to try, from 1 to `MAX_BLANK`.
        n: fillings to return; of each length there are as many as beams, or one drawn.
        unmasking: how each is filled.
        seed: of the random numbers, the same for each length. None draws one.
        choices: the texts that may stand in the gap; their lengths are tried, as far as they are
            not longer than the longest gap. None for any.
        grammar: in place of choices, what the text of the gap has to match.
    """

    task: ClassVar[str] = "infill"
    head: ClassVar[TaskName] = "fill-mask"

    prefix: str
    suffix: str
    max_tokens: int = DEFAULT_BLANK
    n: int = 1
    unmasking: Unmasking = field(default_factory=Unmasking)
    seed: int | None = None
    choices: Sequence[str] | None = None
    grammar: GrammarRequest | None = None
    constraint: FixedLength | None = None
    """The grammar, compiled."""

    @property
    def num_texts(self) -> int:
        return 1

    @property
    def read_seconds(self) -> float:
        search = 0.0 if self.constraint is None else SECONDS_OF_SEARCH
        return tokenizing_seconds([self.prefix, self.suffix]) + search

    def check(self, model: TaskModel) -> None:
        for name, value, most in (
            ("max_tokens", self.max_tokens, MAX_BLANK),
            ("n", self.n, MAX_BEAMS),
        ):
            if not 1 <= value <= most:
                raise ValidationError(
                    f"must be between 1 and {most} for the masked model {model.name!r}, not "
                    f"{value}",
                    field=name,
                )

    async def prepared(self, model: TaskModel, deadline: Deadline) -> "InfillRequest":
        # Here, as the texts may be read in another thread.
        known = replace(self, seed=told_seed(self.seed))
        if self.grammar is None:
            return known
        constraint = await compile_constraint(self.grammar, model, deadline)
        return replace(known, constraint=constraint)

    def read(self, model: TaskModel) -> Reading[list[JointFilling]]:
        """The answer has the fillings, best first."""
        tokenizer = model.tokenizer
        mask = write_masks("[MASK]", tokenizer)
        for name, text in (("prefix", self.prefix), ("suffix", self.suffix)):
            if mask in write_masks(text, tokenizer):
                raise ValidationError(
                    "has a mask of its own; send texts with masks to /fill-mask", field=name
                )
        if not (self.prefix + self.suffix).strip():
            raise ValidationError(
                "is empty, as the text after it is; one has to have a word", field="prefix"
            )
        text = self.prefix + mask + self.suffix
        with about("prefix"):
            check_characters(text, model.manifest.max_length, model)
            encoding = tokenizer.encode(text)
            check_media(encoding.ids, model)
        lengths, contents = self._lengths(model)
        whole, num_cut = _cut(encoding, model.manifest.max_length - lengths[-1] + 1, tokenizer)
        masks = mask_positions(whole.input_ids, tokenizer)
        seed = draw_seed() if self.seed is None else self.seed
        canvases = [
            replace(spread(whole, masks, [length], [contents], model), seed=seed)
            for length in lengths
        ]
        reading = rank_fillings([canvases], self.unmasking, self.n, model, num_truncated=num_cut)
        return reading.map(lambda texts: texts[0])

    def _lengths(self, model: TaskModel) -> tuple[list[int], Contents]:
        """The lengths to try, ascending, and what may stand there at each; None for any text."""
        if self.grammar is not None:
            assert self.constraint is not None, "it was compiled before"
            with about(self.grammar.field):
                found = lengths_of(self.constraint, self.max_tokens)
            return list(found), found
        if self.choices is None:
            return list(range(1, self.max_tokens + 1)), None
        words = resolve_words(self.choices, model.tokenizer, model.manifest.vocab_size)
        lengths = sorted(length for length in words if length <= self.max_tokens)
        if not lengths:
            raise ValidationError(
                f"the shortest has {min(words)} tokens, and a gap of at most {self.max_tokens} is "
                "tried; send shorter ones, or a longer gap",
                field="targets",
            )
        return lengths, words


def _cut(encoding: Encoding, max_length: int, tokenizer: Tokenizer) -> tuple[MaskedInput, int]:
    """A text with a mask, cut at its outer ends where it is too long, and how many tokens were cut.

    Either side of the mask gets a half of the room, or what the other side leaves.
    """
    starts, ends = tokenizer.ends()
    first, last = len(starts), len(encoding.ids) - len(ends)
    (mask,) = mask_positions(encoding.ids, tokenizer)
    num_before, num_after = mask - first, last - mask - 1
    room = max_length - len(starts) - len(ends) - 1
    num_kept = min(num_after, max(room // 2, room - num_before))
    begin, end = mask - min(num_before, room - num_kept), mask + 1 + num_kept
    kept = [*range(first), *range(begin, end), *range(last, len(encoding.ids))]
    whole = MaskedInput(
        tuple(encoding.ids[place] for place in kept),
        (),
        tuple(encoding.type_ids[place] for place in kept),
    )
    return whole, len(encoding.ids) - len(kept)


def gap_text(filling: JointFilling, tokenizer: Tokenizer) -> str:
    """What stands in the gap."""
    return tokenizer.decode([token.token for token in filling.tokens], skip_special_tokens=False)
