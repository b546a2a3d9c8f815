"""Chat: a conversation in the terminal with a model on a running server."""

import contextlib
import sys
from typing import Any

from maskdial_client.client import Client
from maskdial_client.errors import MaskdialClientError

_COMMANDS = "/reset starts again, /system TEXT sets the instructions, /quit ends"


class Chat:
    """A conversation: lines in, answers out as they are generated.

    The answers go to standard output and everything else to standard error, so a pipe carries the
    answers alone. Where standard input is a terminal, there is a prompt, errors do not end the
    conversation, and Ctrl-C at the prompt drops the line.
    """

    def __init__(self, client: Client, *, system: str | None, parameters: dict[str, Any]) -> None:
        """``parameters`` are those of ``Client.stream``."""
        self._client = client
        self._system = system
        self._parameters = parameters
        self._turns: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Answers line by line, until the input ends or a line is ``/quit``.

        Raises:
            MaskdialClientError: an answer failed, and no person is there to try again.
            ValueError: a line is a command that does not exist, likewise.
        """
        if self._interactive:
            with contextlib.suppress(ImportError):  # not on every system; input() works without
                import readline  # noqa: F401  lets input() edit lines and recall earlier ones
            _say(f"{_COMMANDS}; Ctrl-C stops an answer, Ctrl-D ends")
        while (line := self._read_line()) is not None and line.strip() != "/quit":
            try:
                if line.startswith("/"):
                    self._run_command(line)
                elif line.strip():
                    self._answer(line)
            except (MaskdialClientError, ValueError) as error:
                if not self._interactive:
                    raise
                _say(f"maskdial: {error}")

    def _read_line(self) -> str | None:
        """The next line, or None when there is none."""
        if not self._interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input("> " if sys.stdout.isatty() else "")
        except EOFError:
            _say("")
            return None
        except KeyboardInterrupt:
            _say("")
            return ""

    def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
        elif name == "/system":
            self._system = argument.strip() or None
        else:
            raise ValueError(
                f"no command {name}: {_COMMANDS}; a space before / sends the line to the model"
            )

    def _answer(self, line: str) -> None:
        """Streams an answer. A turn stays in the conversation if any of its answer came."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        question = {"role": "user", "content": line}
        text, details, stopped = "", None, False
        try:
            with self._client.stream(
                messages=[*system, *self._turns, question], **self._parameters
            ) as stream:
                for event in stream:
                    # Before it is printed: Ctrl-C may come as soon as it is.
                    text += event.text
                    details = event.details
                    print(event.text, end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
        except MaskdialClientError:
            if text:
                print()
            raise
        if text or details is not None:
            print(flush=True)
            self._turns += [question, {"role": "assistant", "content": text}]
        if stopped:
            _say("(stopped)")
        elif self._interactive and details is not None and details.finish_reason == "length":
            _say(f"(cut after {details.generated_tokens} tokens, see --max-new-tokens)")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
