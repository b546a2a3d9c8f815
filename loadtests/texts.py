"""The texts that are sent, generated from and followed in the measurements."""

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a request asks for."""

    GENERATE = "generate"
    FILL_MASK = "fill-mask"
    CLASSIFY = "classify"


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
"""Choices of --scenario. In ``mixed``, half of the requests generate."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. ``seed`` is the sampling seed of a generation."""

    kind: Kind
    text: str
    seed: int


def draw_jobs(scenario: str, count: int, seed: int) -> tuple[Job, ...]:
    """Draws ``count`` jobs of a scenario; the same seed gives the same jobs."""
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


_PASSAGE = (
    "The ferry at Holm crosses the sound eleven times a day between April and October, and four "
    "times a day in winter. It carries twenty cars, two lorries and about a hundred passengers. "
    "The crossing takes nine minutes in calm weather. When the wind blows from the north-west, "
    "the captain steers a wide curve around the skerries, and the trip may take half an hour. "
    "Tickets are sold on board only; children under six and bicycles travel free of charge. "
    "The old ferry was built of oak in 1931 and served for forty-four years before the steel "
    "one replaced her. She lies in the harbour now, and the school uses her as a workshop. "
    "Last year the council decided to order an electric ferry, which will load its batteries "
    "from the island's three windmills. It is to be delivered in the spring after next, and the "
    "timetable will stay as it is until then."
)

_COPY = (
    "The crossing takes nine minutes in calm weather. When the wind blows from the north-west, "
    "the captain steers a wide curve around the skerries, and the trip may take half an hour. "
    "Tickets are sold on board only; children under six and bicycles travel free of charge. "
    "The old ferry was built of oak in 1931 and served for forty-four years before the steel "
    "one replaced her. She lies in the harbour now, and the school uses her as a workshop."
)

_SUMMARY = (
    "In short: the ferry at Holm crosses the sound eleven times a day between April and October. "
    "Normally this is quick, as the crossing takes nine minutes in calm weather; only a storm "
    "changes that. Nobody needs to book, because tickets are sold on board only. What is new is "
    "that last year the council decided to order an electric ferry, which will load its "
    "batteries from the island's three windmills. Passengers notice nothing yet: the timetable "
    "will stay as it is until then."
)

_RETELLING = (
    "From April to October the ferry leaves eleven times a day; in winter the council allows "
    "four. There is room for two lorries, for cars, and for a hundred passengers or so. In calm "
    "weather the trip is short, but the wind from the north-west makes the captain take a curve "
    "that may last half an hour. Children under six travel free, and so do bicycles. The old "
    "ferry, built in 1931, is a workshop of the school in the harbour now. An electric ferry is "
    "on order; the island's windmills will load its batteries from the spring after next."
)

_FREE = (
    "My grandmother kept bees behind the orchard wall. Each morning she put on a grey coat and "
    "walked slowly from hive to hive, talking under her breath, while I watched through a gap in "
    "the bricks. Once a swarm settled in our chimney. She lit no fire for a week, slept in the "
    "kitchen, and told visitors to whisper. In August we turned the handle of a dented drum "
    "until honey ran out, thick and brown, and everything we touched was sticky for days."
)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the text to write after it."""

    prompt: str
    target: str


TASKS = {
    "copy": Task(f"{_PASSAGE}\n\nRepeat what the text says from the crossing on.\n\n", _COPY),
    "extractive summary": Task(
        f"{_PASSAGE}\n\nSum the text up in its own sentences.\n\n", _SUMMARY
    ),
    "retelling": Task(f"{_PASSAGE}\n\nTell it in your own words.\n\n", _RETELLING),
    "free text": Task(f"{_PASSAGE}\n\nTell a story about something else.\n\n", _FREE),
}
"""Targets that repeat the prompt less and less: a quote; sentences of the prompt with others in
between; its words but not its sentences; nothing of it.
"""
