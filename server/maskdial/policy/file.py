"""The file of policies: read, and checked as far as it can be without the models."""

import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from maskdial.errors import ConfigError, io_reason
from maskdial.policy.rules import (
    INPUT_PARTS,
    OUTPUT_PARTS,
    READ_BY_DEFAULT,
    Action,
    Part,
    Policy,
    Rule,
    Side,
)

EVERY, CONTEXT = 32, 16
_TIMEOUT = 10.0
_MAX_WORDS = 4096
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_HEADER = re.compile(r"\s*\[(\[?)\s*([^\]#]+?)\s*\](\]?)")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""", re.ASCII)

_Score = Annotated[float, Field(ge=0, le=1)]
_Words = Annotated[int, Field(ge=1, le=_MAX_WORDS)]


class _RuleTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    on: Side
    model: str
    action: Action
    reads: list[Part] | None = None
    labels: list[str] | dict[str, _Score] = []
    threshold: _Score | None = None
    restore: bool = False
    to: str | None = None
    every: _Words = EVERY
    context: _Words = CONTEXT
    timeout: Annotated[float, Field(gt=0, le=3600)] = _TIMEOUT
    on_failure: Literal["refuse", "pass"] = "refuse"


class _PolicyTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    rules: Annotated[list[_RuleTable], Field(min_length=1)]
    models: list[str] = []
    keys: list[str] = []


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    policies: Annotated[dict[str, _PolicyTable], Field(min_length=1)]


def read_policies(path: Path) -> tuple[Policy, ...]:
    """The policies of a file in TOML.

    Raises:
        ConfigError: it cannot be read, or says something that cannot be meant; with the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy file {path} cannot be read: {io_reason(error)}") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the policy file {path} is no TOML: {error}") from error
    lines = _Lines(text)
    try:
        tables = _File.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = tuple(first["loc"])
        raise _fault(path, lines.of(where), f"{_written(where)}: {first['msg']}") from error
    policies = []
    for name, table in tables.policies.items():
        place: tuple[str | int, ...] = ("policies", name)
        if not _NAME.fullmatch(name):
            raise _fault(path, lines.of(place), f"{name!r} is no name; use letters, digits, . _ -")
        rules = tuple(
            _rule(path, lines, (*place, "rules", i), rule) for i, rule in enumerate(table.rules)
        )
        _check_distinct(path, rules)
        policies.append(
            Policy(name, tuple(table.models), tuple(table.keys), rules, lines.of(place))
        )
    return tuple(policies)


def _rule(path: Path, lines: "_Lines", place: tuple[str | int, ...], table: _RuleTable) -> Rule:
    def fault(field: str, message: str) -> ConfigError:
        return _fault(path, lines.of((*place, field)), f"rule {table.name!r}: {message}")

    known = INPUT_PARTS if table.on == "input" else OUTPUT_PARTS
    reads = READ_BY_DEFAULT[table.on] if table.reads is None else tuple(table.reads)
    for part in reads:
        if part not in known:
            raise fault("reads", f"{part!r} is no part of the {table.on}: {', '.join(known)}")
    if not reads:
        raise fault("reads", "it reads nothing; leave reads out, or name a part")
    if not _NAME.fullmatch(table.name):
        raise fault("name", "its name may have letters, digits, . _ - only")
    other = {"stop": "output", "route": "input"}.get(table.action, table.on)
    if other != table.on:
        raise fault("action", f"{table.action!r} is for rules on the {other}")
    if (table.to is None) == (table.action == "route"):
        raise fault("to", "to names the model that 'route' goes to, and means nothing elsewhere")
    if table.restore and (table.action, table.on) != ("redact", "input"):
        raise fault("restore", "only what is redacted in requests can be restored in replies")
    thresholds = (
        table.labels
        if isinstance(table.labels, dict)
        else dict.fromkeys(table.labels, table.threshold)
    )
    return Rule(
        table.name,
        table.on,
        reads,
        table.model,
        thresholds,
        table.threshold,
        table.action,
        table.restore,
        table.to,
        table.every,
        table.context,
        table.timeout,
        table.on_failure == "pass",
        lines.of(place),
    )


def _check_distinct(path: Path, rules: Sequence[Rule]) -> None:
    """Refuses two rules of one policy that have one name, or contradict each other."""
    for i, rule in enumerate(rules):
        for other in rules[:i]:
            if other.name == rule.name:
                raise _fault(path, rule.line, f"two rules are called {rule.name!r}")
            if (other.side, other.model) != (rule.side, rule.model):
                continue
            if other.action == rule.action or not set(other.parts) & set(rule.parts):
                continue
            for label, threshold in rule.thresholds.items():
                if label in other.thresholds and other.thresholds[label] == threshold:
                    raise _fault(
                        path,
                        rule.line,
                        f"rules {other.name!r} and {rule.name!r} contradict each other: the same "
                        f"score of {label!r} is to {other.action} and to {rule.action}",
                    )


def _fault(path: Path, line: int, message: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}: {message}")


def _written(place: Sequence[str | int]) -> str:
    """A place as TOML writes it."""
    written = ""
    for part in place:
        written += f"[{part}]" if isinstance(part, int) else f".{part}" if written else part
    return written or "the file"


class _Lines:
    """The lines on which tables and keys of a TOML file stand; the standard library's parser does
    not tell.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str | int, ...], int] = {}
        counts: dict[tuple[str | int, ...], int] = {}
        table: tuple[str | int, ...] = ()
        for number, line in enumerate(text.split("\n"), 1):
            if header := _HEADER.match(line):
                names = tuple(part.strip(" \"'") for part in header[2].split("."))
                table = self._resolved(names, counts, header[1] == "[")
                self._note(table, number)
            elif key := _KEY.match(line):
                self._note((*table, key[1]), number)

    def _resolved(
        self,
        names: Sequence[str],
        counts: dict[tuple[str | int, ...], int],
        is_array: bool,
    ) -> tuple[str | int, ...]:
        place: tuple[str | int, ...] = ()
        for i, name in enumerate(names):
            place = (*place, name)
            if is_array and i == len(names) - 1:
                counts[place] = counts.get(place, 0) + 1
            if place in counts:
                place = (*place, counts[place] - 1)
        return place

    def _note(self, place: tuple[str | int, ...], number: int) -> None:
        for length in range(1, len(place) + 1):
            self._lines.setdefault(place[:length], number)

    def of(self, place: Sequence[str | int]) -> int:
        """The line of a place, or of the nearest around it."""
        for length in range(len(place), 0, -1):
            line = self._lines.get(tuple(place[:length]))
            if line is not None:
                return line
        return 1


def check_routes(path: Path, policies: Sequence[Policy]) -> None:
    """Refuses policies by which a request could be routed in a circle.

    Raises:
        ConfigError: it could; with the line.
    """
    routes = [(policy, rule) for policy in policies for rule in policy.rules if rule.to is not None]

    def follow(rule: Rule, passed: tuple[str, ...]) -> None:
        target = rule.to
        assert target is not None
        if passed and target == passed[-1]:
            return  # it is there already
        if target in passed:
            circle = " to ".join([*passed[passed.index(target) :], target])
            raise _fault(path, rule.line, f"rule {rule.name!r} routes in a circle: from {circle}")
        for policy, other in routes:
            if any(fnmatchcase(target, each) for each in policy.models):
                follow(other, (*passed, target))

    for _, rule in routes:
        follow(rule, ())
