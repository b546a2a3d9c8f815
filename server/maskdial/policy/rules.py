"""What a policy says: its rules."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from maskdial.causal.events import Verdict

Side = Literal["input", "output"]
Action = Literal["refuse", "redact", "flag", "stop", "route"]
Part = Literal[
    "system", "user", "assistant", "tool", "document", "content", "reasoning", "arguments"
]
"""What a rule reads: the messages of a role (a prompt is the user's), or a part of a reply."""

INPUT_PARTS: tuple[Part, ...] = ("system", "user", "assistant", "tool", "document")
OUTPUT_PARTS: tuple[Part, ...] = ("content", "reasoning", "arguments")
READ_BY_DEFAULT: Mapping[Side, tuple[Part, ...]] = {
    "input": ("user", "tool", "document"),
    "output": OUTPUT_PARTS,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: within its policy.
        side: whether it reads requests or replies.
        parts: of them that it reads.
        model: the served model that decides.
        thresholds: the labels that matter, each with the score from which on it does; empty for all
            labels of a tagger. None: as the model was calibrated, or a half.
        threshold: of labels that are not named.
        action: what happens then.
        restore: of ``redact`` in requests: whether replies get the values back.
        to: of ``route``: the model that answers in place of the one that was meant.
        every: words of a reply after which the model is asked again; less at a reply's beginning,
            and where a sentence ends.
        context: words that the model sees beside those: of a tagger on both sides, of a classifier
            before them.
        timeout: seconds that a verdict may take.
        lets_pass: whether a text that could not be judged goes on, which is logged; otherwise it is
            refused.
        line: of the file.
    """

    name: str
    side: Side
    parts: tuple[Part, ...]
    model: str
    thresholds: Mapping[str, float | None]
    threshold: float | None
    action: Action
    restore: bool
    to: str | None
    every: int
    context: int
    timeout: float
    lets_pass: bool
    line: int

    @property
    def holds(self) -> bool:
        """Whether a text waits for its verdict; what is only told of waits for nothing."""
        return self.action != "flag"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules, with the models and keys that they bind.

    Attributes:
        name: of the policy.
        models: names or patterns of models; empty where a request has to ask for the policy.
        keys: names or patterns of keys; empty for all, and for requests without one.
        rules: in the order of the file.
        line: of the file.
    """

    name: str
    models: tuple[str, ...]
    keys: tuple[str, ...]
    rules: tuple[Rule, ...]
    line: int

    def binds(self, names: Collection[str], key: str | None) -> bool:
        """Whether it holds for all requests to a model of these names that come with a key; None
        for any key.
        """
        if self.keys and key is not None and not any(fnmatchcase(key, each) for each in self.keys):
            return False
        return any(fnmatchcase(name, each) for name in names for each in self.models)


UNCHECKED = "unchecked"
"""The label of a text that could not be judged, and went on."""

_STRICTNESS = ("refuse", "stop", "route", "redact", "flag")


def strongest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that decides: of the strictest action the one with the highest score."""
    return min(verdicts, key=lambda each: (_STRICTNESS.index(each.action), -each.score))
