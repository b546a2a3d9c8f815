"""Filters: what of a written text is compared, and how, as lm-evaluation-harness has it."""

import re
import string
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A part of a task's file; what it says beyond its fields is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, pydantic.AfterValidator(_compiled)]


class Regex(Strict):
    """What a regular expression finds; of several groups the first that is not empty."""

    function: Literal["regex"]
    regex_pattern: Pattern = r"#### (\-?[0-9\.\,]+)"
    group_select: int = 0
    fallback: str = "[invalid]"

    def apply(self, text: str) -> str:
        """The match with the number ``group_select``, or the fallback if there is none."""
        found = re.findall(self.regex_pattern, text)
        try:
            match = found[self.group_select]
        except IndexError:
            return self.fallback
        if isinstance(match, tuple):
            match = next(filter(None, match), self.fallback)
        return str(match).strip()


class Stripped(Strict):
    """A text without the white space around it."""

    function: Literal["remove_whitespace"]

    def apply(self, text: str) -> str:
        """The text between."""
        return text.strip()


class First(Strict):
    """The first of several answers: there is one."""

    function: Literal["take_first"]

    def apply(self, text: str) -> str:
        """The text."""
        return text


class Filter(Strict):
    """Steps that a written text goes through, with a name for the score that this gives."""

    name: str
    filter: list[Annotated[Regex | Stripped | First, pydantic.Field(discriminator="function")]]

    def apply(self, text: str) -> str:
        """What is compared of a text."""
        for step in self.filter:
            text = step.apply(text)
        return text


class ExactMatch(Strict):
    """How two texts are compared."""

    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: list[Pattern] = []

    def matches(self, found: str, expected: str) -> bool:
        """Whether a text is the one that should be."""
        return self._bare(found) == self._bare(expected)

    def _bare(self, text: str) -> str:
        for pattern in self.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()
        ignored = string.punctuation if self.ignore_punctuation else ""
        ignored += string.digits if self.ignore_numbers else ""
        return text.translate(str.maketrans("", "", ignored))
