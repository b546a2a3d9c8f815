"""The quality card of a bundle: what `maskdial eval` has measured of it.

It is a file beside the manifest, which does not list it: a bundle that was measured is the same one
to caches, receipts, signatures and servers.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from maskdial.errors import ConfigError, io_reason

CARD = "card.json"
"""The name of the file."""

_MAX_BYTES = 2**20


class _Frozen(BaseModel):
    # A perplexity may be infinite: it is written as Python's `json` does, and read again.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Figure(_Frozen):
    """A score in a metric; ``error`` is the standard error, of means only."""

    metric: str
    value: float
    error: float | None


class Difference(_Frozen):
    """How a score differs from the reference's on the same questions.

    Attributes:
        metric: the metric.
        value: the score less the reference's.
        low, high: where 95% of resampled questions put that.
        lost, won: questions that only the reference, or only this bundle, has right; of counts.
        probability: of a split at least as uneven if both were equal (McNemar's exact test).
    """

    metric: str
    value: float
    low: float
    high: float
    lost: int | None = None
    won: int | None = None
    probability: float | None = None


class Measured(_Frozen):
    """What a task has shown.

    Attributes:
        task: its name.
        task_sha256: of its questions, as they were asked.
        questions: how many there were.
        date: in UTC, as 2026-01-31.
        numerics: the version of the bits; empty if they depend on the machine.
        bundle: the SHA-256 of the bundle's manifest then.
        figures: by metric.
        reference: the SHA-256 of the manifest of the bundle that it is compared with; None for
            nothing.
        reference_name: the name of that one's folder.
        differences: from it.
    """

    task: str
    task_sha256: str
    questions: int = Field(ge=1)
    date: str
    numerics: str
    bundle: str
    figures: tuple[Figure, ...]
    reference: str | None = None
    reference_name: str = ""
    differences: tuple[Difference, ...] = ()


class Card(_Frozen):
    """What all tasks have shown, each with its last measurement."""

    measured: tuple[Measured, ...] = ()

    def of(self, bundle: str) -> "Card":
        """What was measured of the bundle with a manifest of this SHA-256; not of one before."""
        return Card(measured=tuple(each for each in self.measured if each.bundle == bundle))


def read_card(folder: Path) -> Card:
    """The card of a bundle's folder; an empty one if there is none.

    Raises:
        ConfigError: the file cannot be read, or is no card.
    """
    path = folder / CARD
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Card()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {io_reason(error)}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES:,} bytes, so it is no quality card")
    try:
        return Card.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"{path} is no quality card of this version; remove it, or measure again"
        ) from error


def add_to_card(folder: Path, measured: Sequence[Measured]) -> None:
    """Adds measurements to the card of a bundle, in place of those of the same tasks.

    Raises:
        ConfigError: the file there is no card, or cannot be replaced.
    """
    by_task = {each.task: each for each in (*read_card(folder).measured, *measured)}
    path = folder / CARD
    partial = path.with_name(f".{CARD}.partial")
    try:
        text = Card(measured=tuple(by_task.values())).model_dump_json(indent=2)
        partial.write_text(f"{text}\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {io_reason(error)}") from error
