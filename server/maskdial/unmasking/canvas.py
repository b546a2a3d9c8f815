"""Canvas: a text whose masks are being filled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Constraint(Protocol):
    """What the tokens of a blank have to match (`maskdial.grammar.fixed_length.FixedLength`)."""

    def next_tokens(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that may follow others, ascending; not all of them lead to an end."""
        ...

    def completes(self, before: tuple[int, ...], num_left: int) -> bool:
        """Whether others may be followed by ``num_left`` tokens, the last of which ends them."""
        ...


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token in the place of a mask, its natural log-probability in the pass that filled it, and
    that pass, counted from 0.
    """

    position: int
    token: int
    logprob: float
    step: int


@dataclass(frozen=True, slots=True)
class Blank:
    """Masks that are filled together, by their positions; ``words``: what may stand there, as
    token ids of the same number; or ``constraint``: what it has to match, filled from left to
    right.
    """

    positions: tuple[int, ...]
    words: tuple[tuple[int, ...], ...] | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Allowed:
    """Tokens that may fill a mask, ascending: those that ``fits`` says so of, which costs more."""

    tokens: tuple[int, ...]
    fits: Callable[[int], bool] | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Blanks, by their places, that are filled before others, in so many passes; None: a pass for
    each mask.
    """

    places: tuple[int, ...]
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A text with some of its masks filled, in the order of filling."""

    input_ids: tuple[int, ...]
    filled: tuple[FilledToken, ...] = ()

    @property
    def log_probability(self) -> float:
        """The sum of the tokens' log-probabilities, each in the pass that filled it."""
        return sum(each.logprob for each in self.filled)

    def fill(self, token: FilledToken) -> "Draft":
        """The text with another mask filled."""
        at = token.position
        ids = (*self.input_ids[:at], token.token, *self.input_ids[at + 1 :])
        return Draft(ids, (*self.filled, token))


@dataclass(slots=True)
class Canvas:
    """A text whose masks are being filled, with the drafts that a search follows.

    ``blocks`` are filled one after the other; the masks of later ones are seen as such. ``block``
    is the one at work, ``step`` the number of the next pass.
    """

    drafts: list[Draft]
    blanks: tuple[Blank, ...]
    blocks: tuple[Block, ...]
    token_type_ids: tuple[int, ...] | None = None
    seed: int = 0
    block: int = 0
    step: int = 0
    step_in_block: int = 0

    @property
    def num_masks(self) -> int:
        """How many masks it had."""
        return sum(len(blank.positions) for blank in self.blanks)

    @property
    def done(self) -> bool:
        """Whether all of them are filled."""
        return self.block == len(self.blocks)

    @property
    def block_masks(self) -> frozenset[int]:
        """The positions of the block at work, filled or not."""
        blanks = (self.blanks[place] for place in self.blocks[self.block].places)
        return frozenset(position for blank in blanks for position in blank.positions)

    def left(self, draft: Draft) -> tuple[int, ...]:
        """The positions of the block at work that may be filled next, ascending."""
        filled = {each.position for each in draft.filled}
        left: list[int] = []
        for place in self.blocks[self.block].places:
            blank = self.blanks[place]
            masks = [position for position in blank.positions if position not in filled]
            left += masks if blank.constraint is None else masks[:1]
        return tuple(sorted(left))

    def allowed(self, draft: Draft, position: int) -> Allowed | None:
        """The tokens that words or a constraint allow at a position, beside those that fill the
        blank already; None for any.
        """
        blank = next(blank for blank in self.blanks if position in blank.positions)
        if blank.words is None and blank.constraint is None:
            return None
        there = {each.position: each.token for each in draft.filled}
        place = blank.positions.index(position)
        if (constraint := blank.constraint) is not None:
            before = tuple(there[at] for at in blank.positions[:place])
            num_left = len(blank.positions) - place - 1
            return Allowed(
                constraint.next_tokens(before),
                lambda token: constraint.completes((*before, token), num_left),
            )
        assert blank.words is not None
        fitting = (
            word
            for word in blank.words
            if all(there.get(at, own) == own for at, own in zip(blank.positions, word, strict=True))
        )
        return Allowed(tuple(sorted({word[place] for word in fitting})))
