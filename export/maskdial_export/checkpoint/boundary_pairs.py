"""The pairs of boundaries that GLiNER2.5 scores: the likeliest ones.

A pair is one integer, so that those found twice are next to each other when sorted.
"""

import torch
from torch import Tensor
from torch.nn import functional

MASKED = -1.0e4  # gliner2's logit of what may not be chosen
_BASE = 1 << 20  # more than a text has boundaries
NO_PAIR = _BASE * _BASE


def top(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest ``count`` of the last dimension's logits, which may be fewer.

    Returns logits, places and which of them there are, (..., count).
    """
    padded = functional.pad(logits, (0, count), value=MASKED)
    values, places = padded.topk(count)
    # What may not be chosen has its place, and a logit that says so
    valid = (places < logits.shape[-1]) & (values > MASKED / 2)
    return torch.where(valid, values, 0.0), torch.where(valid, places, 0), valid


def pair_keys(starts: Tensor, ends: Tensor, valid: Tensor) -> Tensor:
    """Pairs as integers, `NO_PAIR` where they are not valid."""
    return torch.where(valid, starts * _BASE + ends, NO_PAIR)


def spans(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The starts and ends of pairs; both are 0 where there is none."""
    keys = torch.where(keys == NO_PAIR, 0, keys)
    return keys // _BASE, keys % _BASE


def likeliest(keys: Tensor, scores: Tensor, capacity: int) -> Tensor:
    """The distinct pairs with the highest scores, in the order of the text; then `NO_PAIR`.

    Args:
        keys: (..., num_pairs).
        scores: likewise; of equal pairs, the highest counts.
        capacity: how many to return at most.
    """
    scores, order = scores.sort(dim=-1, descending=True)
    ranks = torch.arange(scores.shape[-1])
    # The rank breaks ties, so that the highest score of equal pairs comes first
    ranked = (keys.gather(-1, order) * _BASE + ranks).sort(dim=-1).values
    keys, scores = ranked // _BASE, scores.gather(-1, ranked % _BASE)
    again = torch.cat([keys[..., :1] < 0, keys[..., 1:] == keys[..., :-1]], dim=-1)
    scores = torch.where(again | (keys == NO_PAIR), MASKED, scores)
    _, places, valid = top(scores, capacity)
    return torch.where(valid, keys.gather(-1, places), NO_PAIR).sort(dim=-1).values
