"""Rotary positions: finding out how a model rotates, so that an operator can do it instead.

A model computes cosines and sines once (in a module with position ids among its arguments), and
each layer rotates its queries and keys by them, in a function of the modeling file. We run both
once and keep the results: the tables for every position, and what the function did to them. In the
trace the tables are looked up, which also removes code that depends on the text's length.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_Key = tuple[str, str | None]  # a module's name and the layer type
_Pair = tuple[Tensor, Tensor]
Rotate = Callable[..., _Pair]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer rotates the first columns of its queries and keys.

    ``cos`` and ``sin``: (max_length, rotary_dim / 2) each. ``interleaved``: whether neighboring
    columns form a pair, not those half the rotary dimension apart.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    def half(self) -> "Rotation":
        """The rotation in float16."""
        return replace(self, cos=self.cos.half(), sin=self.sin.half())

    def contiguous(self) -> "Rotation":
        """The rotation with tables that are no views."""
        return replace(self, cos=self.cos.contiguous(), sin=self.sin.contiguous())

    def suits(self, head_dim: int) -> bool:
        """Whether the attention operators can rotate heads of this size."""
        return self.cos.shape[1] % 8 == 0 and head_dim % 16 == 0

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotates (..., length, head_dim) from position 0 on, in torch."""
        length, half = heads.shape[-2], self.cos.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([turned, rest], -1)


class Tables:
    """The cosines and sines that a model's rotary modules compute, for every position.

    A module may have several tables, one for each value of further arguments (the layer type).
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._tables: dict[_Key, _Pair] = {}
        self._complex: dict[_Key, Tensor] = {}  # (max_length, rotary_dim / 2, 2)
        self._found: dict[tuple[_Key, int, bool], Rotation] = {}

    def half(self) -> "Tables":
        """The tables in float16."""
        halved = Tables(self._max_length)
        halved._tables = {key: (cos.half(), sin.half()) for key, (cos, sin) in self._tables.items()}
        halved._complex = self._complex  # models multiply complex numbers in float32
        return halved

    def find(self, fits: Callable[[Rotation], bool]) -> Rotation | None:
        """The first rotation by one of the tables that fits; the same object for the same one."""
        for key, (cos, sin) in self._tables.items():
            half = cos.shape[-1] // 2  # most tables have each column twice
            ways = (slice(half), slice(0, None, 2), slice(None))
            for way, interleaved in itertools.product(range(len(ways)), (False, True)):
                rotation = Rotation(cos[:, ways[way]], sin[:, ways[way]], interleaved)
                if fits(rotation):
                    return self._found.setdefault((key, way, interleaved), rotation.contiguous())
        return None

    @contextmanager
    def recorded(self, model: PreTrainedModel) -> Iterator[None]:
        """Computes the tables of all rotary modules that are called inside the block."""

        def compute(key: _Key, forward: Rotate, x: Tensor, ids: Tensor, *rest: Any) -> Any:
            positions = torch.arange(self._max_length)[None]
            with _correctly_rounded():
                tables = forward(x, positions, *rest)
            if isinstance(tables, tuple) and tables[0].is_floating_point():
                self._tables[key] = tables[0][0], tables[1][0]
            elif isinstance(tables, Tensor) and tables.is_complex():
                self._complex[key] = torch.view_as_real(tables[0])
            return forward(x, ids, *rest)

        with _rotary_modules(model, compute):
            yield

    @contextmanager
    def looked_up(self, model: PreTrainedModel) -> Iterator[None]:
        """Lets rotary modules look up their results inside the block.

        Complex numbers, which ONNX does not have, become pairs of real ones.
        """

        def find(key: _Key, forward: Rotate, x: Tensor, ids: Tensor, *rest: Any) -> Any:
            if ids.ndim == 3:
                ids = ids[0]  # of a text, positions in time, height and width are the same
            if key in self._complex:
                table = self._complex[key]
                pairs = nn.functional.embedding(ids, table.flatten(1))
                return pairs.view(*ids.shape, *table.shape[1:])
            if key not in self._tables:
                return forward(x, ids, *rest)
            cos, sin = self._tables[key]
            return nn.functional.embedding(ids, cos), nn.functional.embedding(ids, sin)

        with _rotary_modules(model, find), _multiplied(model):
            yield


@contextmanager
def _correctly_rounded() -> Iterator[None]:
    """Rounds cosines and sines of float32 angles from those in float64.

    torch's own are off by one in the last place in 5 of 100 cases, in others with each of its
    mathematical libraries. Tables are the same on all machines then, and those that
    `maskdial_export.direct` writes.
    """

    def rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda angles: function(angles.double()).to(angles.dtype)

    polar = torch.polar

    def rounded_polar(lengths: Tensor, angles: Tensor) -> Tensor:
        return polar(lengths.double(), angles.double()).to(torch.complex64)

    with (
        mock.patch.object(torch, "polar", rounded_polar),
        mock.patch.object(Tensor, "cos", rounded(Tensor.cos)),
        mock.patch.object(Tensor, "sin", rounded(Tensor.sin)),
    ):
        yield


@contextmanager
def _rotary_modules(model: PreTrainedModel, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces the forward function of the modules that compute cosines and sines."""
    with ExitStack() as patches:
        for name, module in model.named_modules():
            forward = module.forward
            if list(inspect.signature(forward).parameters)[:2] != ["x", "position_ids"]:
                continue
            bound = _bind(name, forward, replacement)
            patches.enter_context(mock.patch.object(module, "forward", bound))
        yield


def _bind(name: str, forward: Rotate, replacement: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        rest = () if layer_type is None else (layer_type,)
        return replacement((name, layer_type), forward, x, position_ids, *rest)

    return call


# Modeling files whose rotation multiplies complex numbers -> the axis of the heads there
_COMPLEX = {"modeling_deepseek_v2": 1, "modeling_llama4": 2}


@contextmanager
def _multiplied(model: PreTrainedModel) -> Iterator[None]:
    """Replaces a rotation by complex numbers by one by their pairs."""
    modeling = sys.modules[type(model).__module__]
    axis = _COMPLEX.get(modeling.__name__.rpartition(".")[2])
    if axis is None:
        yield
        return

    def rotate(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> _Pair:
        cos, sin = freqs_cis.unsqueeze(axis).unbind(-1)
        return _multiply(xq, cos, sin), _multiply(xk, cos, sin)

    with mock.patch.object(modeling, "apply_rotary_emb", rotate):
        yield


def _multiply(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighboring pairs of columns."""
    first, second = heads.float().reshape(*heads.shape[:-1], -1, 2).unbind(-1)
    pair = first * cos - second * sin, first * sin + second * cos
    return torch.stack(pair, -1).flatten(-2).to(heads.dtype)


@contextmanager
def rotated(
    model: PreTrainedModel, replacement: Callable[[Rotate, Tensor, Tensor, Any], _Pair]
) -> Iterator[None]:
    """Replaces the function that rotates queries and keys inside the block.

    ``replacement`` is called with the model's own function and that function's arguments.
    """
    modeling = sys.modules[type(model).__module__]
    with ExitStack() as patches:
        for name, function in list(vars(modeling).items()):
            if not name.startswith("apply_rotary") or not callable(function):
                continue
            if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
                continue
            patched = functools.partial(replacement, function)
            patches.enter_context(mock.patch.object(modeling, name, patched))
        yield
