"""One text paired with each of many: a premise and hypotheses, a query and documents.

Each text is tokenized once, however many pairs it is in, and a pair is never longer than the model,
so a long text paired with many costs little more than one pass over it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Literal

from tokenizers import Encoding

from maskdial.bundle.manifest import Side
from maskdial.bundle.tokenizer import Tokenizer, cut_tokens, longest_first, shorten
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.task import TaskModel, Truncation, masked_input

CutStrategy = Literal["longest_first", "only_first"]

SECONDS_PER_PAIR = 20e-6

# Returns a ValidationError about the pair of these two indices that says this.
PairError = Callable[[int, int, str], ValidationError]


def read_pairs(
    model: TaskModel,
    firsts: Sequence[str],
    seconds: Sequence[str],
    truncation: Truncation,
    *,
    strategy: CutStrategy,
    error: PairError,
) -> tuple[list[MaskedInput], int]:
    """Tokenizes every first text with every second one, in that order.

    Args:
        truncation: whether, and at which end, texts of a pair that is too long are cut.
        strategy: which of the two texts is cut, as transformers names it.
        error: makes the error about a pair.

    Returns:
        The pairs, and how many tokens were cut off.

    Raises:
        ValidationError: a pair is too long; the message has both lengths.
    """
    tokenizer = model.tokenizer
    max_length = model.manifest.max_length
    for (i, one), (j, other) in product(enumerate(firsts), enumerate(seconds)):
        kept = [one, other]
        if truncation.cuts(model):
            kept = [other] if strategy == "only_first" else []
        if any(tokenizer.exceeds(each, max_length) for each in kept):
            raise error(
                i,
                j,
                f"have {len(one) + len(other):,} characters together; model {model.name!r} takes "
                f'at most {max_length} tokens; shorten them, or set "truncate"',
            )
    room = max_length - tokenizer.num_special_tokens(pair=True)
    side = truncation.side(model)
    read = partial(_Text.read, tokenizer, room, truncation.cuts(model), side)
    inputs = []
    num_truncated = 0
    first_texts, second_texts = [read(each) for each in firsts], [read(each) for each in seconds]
    for (i, first), (j, second) in product(enumerate(first_texts), enumerate(second_texts)):
        excess = first.length + second.length - room
        if excess > 0:
            if not truncation.cuts(model):
                raise error(
                    i,
                    j,
                    f"take {max_length + excess} tokens together; model {model.name!r} takes at "
                    f'most {max_length}; shorten them, or set "truncate"',
                )
            if strategy == "longest_first":
                limits = longest_first(first.length, second.length, room)
            elif first.length > excess:
                limits = first.length - excess, second.length
            else:
                raise error(
                    i,
                    j,
                    f"cannot be cut to the {max_length} tokens that model {model.name!r} takes: "
                    f"the second leaves {max(room - second.length, 0)} for the first; shorten it",
                )
            num_truncated += excess
        else:
            limits = first.length, second.length
        pair = tokenizer.join(first.cut(limits[0]), second.cut(limits[1]))
        inputs.append(masked_input(pair))
    return inputs, num_truncated


class _Text:
    """A text without what no pair has room for.

    Args:
        encoding: what is left of it.
        length: of the whole text, in tokens.
        side: the end at which tokens are cut off.
    """

    def __init__(self, encoding: Encoding, length: int, side: Side) -> None:
        self.length = length
        self._encoding = encoding
        self._side = side
        self._cuts: dict[int, Encoding] = {}

    @classmethod
    def read(
        cls, tokenizer: Tokenizer, room: int, shortens: bool, side: Side, text: str
    ) -> "_Text":
        encoding = tokenizer.encode(text, add_special_tokens=False)
        length = len(encoding)
        if shortens:
            encoding = shorten(encoding, room, side)
        return cls(encoding, length, side)

    def cut(self, limit: int) -> Encoding:
        """Its first or last tokens."""
        if limit not in self._cuts:
            self._cuts[limit] = cut_tokens(self._encoding, limit, self._side)
        return self._cuts[limit]
