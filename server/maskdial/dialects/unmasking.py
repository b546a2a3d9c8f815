"""How a text is unmasked, as bodies say it."""

from typing import Annotated, Any

from pydantic import Field

from maskdial.bounds import Range
from maskdial.causal.events import TokenEvent
from maskdial.dialects.body import Wire
from maskdial.unmasking.text import BLOCK_LENGTH, UnmaskingChoice
from maskdial.unmasking.unmasker import Order


def describe_unmasked(token: TokenEvent) -> dict[str, Any]:
    """A token that a pass has unmasked; ``index`` is its place in the text, from 1."""
    return {
        "index": token.index,
        "id": token.token_id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.special,
        "step": token.step,
    }


class UnmaskingFields(Wire):
    """How a text is unmasked. Null means not given."""

    block_length: Annotated[int, Range(1)] | None = Field(
        None,
        description="Under full and block masks, tokens that are unmasked before the next ones. "
        f"Default: {BLOCK_LENGTH}.",
    )
    steps: Annotated[int, Range(1)] | None = Field(
        None,
        description="Under full and block masks, number of passes for the text. Default: one for "
        "each token. Of a model that writes canvases, passes for each at most. Default: the "
        "model's.",
    )
    order: Order | None = Field(
        None,
        description="Under full and block masks, which tokens of a block are unmasked first. "
        "Default: confidence.",
    )
    threshold: Annotated[float, Range(0, 1, above_low=True)] | None = Field(
        None,
        description="Under full and block masks, in place of steps: each pass unmasks all tokens "
        "that are at least so probable, and at least one.",
    )
    stream_unmasking: bool | None = Field(
        None,
        description="Under full and block masks, a stream also shows the tokens that each pass "
        "unmasks. Default: false.",
    )

    @property
    def unmasking(self) -> UnmaskingChoice:
        """As a neutral request has it."""
        return UnmaskingChoice(**self.given(*UnmaskingFields.model_fields))
