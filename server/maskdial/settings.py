"""Where settings come from: flags, MASKDIAL_* variables and a TOML file.

A name that is no setting, and an empty value, are errors in all three: a server that ignored them
would be open where it was meant to be closed.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from maskdial.errors import ConfigError, shortened

PREFIX = "MASKDIAL_"
"""What the names of the server's variables begin with; the rest is the setting's name."""

_BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_KINDS = {
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
}
"""What pydantic's types of errors ask for."""

_FILE = "config"  # the only setting that the file itself cannot have
# The library of the kernels reads the one, all commands the other.
_NOT_SETTINGS = frozenset({"MASKDIAL_KERNELS_ISA", "MASKDIAL_CACHE"})
_SERVICE_LINK = re.compile(
    rf"{PREFIX}(\w+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The variable of a setting."""
    return PREFIX + name.upper()


def read(names: Collection[str], flags: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """The settings that were given, by name; flags override variables, variables the file.

    Args:
        names: of all settings.
        flags: the flags that were given, by the setting's name.
        file: TOML file; None: that of ``MASKDIAL_CONFIG``, if it is set.

    Raises:
        ConfigError: a name is no setting, a value is empty, or the file cannot be read.
    """
    variables = _variables((*names, _FILE))
    configured = variables.pop(_FILE, None)
    path = file if file is not None or configured is None else Path(configured)
    content = {} if path is None else _read_file(path)
    _check(content, names, f"setting {{!r}} of {path}".format, str)
    _check(flags, names, flag, flag)
    return {**content, **variables, **flags}


def fault_of(error: ErrorDetails, word: str | None) -> str:
    """What is wrong with a setting's value, in the words of somebody who sets it.

    Args:
        error: what pydantic found.
        word: that the setting may be instead of a value, if there is one.
    """
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":  # of our own checks
        return str(context["error"])
    if kind == "literal_error":
        must = f"be {context['expected']}"
    elif kind in _BOUNDS:
        (limit,) = context.values()
        must = f"be {_BOUNDS[kind]} {limit:,}"
    elif kind in _KINDS:
        must = f"be {_KINDS[kind]}"
    else:
        message = error["msg"]
        return f"{message[:1].lower()}{message[1:]}"
    alternative = "" if word is None else f" or {word!r}"
    return f"must {must}{alternative}, not {shortened(str(error['input']))!r}"


def _variables(names: Collection[str]) -> dict[str, str]:
    """The values of all variables that begin as ours, by the setting's name."""
    found = {}
    for name, value in sorted(os.environ.items()):
        # In other letters or with dashes they are meant as ours, too, and must not be ignored.
        if not name.upper().replace("-", "_").startswith(PREFIX) or name in _NOT_SETTINGS:
            continue
        setting = name.removeprefix(PREFIX).lower()
        known = setting in names and name == variable(setting)
        if _SERVICE_URL.match(value) or (not known and _SERVICE_LINK.fullmatch(name)):
            raise ConfigError(
                f"variable {name} is one that Kubernetes sets for a service, and no setting; set "
                "'enableServiceLinks: false' in the pod's specification"
            )
        found[setting if known else name] = value
    _check(
        found, names, lambda name: f"variable {variable(name) if name in names else name}", variable
    )
    return found


def _read_file(path: Path) -> dict[str, Any]:
    where = f"configuration file {path}"
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError as error:
        raise ConfigError(f"{where} does not exist") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{where} is a folder; name the file in it") from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply") from error
    except ValueError as error:  # of the path, of UTF-8, of TOML
        raise ConfigError(f"{where} is not valid TOML: {error}") from error


def _check(
    values: Mapping[str, object],
    names: Collection[str],
    where: Callable[[str], str],
    written: Callable[[str], str],
) -> None:
    """Refuses unknown names, empty values, and bytes that are no text.

    Args:
        values: by name.
        names: those that are known.
        where: what an error calls a value.
        written: how a setting's name is written at that place.
    """
    for name, value in values.items():
        if name not in names:
            plain = name.lower().replace("-", "_").removeprefix(PREFIX.lower())
            found = difflib.get_close_matches(plain, names, 1)
            hint = (
                f"did you mean {written(found[0])}?"
                if found
                else "'maskdial serve --help-all' lists them"
            )
            raise ConfigError(f"{where(name)}: no such setting; {hint}")
        if _is_empty(value):
            raise ConfigError(f"{where(name)} is empty; give it a value, or leave it out")
        if not _is_text(value):
            raise ConfigError(
                f"{where(name)} is not UTF-8; use names of files and folders that are"
            )


def _is_empty(value: object) -> bool:
    """Whether a value, or one of several, is no value at all."""
    parts = _parts(value)
    return not parts or any(isinstance(part, str) and not part.strip() for part in parts)


def _is_text(value: object) -> bool:
    """Whether it can be encoded: bytes that are not UTF-8 come as halves of surrogate pairs."""
    try:
        "".join(part for part in _parts(value) if isinstance(part, str)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(value: object) -> list[object]:
    """The values of a setting: one, or those of a list or a table."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else [value]
