"""Stop strings, found in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Releases text up to the first completed stop string, however the text is cut into pieces.

    The first to be *completed* wins; of those completed by the same character, the longest.

    Args:
        stops: non-empty strings.
        include: whether the stop string itself is released, as text-generation-inference does, or
            cut off, as OpenAI does. When it is cut off, text that may still become one is held
            back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._lookback = max((len(stop) for stop in self._stops), default=1) - 1
        self._window = ""
        self._num_released = 0  # of the window's characters
        self.matched = False

    def push(self, text: str) -> str:
        """Takes the next piece and returns what may be shown now; nothing once it matched."""
        if self.matched:
            return ""
        self._window += text
        match = self._first_match()
        if match is not None:
            self.matched = True
            start, end = match
            return self._release(end if self._include else start)
        held = 0 if self._include else self._num_undecided()
        released = self._release(len(self._window) - held)
        self._forget()
        return released

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        return "" if self.matched else self._release(len(self._window))

    def _first_match(self) -> tuple[int, int] | None:
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._window.find(stop)) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _num_undecided(self) -> int:
        """The length of the longest ending of the window that is the beginning of a stop string."""
        longest = min(self._lookback, len(self._window))
        return next(
            (
                length
                for length in range(longest, 0, -1)
                if any(stop.startswith(self._window[-length:]) for stop in self._stops)
            ),
            0,
        )

    def _release(self, end: int) -> str:
        released = self._window[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return released

    def _forget(self) -> None:
        num_forgotten = max(len(self._window) - self._lookback, 0)
        self._window = self._window[num_forgotten:]
        self._num_released -= num_forgotten
