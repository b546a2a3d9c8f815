"""Models with recurrent states are allowed the rounding by which torch differs from itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from maskdial_export.checks.parity import CausalParity, Judge
from maskdial_export.checks.reach import NEAR
from maskdial_export.errors import ExportError
from tests.export.zoo import ZOO

LOGITS = np.array([[1.0, -2.0, 3.0]], np.float32)


def test_a_difference_within_torchs_own_is_allowed() -> None:
    asked = []

    def rounding() -> float:
        asked.append(True)
        return 0.002

    judge = Judge(1e-4, [LOGITS], rounding)
    assert judge.difference("a text", [LOGITS], [LOGITS + 5e-5]) < 1e-4
    assert not asked
    assert judge.difference("a text", [LOGITS], [LOGITS + 0.003]) < 0.004
    assert judge.tolerance == 0.004  # both may be as far from the exact logits
    with pytest.raises(
        ExportError, match=r"differ by up to 0.005, more than the tolerance of 0.004"
    ):
        judge.difference("a text", [LOGITS], [LOGITS + 0.005])
    assert asked == [True]


@pytest.mark.parametrize("rounding", [0.0, 0.5])
def test_no_rounding_and_more_than_rounding_allow_nothing(rounding: float) -> None:
    judge = Judge(1e-4, [LOGITS], lambda: rounding)
    with pytest.raises(ExportError, match=r"more than the tolerance of 0.0001"):
        judge.difference("a text", [LOGITS], [LOGITS + 0.01])


@pytest.mark.parametrize("states", [((1,),), ()])
def test_torch_is_measured_against_itself_token_by_token(states: tuple[Any, ...]) -> None:
    specimen = next(zoo["qwen3.5"] for zoo in ZOO.values() if "qwen3.5" in zoo)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**specimen.settings))
    text = np.arange(5, 85)
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(text[None]), use_cache=False).logits[0].numpy()
    parity: Any = SimpleNamespace(
        model=model, texts=[text], reach=NEAR, layout=SimpleNamespace(states=states)
    )
    found = CausalParity._rounding(parity, expected)
    assert (0 < found < 1e-4) if states else found == 0
