"""FirstComeEngine: what the masked engine would be if it batched in the order of arrival."""

from typing import Any

from maskdial.masked.batcher import Batcher, EntryT
from maskdial.masked.engine import MaskedEngine


class FirstComeBatcher(Batcher[EntryT]):
    """Batches of whatever is next, under the same budget of padded tokens."""

    def next_batch(self) -> list[EntryT]:
        batch: list[EntryT] = []
        longest = 0
        while self._by_arrival:
            oldest = next(iter(self._by_arrival))
            longest = max(longest, oldest.length)
            if batch and longest * (len(batch) + 1) > self.max_batch_tokens:
                break
            self.discard(oldest)
            batch.append(oldest)
        return batch


class FirstComeEngine(MaskedEngine):
    """Takes what `MaskedEngine` takes, and is the same in everything else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batcher = FirstComeBatcher(self._batcher.max_batch_tokens)
