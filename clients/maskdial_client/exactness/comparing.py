"""What the answers to one question have in common, and where they part."""

from dataclasses import dataclass, field
from typing import Any

from maskdial_client.exactness.asking import Numbers, Written

EQUAL, NUMBERS, TEXTS, BROKEN = 0, 10, 20, 30
"""How bad a finding is, and the exit status: nothing differs; log-probabilities, scores or vectors
do; texts or labels do; answers are missing, or do not fit their schema.
"""


@dataclass(slots=True)
class Outcome:
    """What one check found.

    Attributes:
        check: what was done.
        num_asked: requests whose answers were compared.
        num_other_texts: of these, how many had another text or other labels.
        num_other_numbers: how many had the same, with other numbers.
        compares_numbers: whether any two answers had numbers to compare.
        largest: the largest difference of numbers between equal texts, absolute.
        first: about the first text that was another one.
        broken: a sentence for each answer that was missing or did not fit its schema.
        not_checked: why nothing was asked; empty if something was.
    """

    check: str
    num_asked: int = 0
    num_other_texts: int = 0
    num_other_numbers: int = 0
    compares_numbers: bool = False
    largest: float = 0.0
    first: str = ""
    broken: list[str] = field(default_factory=list)
    not_checked: str = ""

    @property
    def severity(self) -> int:
        """How bad it is: one of the constants above."""
        if self.broken:
            return BROKEN
        if self.num_other_texts:
            return TEXTS
        return NUMBERS if self.num_other_numbers else EQUAL

    def add(self, number: int, expected: Written | Numbers, found: Written | Numbers) -> None:
        """Takes in a further answer to a question, by the question's number."""
        self.num_asked += 1
        if isinstance(expected, Written) and isinstance(found, Written):
            self._add_written(number, expected, found)
        elif isinstance(expected, Numbers) and isinstance(found, Numbers):
            self._add_numbers(number, expected, found)

    def fail(self, number: int, sentence: str) -> None:
        """Takes in that a question got no answer, or a broken one."""
        self.num_asked += 1
        self.broken.append(f"question {number + 1}: {sentence}")

    def to_json(self) -> dict[str, Any]:
        """For the report: the attributes, and the severity."""
        return {
            "check": self.check,
            "asked": self.num_asked,
            "other_texts": self.num_other_texts,
            "other_numbers": self.num_other_numbers,
            "largest_difference": self.largest if self.compares_numbers else None,
            "first_difference": self.first or None,
            "broken": self.broken,
            "not_checked": self.not_checked or None,
            "severity": self.severity,
        }

    def _add_written(self, number: int, expected: Written, found: Written) -> None:
        pairs = list(zip(expected.tokens, found.tokens, strict=False))
        parted = next((i for i, (a, b) in enumerate(pairs) if a.text != b.text), None)
        before = pairs[:parted]
        self._compare(
            [
                (a.logprob, b.logprob)
                for a, b in before
                if a.logprob is not None and b.logprob is not None
            ],
            counts=expected.text == found.text,
        )
        if expected.text != found.text:
            self.num_other_texts += 1
            self.first = self.first or f"question {number + 1}, {_where(expected, found, parted)}"

    def _add_numbers(self, number: int, expected: Numbers, found: Numbers) -> None:
        if expected.labels != found.labels or len(expected.values) != len(found.values):
            self.num_other_texts += 1
            self.first = self.first or f"question {number + 1}: other labels"
            return
        self._compare(list(zip(expected.values, found.values, strict=True)), counts=True)

    def _compare(self, pairs: list[tuple[float, float]], *, counts: bool) -> None:
        if pairs:
            self.compares_numbers = True
            largest = max(abs(a - b) for a, b in pairs)
            self.largest = max(self.largest, largest)
            self.num_other_numbers += counts and largest > 0


def _where(expected: Written, found: Written, parted: int | None) -> str:
    if parted is not None:
        token = expected.tokens[parted]
        gap = "" if token.gap is None else f" (gap to the second {token.gap:.4f})"
        return f"token {parted + 1}{gap}: {token.text!r} became {found.tokens[parted].text!r}"
    place = next(
        (i for i, (a, b) in enumerate(zip(expected.text, found.text, strict=False)) if a != b),
        min(len(expected.text), len(found.text)),
    )
    return (
        f"character {place + 1}: {expected.text[place : place + 20]!r} became "
        f"{found.text[place : place + 20]!r}"
    )
