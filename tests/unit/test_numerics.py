"""The bits of answers are those of the numerics version, on any processor that has one."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from maskdial import Model
from maskdial.kernels.installed import find_kernels
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.numerics import numerics_version

VERSION = "1-onnxruntime-1.31.1"
TEXTS = ["A warm, funny and touching film.", "The plot is dull.", "x" * 40, "日本 é " * 20]
DIGESTS = {
    "classify": "d45d5480daef3ce8",
    "score": "daee8a036732d6e1",
    "draw": "38e6c8c6e26b5eb0",
    "fill": "ab9eca2093f1945b",
}
"""If one of them is another, bits have changed: raise NUMERICS."""


def answers(name: str) -> Any:
    """Of the starter models; scores of 64 bits."""
    if name == "classify":
        with Model(STARTER_FOLDER / "sentiment") as model:
            return model.classify(TEXTS)
    with Model(STARTER_FOLDER / "hybrid") as model:
        ask: dict[str, Callable[[], Any]] = {
            "score": lambda: model.score(TEXTS),
            "draw": lambda: model.generate(TEXTS, max_new_tokens=24, seed=5, temperature=0.9),
            "fill": lambda: model.fill_mask(["The king lived in a great [MASK]."]),
        }
        return ask[name]()


@pytest.mark.parametrize("name", DIGESTS)
def test_answers_have_the_recorded_bits(name: str) -> None:
    kernels = find_kernels("auto")
    version = numerics_version("" if kernels is None else kernels.processor)
    if version != VERSION:
        pytest.skip(f"numerics {version!r} here, {VERSION!r} recorded")
    digest = hashlib.sha256(repr(answers(name)).encode()).hexdigest()[:16]
    assert digest == DIGESTS[name], digest
