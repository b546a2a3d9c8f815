"""BoundarySpans: the second graph of a model that finds what a schema names by boundaries."""

import numpy as np
from numpy.typing import NDArray

from maskdial.masked.engine import MaskedSession


class BoundarySpans:
    """Finds the spans of a schema's fields; called on the engine's thread.

    A text is read by itself, so its spans are the same bits in any company.
    """

    def __init__(self, session: MaskedSession) -> None:
        self._session = session

    def __call__(
        self,
        words: NDArray[np.float32],
        fields: NDArray[np.float32],
        forced: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Of (num_words, hidden_size) and (num_fields, hidden_size): (num_fields, num_candidates,
        3), the boundaries of spans, both 0 where there is none, and logits. The spans ``forced``
        (num_forced, 2) are among them."""
        return self._session.run({"words": words, "fields": fields, "forced": forced})
