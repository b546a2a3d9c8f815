"""GrammarChecker: compiles grammars in a child process, which may die.

llguidance bounds most of what a grammar can cost, but not all: some short JSON schemas keep it busy
for hours, and a long chain of references overflows the stack. Neither can be stopped from inside
the process, so every new grammar is compiled in a child process first.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from maskdial.causal.grammar.build import build_matcher, build_tokenizer
from maskdial.child_process import child_environment
from maskdial.errors import UnavailableError, ValidationError

CPU_SECONDS = 2.0
# On a busy machine the CPU seconds take longer than that.
WALL_SECONDS = 10.0
_START_SECONDS = 60.0


class GrammarChecker:
    """Checks that a grammar compiles within its limits. For one thread at a time.

    The first check starts the child process, and so does the next one after it has died.

    Args:
        tokenizer_json: the content of ``tokenizer.json``.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        self._setup = {"tokenizer": tokenizer_json, "eos": list(eos_token_ids)}
        self._process: subprocess.Popen[str] | None = None
        self._stop: Callable[[], object] | None = None

    def check(self, grammar: str) -> None:
        """Compiles a grammar in the child process.

        Args:
            grammar: in llguidance's format.

        Raises:
            ValidationError: the grammar is wrong, or the child process died of it.
            UnavailableError: no child process can be started.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask({"grammar": grammar}, WALL_SECONDS)
        if answer is None:
            raise ValidationError(
                "the grammar is too complex: compiling it takes "
                f"more than {CPU_SECONDS:g} s or too much memory"
            )
        if answer["error"] is not None:
            raise ValidationError(answer["error"])

    def close(self) -> None:
        """Ends the child process."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "maskdial.causal.grammar.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            text=True,
            encoding="utf-8",
            # Ctrl-C in the terminal must reach the server only.
            start_new_session=True,
        )
        self._stop = weakref.finalize(self, _end, self._process)
        if self._ask(self._setup, _START_SECONDS) is None:
            self.close()
            raise UnavailableError("the process that checks grammars could not be started")

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """The child process's answer; None if it died, or was killed after ``timeout`` seconds."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        process.wait()
        return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unread input
                pipe.close()


def main() -> None:
    """The child process: reads a tokenizer, then grammars, as JSON lines, and answers each."""
    setup = json.loads(sys.stdin.readline())
    tokenizer = build_tokenizer(setup["tokenizer"], setup["eos"])
    print(json.dumps({"error": None}), flush=True)
    for line in sys.stdin:
        error = None
        _limit_cpu(CPU_SECONDS)
        try:
            build_matcher(tokenizer, json.loads(line)["grammar"])
        except ValidationError as invalid:
            error = invalid.message
        _limit_cpu(0)
        print(json.dumps({"error": error}), flush=True)


def _limit_cpu(seconds: float) -> None:
    """Makes the system end this process after so much CPU time; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
