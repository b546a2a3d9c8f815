"""One text beside each of many: a premise and its hypotheses, a query and the texts to rank.

Each text is tokenized once however many pairs it is in, and a pair is never longer than the model,
so that a long text beside many costs little more than alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from tokenizers import Encoding

from maskdial.api.bodies import Truncation
from maskdial.api.masked import masked_input
from maskdial.api.work import tokenize
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedInput
from maskdial.models.registry import MaskedModel
from maskdial.models.tokenizer import cut_tokens, longest_first

CutStrategy = Literal["longest_first", "only_first"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Tokenized pairs, each within the model's length, and how many tokens were cut off them."""

    inputs: list[MaskedInput]
    num_truncated: int


async def read_pairs(
    model: MaskedModel,
    firsts: Sequence[str],
    seconds: Sequence[str],
    truncation: Truncation,
    *,
    strategy: CutStrategy,
    name_pair: Callable[[int, int], str],
) -> Pairs:
    """Tokenizes every first text with every second one, in that order.

    Args:
        truncation: whether pairs that are too long are cut, and at which end of their texts.
        strategy: which text is cut, as transformers names it.
        name_pair: the beginning of an error about the pair of these two indices.

    Raises:
        ValidationError: a pair is too long; the message has both lengths.
    """
    texts = [(text, None) for text in (*firsts, *seconds)]
    encodings = await tokenize(model.tokenizer, model.metrics, texts, add_special_tokens=False)
    tokenized = encodings[: len(firsts)], encodings[len(firsts) :]
    return await asyncio.to_thread(_make_pairs, model, *tokenized, truncation, strategy, name_pair)


def _make_pairs(
    model: MaskedModel,
    firsts: Sequence[Encoding],
    seconds: Sequence[Encoding],
    truncation: Truncation,
    strategy: CutStrategy,
    name_pair: Callable[[int, int], str],
) -> Pairs:
    longest = model.bundle.manifest.max_length
    room = longest - model.tokenizer.num_special_tokens(pair=True)
    cut_first = _cutter(firsts, room, truncation)
    cut_second = _cutter(seconds, room, truncation)
    inputs = []
    num_truncated = 0
    for (i, first), (j, second) in product(enumerate(firsts), enumerate(seconds)):
        excess = len(first) + len(second) - room
        if excess > 0:
            if not truncation.truncate:
                raise ValidationError(
                    f"{name_pair(i, j)} take {longest + excess} tokens together; model "
                    f"{model.bundle.name!r} takes at most {longest}; shorten them, or set "
                    '"truncate"'
                )
            if strategy == "longest_first":
                limits = longest_first(len(first), len(second), room)
            elif len(first) > excess:
                limits = len(first) - excess, len(second)
            else:
                raise ValidationError(
                    f"{name_pair(i, j)} cannot be cut to the {longest} tokens that model "
                    f"{model.bundle.name!r} takes: the second leaves {max(room - len(second), 0)} "
                    "for the first; shorten it"
                )
            first, second = cut_first(i, limits[0]), cut_second(j, limits[1])
            num_truncated += excess
        inputs.append(masked_input(model.tokenizer.join(first, second)))
    return Pairs(inputs, num_truncated)


def _cutter(
    texts: Sequence[Encoding], room: int, truncation: Truncation
) -> Callable[[int, int], Encoding]:
    """Cuts a text, by its index, to a number of tokens of at most ``room``.

    A long text is shortened once, and then once more for each number that its pairs leave to it.
    """
    direction = truncation.truncation_direction or "right"

    @cache
    def cut(index: int, limit: int) -> Encoding:
        return cut_tokens(texts[index] if limit == room else cut(index, room), limit, direction)

    return cut
