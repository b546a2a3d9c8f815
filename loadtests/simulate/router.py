"""Router: which replica gets a request."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Protocol

from loadtests.simulate.request import Request

POLICIES = ("random", "round-robin", "two-choices", "least-waiting", "session", "prefix")
"""What a router goes by: chance; turns; the less busy of two at random; the least busy of all;
consistent hashing of the conversation, or of the instructions that it begins with."""

_POINTS = 64
_SPREAD = 1.25


class Target(Protocol):
    """What a router knows of a replica: its number, and how many requests it has."""

    number: int
    num_open: int


class Router:
    """Chooses among replicas by one of `POLICIES`; ``rng`` draws what chance decides.

    With affinity, a replica is passed over that has no free slot and more than 1.25 times the mean
    number of requests (consistent hashing with bounded loads, Mirrokni et al. 2018).
    """

    def __init__(
        self, policy: str, rng: random.Random, replicas: Sequence[Target], slots: int
    ) -> None:
        assert policy in POLICIES, policy
        self._policy = policy
        self._rng = rng
        self._replicas = replicas
        self._slots = slots
        self._index = {replica.number: index for index, replica in enumerate(replicas)}
        self._ring = Ring(tuple(self._index) if policy in ("session", "prefix") else ())
        self._turn = 0

    def choose(self, request: Request) -> int:
        """The index of a replica, of which there has to be one at least."""
        match self._policy:
            case "random":
                return self._rng.randrange(len(self._replicas))
            case "round-robin":
                self._turn += 1
                return self._turn % len(self._replicas)
            case "two-choices":
                both = [self._rng.randrange(len(self._replicas)) for _ in range(2)]
                return min(both, key=self._load)
            case "least-waiting":
                return self._least()
            case "session":
                return self._near(f"conversation {request.conversation}")
        return self._near(f"instructions {request.instructions}")

    def _least(self) -> int:
        """The least busy; of several, the next one from a place at random."""
        loads = self._all_loads()
        least, start = min(loads), self._rng.randrange(len(loads))
        try:
            return loads.index(least, start)
        except ValueError:
            return loads.index(least)

    def _near(self, key: str) -> int:
        """The first replica from the key's place on the ring that is not too busy."""
        walk = (self._index[name] for name in self._ring.walk(key))
        first = next(walk)
        if self._load(first) < self._slots:
            return first
        loads = self._all_loads()
        limit = max(self._slots, _SPREAD * sum(loads) / len(loads))
        return next((index for index in chain([first], walk) if loads[index] < limit), first)

    def _load(self, index: int) -> int:
        return self._replicas[index].num_open

    def _all_loads(self) -> list[int]:
        return [replica.num_open for replica in self._replicas]


class Ring:
    """A consistent hash (Karger et al. 1997): few keys move when a replica comes or goes.

    Args:
        names: numbers of the replicas, each of which has 64 points on the ring.
    """

    def __init__(self, names: Sequence[int]) -> None:
        points = sorted(
            (_hash(f"{name} {point}"), name) for name in names for point in range(_POINTS)
        )
        self._places = [place for place, _ in points]
        self._names = [name for _, name in points]

    def walk(self, key: str) -> Iterator[int]:
        """The names from the key's place on, once around the ring; most come several times."""
        start = bisect_right(self._places, _hash(key))
        for index in range(start, start + len(self._names)):
            yield self._names[index % len(self._names)]


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
