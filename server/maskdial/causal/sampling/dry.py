"""DRY: a penalty for tokens that would go on repeating what is in the text already.

Its definition is that of llama.cpp (`llama_sampler_dry_apply`), after an idea of p-e-w's for
text-generation-webui (its pull request 5677).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.tokenizer import Tokenizer

MAX_TAIL = 20
"""Tokens of a breaker after its first one that are compared."""

_MAX_EXPONENT = 512
_MAX_LOG = 88.7228391  # of a float32
_BASE_OF_ONE = 1.000001


@dataclass(frozen=True, slots=True, eq=False)
class Breakers:
    """Where a repetition is cut off: tokens that begin a breaker, with the tokens that complete it.

    Attributes:
        tails: by the first token's id; an empty tail if that token completes the breaker itself.
        heads: bool (vocab_size,), which tokens those are.
    """

    tails: Mapping[int, frozenset[tuple[int, ...]]]
    heads: NDArray[np.bool_]

    @classmethod
    def of(cls, tails: Mapping[int, frozenset[tuple[int, ...]]], vocab_size: int) -> "Breakers":
        """Those with given tails, of which each head is below ``vocab_size``."""
        heads = np.zeros(vocab_size, np.bool_)
        heads[list(tails)] = True
        return cls(tails, heads)

    def num_since(self, token_ids: NDArray[np.int64]) -> int:
        """How many tokens follow the last breaker in a text; all, if there is none.

        Args:
            token_ids: int64 (num_tokens,).
        """
        num_tokens = len(token_ids)
        for place in np.flatnonzero(self.heads[token_ids])[::-1].tolist():
            following = tuple(token_ids[place + 1 : place + 1 + MAX_TAIL].tolist())
            matched = [
                len(tail)
                for tail in self.tails[int(token_ids[place])]
                if following[: len(tail)] == tail
            ]
            if matched:
                return int(num_tokens - 1 - place - max(matched))
        return num_tokens

    def single(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some tokens are a breaker alone, bool (num_tokens,)."""
        found: NDArray[np.bool_] = self.heads[token_ids].copy()
        for i in np.flatnonzero(found).tolist():
            found[i] = () in self.tails[int(token_ids[i])]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """How a sequence is penalized; the attributes are llama.cpp's parameters.

    Attributes:
        multiplier: of the penalty.
        base: which the penalty grows by with each repeated token; at least 1.
        allowed_length: tokens that may be repeated; one more takes the penalty ``multiplier``.
        last_n: tokens to look at; -1 for all.
        breakers: no repetition reaches beyond one.
    """

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: Breakers

    def penalties(
        self, token_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What is subtracted from the scores of the next token, and of which tokens.

        Repetitions are counted up to 512 tokens beyond the allowed ones.

        Args:
            token_ids: int64 (num_tokens,), prompt and generated tokens.

        Returns:
            Unique token ids, int64 (n,), ascending, and their penalties, float32 (n,).
        """
        window = token_ids if self.last_n < 0 else token_ids[max(len(token_ids) - self.last_n, 0) :]
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        if len(window) <= self.allowed_length:
            return nothing
        limit = self.breakers.num_since(window)
        if limit < self.allowed_length:
            return nothing
        most = self._max_exponent()
        lengths = _repeated(window, min(limit, self.allowed_length + most))
        repeats = lengths >= self.allowed_length
        following, places = np.unique(window[1:][repeats], return_inverse=True)
        longest = np.zeros(len(following), np.int64)
        np.maximum.at(longest, places, lengths[repeats])
        counts = ~self.breakers.single(following)
        exponents = np.minimum(longest[counts] - self.allowed_length, most)
        penalties = [self.multiplier * self.base**each for each in exponents.tolist()]
        return following[counts], np.array(penalties, np.float32)

    def _max_exponent(self) -> int:
        """Beyond it the penalty is no float32, or does not grow."""
        if self.base <= _BASE_OF_ONE:
            return 0
        return min(int(_MAX_LOG / math.log(self.base)), _MAX_EXPONENT)


def _repeated(token_ids: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """For each token but the last: how many tokens up to it are those that the text ends with.

    Args:
        token_ids: int64 (num_tokens,).
        limit: no more than so many are counted.
    """
    last = len(token_ids) - 1
    lengths = np.zeros(last, np.int64)
    ends = np.arange(last)
    for length in range(limit):
        ends = ends[np.searchsorted(ends, length) :]
        ends = ends[token_ids[ends - length] == token_ids[last - length]]
        if not len(ends):
            break
        lengths[ends] = length + 1
    return lengths


def read_breakers(tokenizer: Tokenizer, texts: Sequence[str], vocab_size: int) -> Breakers:
    """The tokens of breakers that are given as texts, of which none is empty.

    A token that has the whole text in it breaks alone. One that ends with the text's beginning does
    together with the tokens of the rest.

    Args:
        tokenizer: the model's.
        texts: the breakers.
        vocab_size: of the model; only ids below it matter.
    """
    spellings = tokenizer.spellings[:vocab_size]
    ends = np.cumsum([len(each) for each in spellings], dtype=np.int64)
    spelled = np.frombuffer(b"".join(spellings), np.uint8)
    tails: dict[int, set[tuple[int, ...]]] = {}
    for text in texts:
        content = text.encode()
        whole, begun = _find(spelled, ends, content)
        for token in whole:
            tails.setdefault(token, set()).add(())
        for length, tokens in begun.items():
            rest = _decoded(content[length:])
            if rest is not None and tokens - whole:
                tail = tuple(tokenizer.encode(rest, add_special_tokens=False).ids[:MAX_TAIL])
                for token in tokens - whole:
                    tails.setdefault(token, set()).add(tail)
    return Breakers.of({head: frozenset(found) for head, found in tails.items()}, vocab_size)


def _find(
    spelled: NDArray[np.uint8], ends: NDArray[np.int64], content: bytes
) -> tuple[set[int], dict[int, set[int]]]:
    """The tokens that contain a text, and those that end with its first bytes, by how many."""
    begun: dict[int, set[int]] = {}
    places = np.flatnonzero(spelled == content[0])
    tokens = np.searchsorted(ends, places, side="right")
    for length in range(1, len(content)):
        at_end = places + length == ends[tokens]
        begun[length] = set(tokens[at_end].tolist())
        places, tokens = places[~at_end], tokens[~at_end]
        goes_on = spelled[places + length] == content[length]
        places, tokens = places[goes_on], tokens[goes_on]
    return set(tokens.tolist()), begun


def _decoded(content: bytes) -> str | None:
    """A text; None if the bytes begin within a character."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
