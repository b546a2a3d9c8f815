"""Philox: random numbers that depend on a seed and a position only."""

import secrets

import numpy as np

from maskdial.engine.fairness import current_usage

_WORD = 2**64 - 1
_SEED_BITS = 53


def draw_seed() -> int:
    """A fresh seed of 53 bits, which JSON readers with double numbers can give back exactly."""
    return secrets.randbits(_SEED_BITS)


def settle_seed(given: int | None) -> int:
    """The seed of a request: its own, or a fresh one, which its receipt tells.

    Call it in the event loop, where it is known which request is meant.
    """
    told = told_seed(given)
    return draw_seed() if told is None else told


def told_seed(given: int | None) -> int | None:
    """The seed that a receipt tells, the same for all of a request; without one, as given."""
    provenance = current_usage().provenance
    if provenance is None:
        return given
    if given is not None or provenance.seed is None:
        provenance.seed = draw_seed() if given is None else given
    return provenance.seed


class Philox:
    """NumPy's Philox (Salmon et al., SC 2011), a counter-based generator. Not thread-safe.

    One generator is kept and its state is set for each number: a new one takes ten times as long,
    because it asks the system for entropy first.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state

    def uniform(self, seed: int, index: int, stream: int = 0) -> float:
        """Random number ``index`` of a seed below 2**128, in [0, 1), with 53 random bits.

        Each ``stream`` of a seed has numbers of its own.
        """
        words = self._state["state"]
        words["key"][:] = seed & _WORD, seed >> 64
        words["counter"][:] = index, stream, 0, 0
        self._philox.state = self._state
        return (int(self._philox.random_raw()) >> 11) * 2.0**-53
