"""Tasks follow the threads, and no bit of a result does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loadtests.kernel_threads import barrier_seconds, traced
from maskdial.kernels.installed import Kernels
from tests.kernels import test_kernels_linear as int8
from tests.kernels import test_kernels_linear4 as int4
from tests.kernels import test_kernels_linear8 as linear8
from tests.kernels import test_kernels_norm_linear as norms
from tests.kernels.conftest import linear_session
from tests.kernels.test_kernels_attention import Cache, Shape, open_attention
from tests.kernels.test_kernels_masked import Heads
from tests.kernels.test_kernels_norms import drawn, open_norm

THREADS = (1, 2, 3, 7, 16, 64)
INPUTS, OUTPUTS = 96, 400
PANELS = {"Linear": 9, "Linear4": 13}
ROWS = (1, 9, 40, 130)

Run = Callable[[], NDArray[Any]]
Feeds = dict[str, NDArray[np.float32]]


def runs_of_product(kernels: Kernels, kind: str) -> Callable[[int, int], Run]:
    """By threads and rows: a call of one kind of product."""
    rng = np.random.default_rng(0)
    rows: tuple[str, ...] = ("x",)
    results: tuple[str, ...] = ("y",)
    options: dict[str, Any] = {}
    if kind.startswith("Norm"):
        rows, results = norms.ROWS, ("sum", "y")
        options = {"epsilon": 1e-5}
    weights: dict[str, Any]
    if kind.endswith("Linear4"):
        weights = dict(
            zip(int4.NAMES, int4.drawn(rng, INPUTS, OUTPUTS, block_size=32), strict=False)
        )
        options["num_inputs"] = INPUTS
    elif kind.endswith("Linear8"):
        names = ("w", "s", "b", "m")
        weights = dict(zip(names, linear8.drawn(rng, INPUTS, OUTPUTS), strict=False))
        options["num_inputs"] = INPUTS
    elif kind.endswith("Linears"):
        _, weights = int8.several(rng, INPUTS, (OUTPUTS, 50))
        results = (*results, "z")
        options |= {"step": 1 / 127, "by_row": 1}
    else:
        w, s, b = int8.drawn(rng, INPUTS, OUTPUTS, bias=True)
        weights = {"w": w, "s": s, "b": b}
        options |= {"step": 1 / 127, "by_row": 1}

    def opened(threads: int, num_rows: int) -> Run:
        session = linear_session(
            kernels.path,
            None if kind.startswith("Norm") else INPUTS,  # type: ignore[arg-type]
            weights,
            op_type=kind,
            rows=rows,
            results=results,
            threads=threads,
            **options,
        )
        feeds = norms.drawn(num_rows, INPUTS)
        given = {name: feeds[name] for name in rows}
        return lambda: np.concatenate(session.run(None, given), axis=1)

    return opened


KINDS = ["Linear", "Linears", "NormLinear", "NormLinears", "Linear4", "NormLinear4", "Linear8"]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_same_with_any_number_of_threads(kernels: Kernels, kind: str) -> None:
    opened = runs_of_product(kernels, kind)
    for num_rows in ROWS:
        expected = opened(1, num_rows)()
        for threads in THREADS[1:]:
            np.testing.assert_array_equal(opened(threads, num_rows)(), expected)


@pytest.mark.parametrize("kind", PANELS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_no_thread_waits_while_panels_or_tiles_of_rows_are_left(
    kernels: Kernels, kind: str, num_rows: int
) -> None:
    opened = runs_of_product(kernels, kind)
    tiles = -(-num_rows // 8)
    for threads in THREADS:
        run = opened(threads, num_rows)
        with traced(kernels.path) as found:
            run()
        (operator,) = found
        assert operator.tasks >= min(threads, PANELS[kind])
        # With rows of one tile each, twice as many tasks do not end sooner than one larger each.
        assert operator.tasks >= min(threads, PANELS[kind] * tiles) / 2


@pytest.mark.parametrize("cache", ["float32", "int16", "int8"])
@pytest.mark.parametrize(("past", "new"), [(400, [1]), (300, [1, 1]), (0, [150, 20])])
def test_attention_is_the_same_with_any_number_of_threads(
    kernels: Kernels, cache: Any, past: int, new: list[int]
) -> None:
    """The query heads of a group that share keys are divided, too."""
    shape = Shape(6, 2, 32, 32, cache, sinks=True)
    rng = np.random.default_rng(0)
    texts = rng.standard_normal((len(new), past, shape.columns), np.float32)
    tokens = rng.standard_normal((1, sum(new), shape.columns), np.float32)
    results, tasks = [], []
    for threads in THREADS:
        batch = Cache(open_attention(kernels.path, shape), shape, len(new), 512)
        if past:
            batch.run(texts, [past] * len(new))
        parted = Cache(
            open_attention(kernels.path, shape, threads, packed=True), shape, len(new), 512
        )
        parted.key[:], parted.value[:] = batch.key, batch.value
        with traced(kernels.path) as found:
            results.append(parted.run(tokens, [past + each for each in new], new=new))
        tasks.append(found[0].tasks)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    assert tasks[-1] > tasks[0]


@pytest.mark.parametrize(
    "heads", [Heads(3, 32), Heads(3, 32, integers=True), Heads(3, 32, window=20)]
)
def test_attention_to_all_is_the_same_with_any_number_of_threads(
    kernels: Kernels, heads: Heads
) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((150, 1, heads.columns), np.float32) for name in "qkv"}
    results, tasks = [], []
    for threads in THREADS:
        session = heads.open(kernels, packed=True, threads=threads)
        with traced(kernels.path) as found:
            results += session.run(None, feeds | {"lengths": np.array([110, 40], np.int32)})
        tasks.append(found[0].tasks)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    assert tasks[-1] > tasks[0]


def test_norms_are_the_same_with_any_number_of_threads(kernels: Kernels) -> None:
    feeds = drawn(50, 400)
    expected = open_norm(kernels, threads=1).run(None, feeds)
    for threads in THREADS[1:]:
        found = open_norm(kernels, threads=threads).run(None, feeds)
        np.testing.assert_array_equal(found, expected)


def test_a_barrier_has_one_task_for_each_thread(kernels: Kernels) -> None:
    assert barrier_seconds(kernels.path, 3, spinning=False) > 0
