"""What the bodies of the masked family's routes share.

They are the Hugging Face task API's, text-embeddings-inference's for `/rerank` and `/embed`. Null
means not given; unknown fields are refused.
"""

import abc
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from maskdial.bounds import Size
from maskdial.dialects.body import AnyText, TaskBody, Wire
from maskdial.masked.tasks.task import TaskRequest, Truncation


def _check_not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[AnyText, pydantic.AfterValidator(_check_not_blank)]


def _lower_case(value: object) -> object:
    """Clients of text-embeddings-inference write ``"Left"`` and ``"Right"``."""
    return value.lower() if isinstance(value, str) else value


class TruncationParameters(Wire):
    """What to do with a text that is longer than the model."""

    truncate: bool | None = Field(
        None,
        description="Truncate texts that are too long, instead of refusing them. Default: as the "
        "server is set (--auto-truncate), otherwise false.",
    )
    truncation_direction: (
        Annotated[Literal["left", "right"], pydantic.BeforeValidator(_lower_case)] | None
    ) = Field(None, description="Side to truncate. Default: the side of the model's own tokenizer.")

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.truncate, self.truncation_direction)


class MaskedBody(TaskBody, abc.ABC):
    """A body that becomes a request to a masked model."""

    spellings = {"texts": "inputs"}  # noqa: RUF012

    @abc.abstractmethod
    def request(self) -> TaskRequest[Any]:
        """The body as a dialect-neutral request."""


Labels = Annotated[list[Annotated[Text, Size(1, 1024, "characters")]], Size(1, 1024, "labels")]
