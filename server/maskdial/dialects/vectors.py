"""How vectors are written: as numbers or base64, of floats, bytes or bits."""

import base64
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from maskdial.dialects.body import Wire
from maskdial.masked.tasks.quantized import OutputDtype, quantized

EncodingFormat = Literal["float", "base64"]

SECONDS_PER_VALUE = 0.3e-6  # to write one as text

INSTRUCTION_IN_PROMPT = (
    "What the texts are for, in place of the instruction in the model's prompt. Default: the "
    "prompt as it is."
)
TRAINED_TASK = (
    "What the vectors are for, such as retrieval.query, of a model with tasks: its adapter for it "
    "reads the texts, behind its prompt. Default: none."
)
INSTRUCTION_IN_TEMPLATE = (
    "What to look for, in place of the instruction in the model's template. Default: the "
    "template's own."
)


class VectorForm(Wire):
    """What vectors consist of, and how they are written. The names are OpenAI's and Voyage's."""

    encoding_format: EncodingFormat | None = Field(
        None,
        description="float: numbers; base64: the bytes of little-endian float32 values, or of "
        "the output_dtype. Default: float.",
    )
    output_dtype: OutputDtype | None = Field(
        None,
        description="int8, uint8: a byte for each dimension, of the range from -1 to 1, normalized "
        "before; binary, ubinary: a bit for each, eight to an int8 or uint8. Default: float.",
    )

    @property
    def dtypes(self) -> tuple[OutputDtype, ...]:
        """The types that are wanted."""
        return (self.output_dtype or "float",)

    def write(self, vectors: NDArray[np.float32]) -> list[Any]:
        """Vectors, float32 (num_texts, dimension), as they are sent."""
        values = quantized(vectors, self.output_dtype or "float")
        return base64_of(values) if self.encoding_format == "base64" else values.tolist()


def base64_of(values: NDArray[Any]) -> list[str]:
    """The bytes of each row of (num_rows, dimension), little-endian, as base64."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return [base64.b64encode(row.tobytes()).decode() for row in little]
