"""Workload: conversations that begin at random times, independent of earlier ones."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens, log-normal with a coefficient of variation of ``spread``; at least 1."""

    mean: float
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if not self.spread:
            return max(round(self.mean), 1)
        variance = math.log1p(self.spread**2)
        drawn = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return max(round(drawn), 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: seconds after the last reply, new tokens, tokens to generate."""

    pause: float
    num_new: int
    num_generated: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Begins ``start`` seconds after the start, with instructions that others may share."""

    number: int
    start: float
    instructions: int
    num_instructions: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Draws conversations.

    Conversations are a Poisson process; within one, a turn follows the reply to the one before it
    after a pause, exponentially distributed.

    Attributes:
        turns: of a conversation.
        prompt: new tokens of a turn.
        generated: tokens of a reply.
        pause: mean seconds between a reply and the next turn.
        num_instructions: tokens of the instructions that a conversation begins with.
        num_kinds: different instructions; the k-th is chosen in proportion to 1/k (Zipf).
    """

    turns: int = 1
    prompt: Length = Length(64)
    generated: Length = Length(64)
    pause: float = 10.0
    num_instructions: int = 0
    num_kinds: int = 1

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt: instructions, earlier turns with their replies, and the new ones."""
        earlier = (self.turns - 1) / 2 * (self.prompt.mean + self.generated.mean)
        return self.num_instructions + earlier + self.prompt.mean

    def conversations(self, rate: float, seconds: float, seed: int) -> Iterator[Conversation]:
        """Conversations in the order of their start, with so many requests per second, until no
        more begin after so many seconds; the same seed gives the same ones.
        """
        rng = random.Random(seed)
        weights = [1 / kind for kind in range(1, self.num_kinds + 1)]
        kinds = range(self.num_kinds)
        start = 0.0
        for number in count():
            start += rng.expovariate(rate / self.turns)
            if start >= seconds:
                return
            turns = tuple(self._turn(rng, first=index == 0) for index in range(self.turns))
            (kind,) = rng.choices(kinds, weights)
            yield Conversation(number, start, kind, self.num_instructions, turns)

    def _turn(self, rng: random.Random, *, first: bool) -> Turn:
        pause = 0.0 if first else rng.expovariate(1 / self.pause)
        return Turn(pause, self.prompt.draw(rng), self.generated.draw(rng))
