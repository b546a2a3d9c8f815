"""How far parity has to read: beyond every window and length that a model's configuration names.

A graph that ignores a window of 4,096 tokens agrees with torch on every shorter text. And some
models change for good when they meet a short text: BigBird then attends to all tokens.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

# Names of settings that count tokens, from which on a model may compute something else
_SWITCH = re.compile(
    r"window|chunk|block|topk|original_max_position|local_attention|max_distance|position_buckets|"
    r"floor_scale|sparse|segment"
)
_ELSEWHERE = re.compile(r"vision|image|audio|video|max_window_layers|feed_forward")
_SHORT = 40  # tokens that parity reads anyway
_BEYOND = 24
_AROUND, _LAST = 4, 16  # tokens whose logits are compared
_MAX_OPERATIONS = 1e13  # a minute or two of two cores
_MAX_BYTES = 7e9  # of the scores of torch's eager attention, which exist about three times


class Snapshot:
    """What a model's modules are and have set before any text is read, but for its weights."""

    def __init__(self, model: nn.Module) -> None:
        self._states = [
            (module, dict(module._modules), _settings(module)) for module in model.modules()
        ]

    def restore(self) -> None:
        """Undoes what reading texts has changed."""
        for module, children, settings in self._states:
            module._modules.update(children)
            for name, value in settings.items():
                if getattr(module, name) is not value:
                    setattr(module, name, value)


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = str | int | float | bool
    return {name: value for name, value in vars(module).items() if isinstance(value, plain)}


@dataclass(frozen=True, slots=True)
class Reach:
    """How long a text parity reads beside its short ones.

    Attributes:
        length: in tokens; None if no setting asks for one.
        switches: the lengths within it at which the model may change.
        unread: the settings that would take too long to pass.
        initial: the model as it was loaded.
    """

    length: int | None = None
    switches: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()
    initial: Snapshot | None = None

    @property
    def title(self) -> str:
        """What errors call the text."""
        return f"a text of {self.length:,} tokens"

    def rows(self) -> NDArray[np.int64]:
        """The text's tokens around each switch, and its last ones."""
        assert self.length is not None, "only a text has rows"
        near = [range(switch - _AROUND, switch + _AROUND) for switch in self.switches]
        places = {
            place for each in (*near, range(self.length - _LAST, self.length)) for place in each
        }
        return np.array(sorted(place for place in places if 0 <= place < self.length))

    def restore(self) -> None:
        """Undoes what texts that torch's model has read changed of it."""
        if self.initial is not None:
            self.initial.restore()


NEAR = Reach()


def find_reach(model: PreTrainedModel, longest: int, initial: Snapshot) -> Reach:
    """What to read of a model that takes texts of up to ``longest`` tokens."""
    config: Any = model.config
    named = list(_sizes(config.to_dict()))
    sizes = [*named, *_products(named)]
    found = {size: name for name, size in sizes if _SHORT <= size < longest}
    if getattr(config, "attention_type", None) == "block_sparse" and longest > _BEYOND:
        found[longest - _BEYOND] = "block_size"
    near = sorted(size for size in found if _affordable(model, min(size + _BEYOND, longest)))
    unread = [f"{found[size]} {size:,}" for size in sorted(set(found) - set(near))]
    if not near:
        return Reach(unread=tuple(unread), initial=initial)
    length = min(near[-1] + _BEYOND, longest)
    return Reach(length, tuple(near), tuple(unread), initial)


def _sizes(settings: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    for key, value in settings.items():
        name = str(key)
        if _ELSEWHERE.search(name):
            continue
        if isinstance(value, dict):
            yield from _sizes(value)
        elif _SWITCH.search(name):
            sizes = value if isinstance(value, list) else [value]
            yield from ((name, size) for size in sizes if type(size) is int)


def _products(sizes: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Blocks of a size, of which a model chooses a number: it reads shorter texts whole."""
    for name, size in sizes:
        for other, count in sizes:
            alike = name.partition("_")[0] == other.partition("_")[0]
            if alike and name.endswith("block_size") and "topk" in other:
                yield f"{name} * {other}", size * count


def _affordable(model: PreTrainedModel, length: int) -> bool:
    config: Any = model.config
    layers = getattr(config, "num_hidden_layers", None) or 1
    width = getattr(config, "hidden_size", None) or 1
    heads = getattr(config, "num_attention_heads", None) or 1
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    operations = 2 * num_parameters * length + 4 * layers * width * length**2
    return operations <= _MAX_OPERATIONS and 12 * heads * length**2 <= _MAX_BYTES
