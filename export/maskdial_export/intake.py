"""``python -m maskdial_export.intake``: the export that `maskdial.intake` starts apart.

It prints JSON lines: phases with how far they are, lines of text, and an error, which is one
sentence. It ends when its standard input does, as when the process that started it is killed.
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maskdial.errors import MaskdialError
from maskdial_export.phase import ReportingConsole
from maskdial_export.route import export_any_way

_BETWEEN = 0.2  # seconds from one report of a phase to the next


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports SOURCE to DEST; returns 0, or 1 after reporting an error.

    The folder that DEST is in belongs to the intake, and is removed when the input ends.
    """
    parser = argparse.ArgumentParser(prog="maskdial_export.intake")
    parser.add_argument("source")
    parser.add_argument("dest", type=Path)
    parser.add_argument("--precision")
    parser.add_argument("--revision")
    options = parser.parse_args(arguments)
    folder = options.dest.parent
    threading.Thread(target=_end_with_input, args=(folder,), daemon=True).start()
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no JSON

    def write(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=lines, flush=True)

    report = _Reports(write)
    try:
        from maskdial_export.checkpoint.hub import shown_by

        def downloaded(done: int, total: int, things: str) -> None:
            report({"phase": "Downloading", "done": done, "total": total, "things": things})

        with shown_by(downloaded):
            export_any_way(
                options.source,
                options.dest,
                precision=options.precision,
                revision=options.revision,
                console=ReportingConsole(report),
            )
    except MaskdialError as error:
        report({"error": error.message})
        return 1
    return 0


class _Reports:
    """Passes events on: of those of a phase a few in a second, and the last one."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._phase: object = None
        self._written_at = 0.0
        self._pending: dict[str, Any] | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        is_soon = event.get("phase") == self._phase and now - self._written_at < _BETWEEN
        if "phase" in event and is_soon:
            self._pending = event
            return
        if self._pending is not None and event.get("phase") != self._phase:
            self._write(self._pending)
        self._phase, self._written_at, self._pending = event.get("phase"), now, None
        self._write(event)


def _end_with_input(folder: Path) -> None:
    while os.read(0, 1):  # sys.stdin has a lock, which the end of the interpreter needs
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)  # at once: downloads in threads would be waited for


if __name__ == "__main__":
    sys.exit(main())
