"""Packed weights: equal ones are in memory once, and the place of old ones is used again."""

import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import onnxruntime as ort
import pytest

from maskdial.kernels.installed import Kernels
from tests.kernels.conftest import LIBRARY, linear_session

SIZE = 97
GROWTH = """
    import gc, sys
    from pathlib import Path

    import numpy as np
    import psutil

    from tests.kernels.conftest import linear_session

    size, scale = 2048, np.ones(2048, np.float32)  # a matrix of 4 MiB

    def open_product(seed):
        weight = np.random.default_rng(seed).integers(-127, 128, (size, size)).astype(np.int8)
        return linear_session(
            Path(sys.argv[1]), size, {"w": weight, "s": scale}, step=1 / 127, by_row=1
        )

    def resident():
        gc.collect()
        return psutil.Process().memory_info().rss >> 20

    sessions = [open_product(0)]
    before = resident()
"""
EQUAL = "sessions += [open_product({seed}) for i in range(1, 9)]"
IN_TURN = """
    for seed in range(1, 29):
        sessions.append(open_product(seed))
        del sessions[0]
"""

IN_BLOCKS = """
    def open_blocks(seed):
        integers = np.random.default_rng(seed).integers({least}, {most}, (size, size // 16, 16))
        arrays = {{"w": integers.astype(np.uint8), "s": np.ones((size, size // 16), np.float32)}}
        return linear_session(
            Path(sys.argv[1]), size, arrays, op_type="Linear8", num_inputs=size
        )

    sessions += [open_blocks(seed) for seed in range(8)]
"""


def growth(kernels: Kernels, what: str) -> int:
    """MiB by which a process with one matrix of 4 MiB grows."""
    program = textwrap.dedent(GROWTH) + textwrap.dedent(what) + "\nprint(resident() - before)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(kernels.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


plain = pytest.mark.skipif(
    bool(os.environ.get(LIBRARY)), reason="a sanitizer keeps what is given back for a while"
)


@plain
def test_equal_weights_are_in_memory_once(kernels: Kernels) -> None:
    """Beside ONNX Runtime's own copy, which each of these small graphs carries."""
    equal = growth(kernels, EQUAL.format(seed=0))
    different = growth(kernels, EQUAL.format(seed="i"))
    assert different - equal > 24


@plain
def test_integers_of_six_bits_take_little_more(kernels: Kernels) -> None:
    """Eight matrices of 4 MiB, 6.6 bits a weight instead of 9."""
    wide = growth(kernels, IN_BLOCKS.format(least=0, most=256))
    narrow = growth(kernels, IN_BLOCKS.format(least=96, most=160))
    assert 8 <= wide - narrow <= 12


@plain
def test_versions_that_come_and_go_leave_nothing(kernels: Kernels) -> None:
    """28 versions of 4 MiB, two of them in memory at any time."""
    assert growth(kernels, IN_TURN) < 48


@pytest.mark.parametrize("seed", range(3))
def test_products_are_right_whatever_was_there_before(kernels: Kernels, seed: int) -> None:
    """Sessions over five matrices, some equal, of two sizes, opened and closed in any order."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    x = rng.standard_normal((3, SIZE), np.float32)
    scale = np.ones(SIZE, np.float32)
    weights = [rng.integers(-127, 128, (SIZE, columns)).astype(np.int8) for columns in (97, 97, 31)]
    weights += [weights[0], weights[2].copy()]

    def open_product(which: int) -> ort.InferenceSession:
        weight = weights[which]
        scales = scale[: weight.shape[1]]
        return linear_session(
            kernels.path, SIZE, {"w": weight, "s": scales}, step=1 / 127, by_row=1
        )

    expected = [open_product(which).run(None, {"x": x})[0] for which in range(5)]
    assert not np.array_equal(expected[0], expected[1])
    opened: list[tuple[int, ort.InferenceSession]] = []
    for _ in range(60):
        if opened and chance.random() < 0.45:
            del opened[chance.randrange(len(opened))]
        else:
            which = chance.randrange(5)
            opened.append((which, open_product(which)))
        for which, session in opened:
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected[which])
