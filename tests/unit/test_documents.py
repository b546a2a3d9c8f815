"""The documents say what is so: their links lead somewhere, and names that they tell exist."""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from maskdial import cli, settings
from maskdial.app import create_app
from maskdial.config import SETTINGS, Config
from tools import metrics_table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("clients/*.md"),
        *ROOT.glob("loadtests/*.md"),
    ]
)
COMMANDS = (
    *("serve", "export", "export-adapter", "calibrate", "eval", "exactness"),
    *("batch", "cache", "prefill", "fill", "run", "health", "inspect", "verify", "chat"),
)
NAMES = [str(each.relative_to(ROOT)) for each in DOCUMENTS]


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    text = document.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Of a document's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        number = 1
        while (each := anchor if number == 1 else f"{anchor}-{number - 1}") in found:
            number += 1
        found.add(each)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = re.sub(r"`[^`\n]*`", "", prose(document))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target}: no such file"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}: no such heading"


def test_metrics_exist() -> None:
    known = set(re.findall(r"`(maskdial_\w+)`", metrics_table.page()))
    bases = {re.sub(r"_total$", "", each) for each in known}
    others = {"maskdial_client", "maskdial_export", "maskdial_kernels"}
    for document in DOCUMENTS:
        if document.name in ("CHANGELOG.md", "CONTRIBUTING.md"):
            continue  # of earlier versions; of modules
        text = document.read_text(encoding="utf-8")
        for name in re.findall(r"\bmaskdial_[a-z_]+[a-z]\b", text):
            assert name in known | bases | others, f"{document.name}: {name}"


def test_the_site_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .*: (\S+\.md)$", text, re.MULTILINE)
    pages = {str(each.relative_to(ROOT / "docs")) for each in ROOT.glob("docs/**/*.md")}
    assert {each for each in named if not each.startswith("repository/")} == pages
    assert len(named) == len(set(named))


def paragraphs(document: Path) -> Iterator[str]:
    """A document's paragraphs and items of lists, without comments and tables."""
    text = re.sub(r"<!--.*?-->", "", prose(document), flags=re.DOTALL)
    for part in re.split(r"\n(?=\s*\n|\s*[-*] |\s*\d+\. |#|\|)", text):
        if not part.strip().startswith(("#", "|")):
            yield part


def flags() -> set[str]:
    """Of all commands, and those that sources of load tests and of `maskdial ray` name."""
    found: set[str] = set()
    parsers = [cli.command_parser(each) for each in ("", *COMMANDS)]
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    for folder in ("loadtests", "server/maskdial/ray"):
        for file in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r'"(--[a-z][a-z0-9-]+)"', file.read_text(encoding="utf-8")))
    return found


# Of docker, kubectl and pip; misspelled ones, in reliability.md; one that a load test composes.
OTHER_FLAGS = {"--from-file", "--no-deps", "--time", "--api-keys", "--api-k", "--writer"}


def test_flags_exist() -> None:
    known = flags() | OTHER_FLAGS
    documents = [ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("docs/*.md")]
    for document in documents:
        if document.name == "moving.md":
            continue  # of other projects
        for code in re.findall(r"`[^`\n]*`", prose(document)):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code):
                assert flag in known, f"{document.name}: {flag}"


# Paragraphs of more than 60 words. These numbers only fall.
LONG_PARAGRAPHS: Mapping[str, int] = {
    "architecture.md": 1,
    "evaluation.md": 1,
    "export.md": 10,
    "kernels.md": 2,
    "performance.md": 3,
    "receipts.md": 1,
    "reliability.md": 1,
    "understanding.md": 1,
}
# Lines of pages that have more than 150; they only fall, too. Generated pages grow by themselves.
LONG_PAGES: Mapping[str, int] = {
    "architecture.md": 330,
    "clients.md": 200,
    "export.md": 790,
    "generation.md": 152,
    "kernels.md": 365,
    "moving.md": 181,
    "performance.md": 374,
    "reliability.md": 194,
    "supported-models.md": 368,
    "understanding.md": 240,
    "unmasking.md": 221,
}


@pytest.mark.parametrize("name", [each.name for each in ROOT.glob("docs/*.md")])
def test_a_page_can_be_read(name: str) -> None:
    """What was measured or tried is for docs/lab."""
    document = ROOT / "docs" / name
    num_long = sum(len(each.split()) > 60 for each in paragraphs(document))
    assert num_long <= LONG_PARAGRAPHS.get(name, 0)
    num_lines = len(document.read_text(encoding="utf-8").splitlines())
    assert num_lines <= LONG_PAGES.get(name, 150)


def rows_here(text: str) -> list[str]:
    """The last column of each table: what there is here."""
    return [row.split("|")[-2] for row in text.splitlines() if row.startswith("| ")]


def test_what_stands_for_another_projects_names_exists() -> None:
    here = "\n".join(rows_here((ROOT / "docs" / "moving.md").read_text(encoding="utf-8")))
    paths = {route.path for route in create_app(Config()).routes if hasattr(route, "path")}
    flags = {settings.flag(name) for name in SETTINGS} | {"--precision"}
    routes = set(re.findall(r"`(/[a-z0-9_/-]+)`", here))
    found = set(re.findall(r"`(--[a-z-]+)", here))
    assert len(routes) > 5
    assert routes <= paths
    assert len(found) > 30
    assert found <= flags, found - flags


def test_routes_that_are_the_same_exist() -> None:
    paths = {route.path for route in create_app(Config()).routes if hasattr(route, "path")}
    text = (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")
    same = [row for row in text.splitlines() if re.search(r"\| (on|the same)\b[^|]*\|$", row)]
    named = {path for row in same for path in re.findall(r"`(/[a-z0-9_/-]*)`", row.split("|")[1])}
    assert len(named) > 40
    assert named <= paths, named - paths
