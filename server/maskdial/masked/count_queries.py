"""CountQueries: the second graph of a model that finds what a schema names."""

import numpy as np
from numpy.typing import NDArray

from maskdial.masked.engine import MaskedSession


class CountQueries:
    """Makes queries of the hidden states of a task's fields; called on the engine's thread.

    A task's queries are computed by themselves, so they are the same bits in any company.
    """

    def __init__(self, session: MaskedSession) -> None:
        self._session = session

    def __call__(self, fields: NDArray[np.float32], num_steps: int) -> NDArray[np.float32]:
        """Of fields (num_fields, hidden_size): (num_steps, num_fields, 4 * hidden_size + 1)."""
        return self._session.run({"fields": fields, "steps": np.arange(num_steps)})
