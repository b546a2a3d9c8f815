"""LabelEncoder: the second encoder of a model that finds entities, and the vectors it has made."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.engine.fairness import current_usage
from maskdial.engine.offload import offload
from maskdial.engine.timing import Deadline
from maskdial.errors import DeadlineError, ValidationError, shortened
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.request import MaskedInput

_CACHE_BYTES = 64 * 2**20

_Place = tuple[str, str]
"""The name of a key, and a label."""


class LabelEncoder:
    """Turns labels into vectors, and keeps those that were used last, of each key apart: how fast
    labels are answered tells whether they were asked for before.

    Used on the event loop only. A vector is the same to the last bit whatever it is computed with,
    so an answer does not depend on whether it was kept.

    Args:
        engine: the encoder's.
        tokenizer: the encoder's.
        max_length: of a label, in tokens.
        cache_bytes: what the vectors that are kept may take.
    """

    def __init__(
        self,
        engine: MaskedEngine,
        tokenizer: Tokenizer,
        max_length: int,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._room = cache_bytes
        self._kept: OrderedDict[_Place, NDArray[np.float32]] = OrderedDict()

    async def vectors(self, labels: Sequence[str], deadline: Deadline) -> NDArray[np.float32]:
        """The vectors of labels, float32 (num_labels, columns).

        Raises:
            ValidationError: a label is longer than the encoder reads.
            OverloadedError: the encoder's queue has no room for them now.
            DeadlineError: the time is up.
        """
        owner = current_usage().key
        found = {
            label: self._kept[owner, label] for label in labels if (owner, label) in self._kept
        }
        for label in found:
            self._kept.move_to_end((owner, label))
        missing = [label for label in dict.fromkeys(labels) if label not in found]
        if missing:
            seconds = tokenizing_seconds(missing)
            inputs = await offload(partial(self._inputs, missing), seconds, deadline)
            for first in range(0, len(missing), self.engine.max_queue):
                part = slice(first, first + self.engine.max_queue)
                try:
                    results = await self.engine.submit_many(inputs[part], deadline.remaining())
                except DeadlineError as error:
                    raise deadline.missed() from error
                # Copies, as a part of a pass's output would keep all of it
                made = (result.logits.copy() for result in results)
                found |= zip(missing[part], made, strict=True)
            self._keep({(owner, label): found[label] for label in missing})
        return np.stack([found[label] for label in labels])

    def stop(self) -> None:
        """Stops the engine at once."""
        self.engine.stop(0)

    def _inputs(self, labels: Sequence[str]) -> list[MaskedInput]:
        inputs = []
        for label in labels:
            encoding = self._tokenizer.encode(label)
            if len(encoding) > self._max_length:
                raise ValidationError(
                    f"{shortened(label)!r} has {len(encoding)} tokens, and the model reads at most "
                    f"{self._max_length} of a label; shorten it",
                    field="candidate_labels",
                )
            inputs.append(MaskedInput(tuple(encoding.ids), token_type_ids=tuple(encoding.type_ids)))
        return inputs

    def _keep(self, vectors: dict[_Place, NDArray[np.float32]]) -> None:
        for place, vector in vectors.items():
            if place not in self._kept:
                self._room -= vector.nbytes
            self._kept[place] = vector
        while self._room < 0:
            _, dropped = self._kept.popitem(last=False)
            self._room += dropped.nbytes
