"""Exponentials and logarithms: right, and with bits that were recorded on another processor."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maskdial import elementary

# Of the values below. Equal under AVX-512 and, by emulation, AVX2 and SSE.
DIGESTS = {
    "exp": "c9395163681e88db",
    "log": "6a395336178ac903",
    "log_sigmoid": "5d6ecb36587fb132",
}


def values() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers of all sizes, the same everywhere."""
    random = np.random.Generator(np.random.PCG64(7))
    return random.random(50_000) * 1490 - 745


@pytest.mark.parametrize("spread", [1e-9, 1e-3, 1.0, 50.0, 700.0])
def test_exponentials_are_right_to_two_units(spread: float) -> None:
    x = values() / 745 * spread
    exact = np.exp(x.astype(np.longdouble))
    error = np.abs(elementary.exp(x).astype(np.longdouble) - exact) / np.spacing(np.exp(x))
    assert error.max() < 2


@pytest.mark.parametrize("spread", [1e-9, 1e-3, 1.0, 50.0, 700.0])
def test_logarithms_are_right_to_two_units(spread: float) -> None:
    x = np.exp(values() / 745 * spread)
    exact = np.log(x.astype(np.longdouble))
    error = np.abs(elementary.log(x).astype(np.longdouble) - exact)
    assert (error / np.spacing(np.maximum(np.abs(exact.astype(np.float64)), 1e-300))).max() < 2


def test_what_is_not_a_plain_number() -> None:
    with np.errstate(all="ignore"):
        x = np.array([-np.inf, -800.0, -745.1, 0.0, 709.7, 800.0, np.inf, np.nan])
        np.testing.assert_allclose(elementary.exp(x), np.exp(x), rtol=4e-16)
        y = np.array([0.0, 5e-324, 1.0, 1.7e308, np.inf, np.nan])
        np.testing.assert_allclose(elementary.log(y), np.log(y), rtol=4e-16)
        z = np.array([-800.0, -1.0, 0.0, 1.0, 800.0])
        np.testing.assert_allclose(elementary.log_sigmoid(z), -np.logaddexp(0, -z), atol=1e-15)
    assert elementary.exp(np.zeros((2, 0))).shape == (2, 0)
    assert float(elementary.exp(0.0)) == 1.0


@pytest.mark.parametrize("spread", [1e-9, 1.0, 50.0, 750.0])
def test_a_few_have_the_bits_that_many_have(spread: float) -> None:
    special = [-np.inf, -746.0, -745.2, -708.5, 0.0, 709.7827, 709.79, np.inf, np.nan]
    x = np.concatenate([values()[:9_991] / 745 * spread, special])
    many = elementary.exp(x)
    few = np.concatenate([elementary.exp(each) for each in x.reshape(-1, 8)])
    assert few.tobytes() == many.tobytes()
    pair = elementary.exp(x[:6].reshape(2, 3))
    assert (pair.shape, pair.tobytes()) == ((2, 3), many[:6].tobytes())


@pytest.mark.parametrize(
    ("function", "at"),
    [
        (elementary.exp, values()),
        (elementary.log, np.abs(values())),
        (elementary.log_sigmoid, values() / 30),
    ],
)
def test_bits_are_those_of_every_processor(
    function: Callable[[Any], Any], at: np.ndarray[Any, np.dtype[np.float64]]
) -> None:
    digest = hashlib.sha256(function(at).tobytes()).hexdigest()[:16]
    assert digest == DIGESTS[function.__name__]
