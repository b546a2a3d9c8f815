"""The blocks of code in the documents.

A block that cannot run on a test's machine has a comment above it, which readers do not see:
``<!-- not run: why -->``.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / name / "README.md" for name in ("clients", "loadtests")),
    *sorted(ROOT.glob("docs/**/*.md")),
)
_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_PUNCTUATION = frozenset("|&;<>()")


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    Attributes:
        place: the file's name and the line of its first line.
        language: as the fence names it; empty if it names none.
        why_not: why it is not run; None: it is.
    """

    place: str
    language: str
    code: str
    why_not: str | None


def blocks(*languages: str) -> Iterator[Block]:
    """Those of the documents in any of these languages, or all of them."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if not languages or match["language"] in languages:
                line = text.count("\n", 0, match.start("code")) + 1
                indent = re.compile(f"^{match['indent']}", re.MULTILINE)
                yield Block(
                    f"{document.relative_to(ROOT)}:{line}",
                    match["language"],
                    indent.sub("", match["code"]),
                    match["why"],
                )


def commands(code: str) -> Iterator[list[str]]:
    """Each command of a block of shell, as its arguments, without redirections."""
    waiting = ""
    for line in code.splitlines():
        waiting += f"{line}\n"
        if line.endswith("\\"):
            continue
        lexer = shlex.shlex(waiting.replace("\\\n", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:  # a quotation goes on
            continue
        waiting, command, is_file = "", list[str](), False
        for token in [*tokens, ";"]:
            if token in ("<", ">"):
                is_file = True
            elif token and set(token) <= _PUNCTUATION:
                if command:
                    yield command
                command = []
            elif is_file:
                is_file = False
            else:
                command.append(token)
    assert not waiting, f"a quotation has no end: {waiting}"
