"""The bodies of `/fill-mask`, and of `/score`, which both families serve."""

from typing import Annotated

from pydantic import Field

from maskdial.bounds import Range, Size
from maskdial.dialects.body import TextsBody, example
from maskdial.dialects.native.masked_body import MaskedBody, TruncationParameters
from maskdial.masked.tasks.fill_mask import FillMaskRequest
from maskdial.score import ScoreRequest


class FillMaskParameters(TruncationParameters):
    """Parameters of `/fill-mask`."""

    top_k: Annotated[int, Range(1)] | None = Field(
        None, description="Number of fillings per mask. Default: 5."
    )
    targets: (
        Annotated[list[Annotated[str, Size(0, 256, "characters")]], Size(1, 1024, "words")] | None
    ) = Field(None, description="Only score these words, each a single token.")


class FillMaskBody(TextsBody, MaskedBody):
    """A text with one or more masks, or a list of them."""

    model_config = example({"inputs": "The old king lived in a [MASK] by the sea."})

    parameters: FillMaskParameters | None = None

    def request(self) -> FillMaskRequest:
        parameters = self.parameters or FillMaskParameters()
        return FillMaskRequest(
            self.texts, parameters.truncation, **parameters.given("top_k", "targets")
        )


class ScoreBody(TextsBody):
    """A text, or a list of them, to be scored by how likely the model finds it."""

    model_config = example(
        {"model": "hybrid", "inputs": "The captain of the ship looked at the sea."}
    )

    parameters: TruncationParameters | None = None

    def request(self) -> ScoreRequest:
        parameters = self.parameters or TruncationParameters()
        return ScoreRequest(self.texts, parameters.truncation)
