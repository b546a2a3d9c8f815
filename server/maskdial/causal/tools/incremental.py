"""IncrementalParser: what the parsers of replies share."""

from abc import ABC, abstractmethod

from maskdial.causal.tools.events import ReplyDelta, merged
from maskdial.causal.tools.scanner import Reader, Scanner


class IncrementalParser(ABC):
    """Parses one reply, in pieces of any size; where the pieces are split does not matter.

    Attributes:
        num_calls: the number of calls so far.
        reasoning: whether the text is within the model's thinking.
        incomplete: the text ended, or went wrong, inside a call.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.reasoning = False
        self.incomplete = False
        self._input = Scanner()
        self._deltas: list[ReplyDelta] = []
        self._reader: Reader | None = None

    @property
    @abstractmethod
    def special_tags(self) -> frozenset[str]:
        """The tags that are special tokens. Decoders leave these out of the text, so the caller
        pushes their spelling.
        """

    @abstractmethod
    def _reply(self) -> Reader:
        """Reads the whole reply into ``_deltas``."""

    def push(self, text: str) -> list[ReplyDelta]:
        """Takes the next piece of the reply; returns what is certain so far."""
        self._input.text += text
        return self._run()

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        """Ends the reply; returns what was held back. Call it once.

        ``cut``: the reply was cut off, for example by ``max_tokens``; half a tag at its end is
        dropped.
        """
        self._input.ended = True
        self._input.cut = cut
        return self._run()

    def _run(self) -> list[ReplyDelta]:
        if self._reader is None:
            self._reader = self._reply()
        next(self._reader, None)
        deltas, self._deltas = self._deltas, []
        return merged(deltas)
