"""Rotary positions of a configuration, in the forms of transformers 4 and 5.

The formulas are those of transformers' ``modeling_rope_utils``, in float32 as there; powers are
correctly rounded, which torch's are but for the last bit of a few.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Floats, NotDirectError, Rotary

_PAIRS, _HEAD = 8, 16
"""Of attention operators: they turn multiples of so many pairs, in heads of so many columns."""


def read_rotary(
    config: Config,
    head_dim: int,
    theta: float = 10_000.0,
    default: Mapping[str, Any] = MappingProxyType({}),
    *,
    partial: float = 1.0,
    interleaved: bool = False,
    beside: Sequence[str] = (),
) -> Rotary:
    """The rotation of all layers: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Args:
        config: of the model.
        head_dim: the columns of a head.
        theta: the base where none is stated.
        default: what the configuration says where it says nothing.
        partial: the share of a head's columns that turn, where none is stated.
        interleaved: whether neighboring columns are pairs.
        beside: entries beside those of the rotation, which the family reads by itself.

    Raises:
        NotDirectError: it is of a kind, or of a size, that is not known.
    """
    rope = config.part("rope_parameters")
    if rope is None:
        rope = config.part("rope_scaling") or Config(default)
    elif config.take("rope_scaling") is not None:
        config.refuse("rope_scaling")
    for key in beside:
        rope.take(key)
    theta = config.real("rope_theta", theta)
    partial = config.real("partial_rotary_factor", partial)
    found = rotary(rope, config, head_dim, theta, partial)
    return replace(found, interleaved=interleaved)


def rotary(
    rope: Config,
    config: Config,
    head_dim: int,
    theta: float,
    partial: float = 1.0,
    *,
    proportional: bool = False,
) -> Rotary:
    """The rotation that one object describes; ``theta`` and ``partial`` where it says neither.

    ``proportional``: whether the family knows that kind, of columns half a head apart.
    """
    theta = rope.real("rope_theta", theta)
    partial = rope.real("partial_rotary_factor", partial)
    kinds = ["default", "dynamic", "linear", "llama3", "longrope", "yarn"]
    kinds += ["proportional"] if proportional else []
    key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.one_of(key, kinds, "default")
    size = head_dim if kind == "proportional" else int(head_dim * partial)
    turning = int(partial * head_dim // 2)  # pairs
    if size % (2 * _PAIRS) or head_dim % _HEAD or turning < 1 or size > head_dim:
        raise NotDirectError(
            f"heads of {head_dim} columns, of which {2 * turning} turn with the position, are not "
            "known to the direct path"
        )
    rope.take("type")  # transformers 4 may state both
    for key in ("mrope_section", "mrope_interleaved"):  # the three positions of a text are one
        rope.take(key)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    scale, longest = 1.0, None
    if kind == "dynamic":
        longest = _first_positions(rope, config, kind)
    if kind == "longrope":
        longest = _first_positions(rope, config, kind)
        factors, scale = _longrope(rope, config, size, longest)
        powers = factors * powers
    if kind == "dynamic":
        rope.real("factor")  # of longer texts
    frequencies = np.float32(1) / powers
    if kind == "proportional":
        frequencies[turning:] = 0
        frequencies /= np.float32(rope.real("factor", 1.0))
    if kind == "linear":
        frequencies /= np.float32(rope.real("factor"))
    if kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    if kind == "yarn":
        frequencies, scale = _yarn(rope, powers, theta)
    rope.finish()
    return Rotary(frequencies, scale, longest)


def _first_positions(rope: Config, config: Config, kind: str) -> int:
    """The positions of the first training, up to which a text turns by one set of frequencies."""
    usual = config.count("max_position_embeddings") if kind == "dynamic" else None
    beside = config.take("original_max_position_embeddings", usual)
    first = rope.take("original_max_position_embeddings", beside)
    if type(first) is not int or first < 2:
        raise NotDirectError(f"{kind} without original_max_position_embeddings is not known")
    return first


def _yarn(rope: Config, powers: Floats, theta: float) -> tuple[Floats, float]:
    """YaRN's (arXiv:2309.00071): low frequencies are divided by a factor, high ones are not.

    Returns:
        The frequencies, and what cosines and sines are multiplied by.
    """
    factor = rope.real("factor")
    first = rope.count("original_max_position_embeddings")
    turns = [rope.real(name, usual) for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    if not (factor > 0 and theta > 1 and turns[0] >= turns[1] > 0):
        rope.refuse("factor")
    size = 2 * len(powers)
    places = [
        size * math.log(first / (count * 2 * math.pi)) / (2 * math.log(theta)) for count in turns
    ]
    low, high = places
    if rope.flag("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, size - 1.0)
    if low == high:
        high += 0.001
    steps = np.arange(len(powers), dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp
    divided = np.float32(1) / (np.float32(factor) * powers)
    frequencies = divided * (np.float32(1) - kept) + np.float32(1) / powers * kept

    return frequencies.astype(np.float32), rope.real("attention_factor", _yarn_scale(rope, factor))


def _yarn_scale(rope: Config, factor: float) -> float:
    """What cosines and sines are multiplied by where nothing states it."""

    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1

    both = rope.real("mscale", 0.0), rope.real("mscale_all_dim", 0.0)
    return scale(both[0]) / scale(both[1]) if all(both) else scale(1.0)


def _llama3(rope: Config, frequencies: Floats) -> Floats:
    """Llama 3.1's: low frequencies are divided by a factor, middle ones by a part of it."""
    factor = np.float32(rope.real("factor"))
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    positions = rope.count("original_max_position_embeddings")
    if not 0 < low < high:
        rope.refuse("high_freq_factor")
    wavelengths = np.float32(2 * math.pi) / frequencies
    divided = np.where(wavelengths > np.float32(positions / low), frequencies / factor, frequencies)
    smooth = (np.float32(positions) / wavelengths - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - smooth) * divided / factor + smooth * divided
    middle = (wavelengths >= np.float32(positions / high)) & (
        wavelengths <= np.float32(positions / low)
    )
    return np.where(middle, between, divided).astype(np.float32)


def _longrope(rope: Config, config: Config, size: int, first: int) -> tuple[Floats, float]:
    """The divisors of texts up to the ``first`` training's length, and the tables' scale."""
    short, long = rope.take("short_factor"), rope.take("long_factor")
    for key, each in (("short_factor", short), ("long_factor", long)):
        if not isinstance(each, list) or len(each) != size // 2:
            rope.refuse(key)
    factor = rope.take("factor") or config.count("max_position_embeddings") / first
    usual = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0
    return np.array(short, np.float32), rope.real("attention_factor", usual)
