"""How many sequences a causal model may run at once, by the memory of their keys and values."""

from maskdial.errors import ConfigError
from maskdial.models.bundle import KVLayout


def plan_slots(
    layout: KVLayout, max_length: int, *, asked: int, most: int, budget: int | None
) -> int:
    """The number of slots of a KV cache.

    Args:
        layout: of the model's cache.
        max_length: tokens that a slot holds.
        asked: how many slots there must be; 0 leaves it open.
        most: as many as there are, memory permitting, where it is left open.
        budget: bytes that the cache may take; None is no limit.

    Raises:
        ConfigError: they do not fit; the message says what would.
    """
    slots = asked or most
    if budget is None:
        return slots
    slot_bytes = max_length * layout.bytes_per_token
    fitting = budget // slot_bytes
    if fitting >= slots or (fitting and not asked):
        return min(fitting, slots)
    wanted = f"{asked or 1} slot{'s' if asked > 1 else ''} of {max_length} tokens"
    needed = (asked or 1) * slot_bytes
    fitting_length = budget // ((asked or 1) * layout.bytes_per_token)
    ways = [f"--max-context {fitting_length}"] if fitting_length >= 8 else []
    if fitting:
        ways.insert(0, f"--slots {fitting}")
    raise ConfigError(
        f"a KV cache of {wanted} takes {_size(needed)}, and {_size(budget)} may be used: "
        + (f"{' or '.join(ways)} would fit" if ways else "not even a short text would fit")
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
