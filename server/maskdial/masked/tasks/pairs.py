"""One text paired with each of many: a premise and hypotheses, a query and documents.

Each text is tokenized once, however many pairs it is in, and a pair is never longer than the model,
so a long text paired with many costs little more than one pass over it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Literal

from tokenizers import Encoding

from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.task import TaskModel, Truncation, masked_input
from maskdial.models.bundle import Side
from maskdial.models.tokenizer import cut_tokens, longest_first

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
    first_encodings = [tokenizer.encode(text, add_special_tokens=False) for text in firsts]
    second_encodings = [tokenizer.encode(text, add_special_tokens=False) for text in seconds]
    max_length = model.manifest.max_length
    room = max_length - tokenizer.num_special_tokens(pair=True)
    side = truncation.side(model)
    cut_first, cut_second = (
        _cutter(texts, room, side) for texts in (first_encodings, second_encodings)
    )
    inputs = []
    num_truncated = 0
    for (i, first), (j, second) in product(enumerate(first_encodings), enumerate(second_encodings)):
        excess = len(first) + len(second) - room
        if excess > 0:
            if not truncation.enabled:
                raise error(
                    i,
                    j,
                    f"take {max_length + excess} tokens together; model {model.name!r} takes at "
                    f'most {max_length}; shorten them, or set "truncate"',
                )
            if strategy == "longest_first":
                limits = longest_first(len(first), len(second), room)
            elif len(first) > excess:
                limits = len(first) - excess, len(second)
            else:
                raise error(
                    i,
                    j,
                    f"cannot be cut to the {max_length} tokens that model {model.name!r} takes: "
                    f"the second leaves {max(room - len(second), 0)} for the first; shorten it",
                )
            first, second = cut_first(i, limits[0]), cut_second(j, limits[1])
            num_truncated += excess
        inputs.append(masked_input(tokenizer.join(first, second)))
    return inputs, num_truncated


def _cutter(texts: Sequence[Encoding], room: int, side: Side) -> Callable[[int, int], Encoding]:
    """Cuts a text, by its index, to a number of tokens of at most ``room``.

    A long text is cut to ``room`` once, and from there to each length that its pairs leave it.
    """

    @cache
    def cut(index: int, limit: int) -> Encoding:
        whole = texts[index] if limit == room else cut(index, room)
        return cut_tokens(whole, limit, side)

    return cut
