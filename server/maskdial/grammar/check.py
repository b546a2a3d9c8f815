"""GrammarChecker: compiles grammars in a child process, which may die.

llguidance bounds most of what a grammar can cost, but not all: some short JSON schemas keep it busy
for hours, and a long chain of references overflows the stack. Neither can be stopped from inside
the process, so every new grammar is compiled in a child process first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maskdial.engine.child import ChildDiedError, ChildLimits, ChildProcess, serve
from maskdial.errors import ValidationError
from maskdial.grammar.build import build_matcher, build_tokenizer

# The address space holds the stack that long chains of references need, and large vocabularies.
LIMITS = ChildLimits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=4 * 2**30)
_NUM_TRIES = 2


class TooComplexError(ValidationError):
    """Compiling the grammar took too long, or ended the child process, again and again."""


class GrammarChecker:
    """Checks that a grammar compiles within its limits. For one thread at a time.

    Args:
        tokenizer_json: the content of ``tokenizer.json``.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        setup = {"tokenizer": tokenizer_json, "eos": list(eos_token_ids)}
        self._child = ChildProcess(__name__, setup, LIMITS)

    def check(self, grammar: str) -> None:
        """Compiles a grammar in the child process.

        Args:
            grammar: in llguidance's format.

        Raises:
            ValidationError: the grammar is wrong.
            TooComplexError: the child process died of it.
            UnavailableError: no child process can be started.
        """
        for _ in range(_NUM_TRIES):
            try:
                error = self._child.ask({"grammar": grammar})
                break
            except ChildDiedError as died:
                if died.too_complex:
                    raise _too_complex() from died
                # Someone else may have ended it, so a good grammar gets another try.
        else:
            raise _too_complex()
        if error is not None:
            raise ValidationError(error)

    def close(self) -> None:
        """Ends the child process."""
        self._child.close()


def _too_complex() -> TooComplexError:
    return TooComplexError(
        "the grammar is too complex: compiling it takes "
        f"more than {LIMITS.cpu_seconds:g} s or too much memory"
    )


def prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str | None]:
    """The child's side: compiles a grammar, and answers with the error in it, if there is one."""
    tokens = build_tokenizer(setup["tokenizer"], setup["eos"])

    def answer(question: Mapping[str, Any]) -> str | None:
        try:
            build_matcher(tokens, question["grammar"])
        except ValidationError as invalid:
            return invalid.message
        return None

    return answer


if __name__ == "__main__":
    serve(prepare)
