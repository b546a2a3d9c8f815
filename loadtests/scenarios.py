"""What the requests say: tasks and texts of varied length, drawn from a seed."""

import random
from dataclasses import dataclass

from loadtests.samples import Kind

_SENTENCES = (
    "The kettle was already singing when she came down to the kitchen.",
    "Nobody had told the gardener that the gate would be locked.",
    "He read the letter twice and put it back under the clock.",
    "Rain again.",
    "A small boat lay upside down on the grass behind the harbour office.",
    "They had expected a crowd, but only four people and a dog were waiting on the platform.",
    "The film begins well and then forgets what it was about.",
    "I would see it again tomorrow.",
    "Her brother kept bees, which explained the honey and most of the noise.",
    "By noon the snow on the roof had turned to water and the water had found the hole.",
    "It is a warm and funny story with one very good song in it.",
    "The lamp went out.",
    "On the third day the road ended at a river that was on none of their maps.",
    "What the old man said about the bridge turned out to be true.",
    "The jokes are tired, the actors look tired, and soon the audience is tired as well.",
    "Every morning the baker left two loaves on the wall, and every evening they were gone.",
    "She counted the stairs without knowing why.",
    "The teacher drew a circle, a smaller circle inside it, and then put down the chalk.",
    "Somewhere below, a door closed.",
    "It took all summer to paint the fence, because there was always something better to do.",
)
_MIXED_KINDS = (Kind.GENERATE, Kind.FILL_MASK, Kind.CLASSIFY)
_MIXED_WEIGHTS = (2, 1, 1)
_MAX_SENTENCES = 6

SCENARIOS = (*(kind.value for kind in Kind), "mixed")
"""Names for --scenario; in ``mixed`` half of the requests generate."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. ``seed`` is for sampling; only a generate job uses it."""

    kind: Kind
    text: str
    seed: int


def draw_jobs(scenario: str, count: int, seed: int) -> tuple[Job, ...]:
    """``count`` jobs of a scenario; the same seed gives the same jobs."""
    rng = random.Random(seed)
    kinds = _kinds(scenario, count, rng)
    return tuple(Job(kind, _text(kind, rng), rng.randrange(2**31)) for kind in kinds)


def _kinds(scenario: str, count: int, rng: random.Random) -> list[Kind]:
    if scenario == "mixed":
        return rng.choices(_MIXED_KINDS, _MIXED_WEIGHTS, k=count)
    return [Kind(scenario)] * count


def _text(kind: Kind, rng: random.Random) -> str:
    words = " ".join(rng.sample(_SENTENCES, rng.randint(1, _MAX_SENTENCES))).split()
    if kind is Kind.FILL_MASK:
        words[rng.randrange(len(words))] = "[MASK]"
    return " ".join(words)
