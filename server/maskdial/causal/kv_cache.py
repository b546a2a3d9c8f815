"""KVCache: the keys and values of every running sequence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle import KVLayout
from maskdial.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer, keys and values of shape (slots, num_heads, max_length, head_dim).

    A slot holds one sequence. Arrays this large come straight from the operating system, which
    commits memory only when a page is first written: a slot costs what its longest sequence used.
    """

    keys: tuple[NDArray[np.generic], ...]
    values: tuple[NDArray[np.generic], ...]
    bytes_per_token: int

    @classmethod
    def allocate(cls, layout: KVLayout, slots: int, max_length: int) -> "KVCache":
        """Reserves the memory.

        Raises:
            ConfigError: the operating system will not reserve this much.
        """
        dtype = np.dtype(layout.dtype)
        shape = (slots, layout.num_heads, max_length, layout.head_dim)
        bytes_per_token = (
            2 * layout.num_layers * layout.num_heads * layout.head_dim * dtype.itemsize
        )
        try:
            keys = tuple(np.empty(shape, dtype) for _ in range(layout.num_layers))
            values = tuple(np.empty(shape, dtype) for _ in range(layout.num_layers))
        except MemoryError as error:
            gigabytes = bytes_per_token * slots * max_length / 1e9
            raise ConfigError(
                f"no memory for {slots} slots of {max_length} tokens ({gigabytes:.1f} GB); "
                "use fewer slots or a shorter context"
            ) from error
        return cls(keys, values, bytes_per_token)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of one slot to another."""
        for array in (*self.keys, *self.values):
            array[target, :, :num_tokens] = array[source, :, :num_tokens]
