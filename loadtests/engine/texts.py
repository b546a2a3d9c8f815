"""Texts that the speculation section writes, each with the prompt before it."""

from dataclasses import dataclass

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
    """What a model is asked, and what it is to write."""

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
"""By name. A quote; sentences of the prompt with others between them; its words, but not its
sentences; nothing of it."""
