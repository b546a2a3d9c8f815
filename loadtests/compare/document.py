"""Document: the report of one run or of several, in files."""

import json
from pathlib import Path
from typing import Any

from loadtests.compare.machine import lines
from loadtests.errors import LoadTestError


class Document:
    """What was measured of each shape and precision, and on what machine.

    It is written again after each, so that what was measured is kept whatever comes.
    """

    def __init__(self, output: Path, facts: dict[str, Any], *, append: bool) -> None:
        """Begins a report, or goes on with the one that is there.

        Raises:
            LoadTestError: that is no report.
        """
        self._output = output
        self._facts = facts
        self._sections: dict[str, Any] = {}
        if append and self.beside(".json").exists():
            try:
                self._sections = json.loads(self.beside(".json").read_text("utf-8"))["sections"]
            except (ValueError, KeyError, TypeError) as error:
                raise LoadTestError(f"{self.beside('.json')} is no report to append to") from error

    def add(self, name: str, section: dict[str, Any]) -> None:
        """Takes a section in, in the place of one of its name, and writes all."""
        self._sections[name] = section
        self._output.parent.mkdir(parents=True, exist_ok=True)
        report = self._facts | {"sections": self._sections}
        self.beside(".json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        tables = [each["table"] for each in self._sections.values()]
        text = "\n\n".join([*lines(self._facts), *tables])
        self.beside(".md").write_text(text.rstrip() + "\n", "utf-8")

    def beside(self, ending: str) -> Path:
        """The file of an ending."""
        return self._output.with_name(self._output.name + ending)
