"""What the server is asked: texts of very different lengths, the same in every run."""

from typing import Any

_OPENINGS = (
    "The lighthouse keeper climbed the stairs and",
    "Once the harbour froze, nobody in the town could",
    "In short:",
    "A list of things that a bridge needs to stand for a hundred years: first,",
    "She counted the coins twice, wrote the sum into the ledger, closed the drawer, looked up and",
    "def median(values):\n    ",
    "The committee met on Tuesday. It had before it three proposals, of which the first was the "
    "longest and the last was the cheapest. After an hour the chair asked for a vote, and",
    "Question: why is the sky darker at the zenith than at the horizon?\nAnswer:",
)
_FILLER = (
    "It had rained since the morning, and the road to the mill was under water. The carter "
    "waited, fed the horses, and mended a strap. Towards noon the rain grew less, a boy came "
    "running from the village, and the dogs began to bark. "
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["letter", "poem", "list"]},
    },
    "required": ["title", "year", "kind"],
    "additionalProperties": False,
}
"""What replies under a schema have to match: short, so that few tokens complete it."""


def questions(number: int) -> list[str]:
    """So many different prompts; each third one is some hundred words longer."""
    found = []
    for index in range(number):
        turn, opening = divmod(index, len(_OPENINGS))
        text = _OPENINGS[opening] if not turn else f"Part {turn + 1}. {_OPENINGS[opening]}"
        found.append(_FILLER * (2 + turn) + text if index % 3 == 2 else text)
    return found


def long_question() -> str:
    """One that is much longer than all others, to be read beside them."""
    return _FILLER * 8 + "Then"


def masked(texts: list[str], mask: str) -> list[str]:
    """The texts, each with one word to be filled in."""
    return [f"{text.splitlines()[0][-200:]} the {mask} again." for text in texts]
