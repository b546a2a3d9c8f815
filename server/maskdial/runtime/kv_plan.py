"""How many sequences a causal model can run at once, given the memory for its KV cache."""

from maskdial.errors import ConfigError
from maskdial.models.bundle import KVLayout

_MIN_CONTEXT = 8  # tokens, as of --max-context


def plan_slots(
    layout: KVLayout, max_length: int, *, asked: int | None, most: int, budget: int | None
) -> int:
    """The number of slots of a KV cache.

    Args:
        layout: of the model's cache.
        max_length: number of tokens that a slot holds.
        asked: the number of slots, None to let the memory decide.
        most: the number of slots if none was asked for and the memory suffices.
        budget: size of the cache in bytes; None for no limit.

    Raises:
        ConfigError: the slots do not fit; the message says what would.
    """
    slots = asked or most
    if budget is None:
        return slots
    fitting = budget // (max_length * layout.bytes_per_token)
    if fitting >= slots or (fitting and asked is None):
        return min(fitting, slots)
    needed = asked or 1
    ways = [f"--slots {fitting}"] if fitting else []
    fitting_length = budget // (needed * layout.bytes_per_token)
    if fitting_length >= _MIN_CONTEXT:
        ways.append(f"--max-context {fitting_length}")
    raise ConfigError(
        f"a KV cache of {needed} slot{'s' if needed > 1 else ''} of {max_length} tokens takes "
        f"{_size(needed * max_length * layout.bytes_per_token)}, and {_size(budget)} may be used: "
        + (f"{' or '.join(ways)} would fit" if ways else "not even a short text would fit")
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
