"""``deploy/locks/``: do they hold what the container image needs, at the tested versions?"""

import re
from collections.abc import Iterator
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from tools.image_locks import CONSTRAINTS, LOCKS, PYTHON, normalized, pins, requirements

IMAGE = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
NAMES = list(requirements())


def lock(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text(encoding="utf-8")


def needed(texts: list[str], extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """Those of some requirements that the image's Python needs."""
    for text in texts:
        one = Requirement(text)
        marker = one.marker
        if marker is None or any(
            marker.evaluate({**IMAGE, "extra": extra}) for extra in ("", *extras)
        ):
            yield one


def closure(texts: list[str]) -> set[str]:
    """All packages that requirements need, by the metadata of what is installed here."""
    found: set[str] = set()
    done: set[tuple[str, frozenset[str]]] = set()
    waiting = list(needed(texts))
    while waiting:
        one = waiting.pop()
        name, extras = normalized(one.name), frozenset(one.extras)
        found.add(name)
        if (name, extras) not in done:
            done.add((name, extras))
            waiting += needed(requires(name) or [], extras)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_requirement_is_locked_at_the_constrained_version(name: str) -> None:
    locked = pins(lock(name))
    tested = pins(CONSTRAINTS.read_text(encoding="utf-8"))
    for one in needed(requirements()[name]):
        assert one.specifier.contains(locked[normalized(one.name)]), one
    assert {each: tested[each] for each in locked if each in tested} == {
        each: version for each, version in locked.items() if each in tested
    }, "make locks"


@pytest.mark.parametrize("name", ["server", "otel"])
def test_a_lock_has_all_that_its_packages_need_and_nothing_else(name: str) -> None:
    """Of those that are installed here, whose own requirements are therefore known."""
    assert pins(lock(name)).keys() == closure(requirements()[name]), "make locks"


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_a_hash(name: str) -> None:
    text = re.sub(r"^#.*\n", "", lock(name), flags=re.MULTILINE)
    assert re.fullmatch(r"([\w-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n)+", text)


def test_locks_agree() -> None:
    """They are installed into one environment."""
    entries: dict[str, str] = {}
    for name in NAMES:
        for entry in re.split(r"\n(?=[\w-]+==)", lock(name).rstrip("\n"))[1:]:
            package = entry.split("==")[0]
            assert entries.setdefault(package, entry) == entry
