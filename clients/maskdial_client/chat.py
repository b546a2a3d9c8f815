"""Chat: a conversation with a served model in the terminal."""

import contextlib
import sys
from typing import Any

from maskdial_client import Client, MaskdialClientError
from maskdial_client.terminal import printable

_COMMANDS = "/reset starts over, /system TEXT sets the system prompt, /quit exits"


class Chat:
    """Reads lines from standard input and streams an answer to each.

    Answers go to standard output, all else to standard error, so that a pipe carries only answers.
    If standard input is a terminal, Chat shows a prompt, reports errors and goes on, and Ctrl-C at
    the prompt discards the line.
    """

    def __init__(self, client: Client, *, system: str | None, parameters: dict[str, Any]) -> None:
        """``parameters`` are passed to ``Client.stream``."""
        self._client = client
        self._system = system
        self._parameters = parameters
        self._turns: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Answers lines until the input ends or a line is ``/quit``.

        Raises:
            MaskdialClientError: a request failed.
            ValueError: a line is an unknown command.

        In a terminal, both are reported instead.
        """
        if self._interactive:
            with contextlib.suppress(ImportError):  # missing on some systems
                import readline  # noqa: F401  gives input() line editing and history
            _say(f"{_COMMANDS}; Ctrl-C stops an answer, Ctrl-D exits")
        while (line := self._read_line()) is not None and line.strip() != "/quit":
            try:
                if line.startswith("/"):
                    self._run_command(line)
                elif line.strip():
                    self.answer(line)
            except (MaskdialClientError, ValueError) as error:
                if not self._interactive:
                    raise
                _say(f"maskdial: {error}")

    def _read_line(self) -> str | None:
        """The next line, or None at the end of the input."""
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
                f"unknown command {name}: {_COMMANDS}; to send the line to the model, put a space "
                "before the /"
            )

    def answer(self, line: str) -> None:
        """Streams an answer. The turn joins the conversation once any part of it has arrived.

        Raises:
            MaskdialClientError: the request failed.
        """
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        question = {"role": "user", "content": line}
        text, details, stopped = "", None, False
        try:
            with self._client.stream(
                messages=[*system, *self._turns, question], **self._parameters
            ) as stream:
                for event in stream:
                    # Recorded first, since Ctrl-C may interrupt the printing.
                    text += event.text
                    details = event.details
                    print(printable(event.text, keep="\n\t"), end="", flush=True)
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
        elif details is not None and details.finish_reason == "length":
            _say(f"(cut off after {details.generated_tokens} tokens; see --max-new-tokens)")


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
