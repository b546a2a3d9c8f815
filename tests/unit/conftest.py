"""What the engine's tests share."""

import pytest


@pytest.fixture(params=[False, True], ids=["in turns", "overlapping"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    """Whether tokens are delivered beside the next decode step, or before it.

    Beside it, a pass has run ahead before a step sees what changed, so a change takes effect one
    step later.
    """
    return bool(request.param)
