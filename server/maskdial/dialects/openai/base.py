"""What the bodies of the OpenAI dialect share: a model, and which unknown fields are taken."""

from typing import Annotated

from pydantic import Field

from maskdial.bounds import Size
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.dialects.body import AT_LEAST_ONE, AnyText, TaskBody, TokenId
from maskdial.dialects.lenient import Lenient

_HABITS = frozenset(
    {
        # OpenAI's own, about caches, bills and logs
        *("client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store"),
        *("user", "user_id"),
        # llama.cpp's and Ollama's, about caches, slots and reports
        *("cache_prompt", "id_slot", "keep_alive", "n_keep", "return_progress", "samplers"),
        *("t_max_predict_ms", "timings_per_token", "ttl"),
        # OpenRouter's, about who answers
        *("models", "plugins", "provider", "route", "session_id", "trace", "transforms", "usage"),
    }
)


Metadata = Annotated[
    dict[
        Annotated[str, Size(0, 64, "characters")],
        Annotated[str, Size(0, 512, "characters")],
    ],
    Size(0, 16, "pairs"),
]
"""What a client may have kept with an object, with OpenAI's bounds."""


class OpenAIBody(Lenient, TaskBody):
    """A body of the OpenAI dialect. ``timeout`` is an extension."""

    habits = _HABITS


def check_items(value: object, wrong: str = "must be a string") -> object:
    """Checks a text, or a list of them, before parsing; the error says which one is wrong.

    Args:
        value: of the field.
        wrong: what is said of an item that is no text.

    Raises:
        ValueError: there is none, or one is no text, or blank.
    """
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise ValueError("must hold at least one text")
    for index, text in enumerate(texts):
        where = f"item {index} " if isinstance(value, list) else ""
        if not isinstance(text, str):
            raise ValueError(f"{where}{wrong}")
        if not text.strip():
            raise ValueError(f"{where}must not be empty")
    return value


TextsOrIds = str | list[str] | list[int] | list[list[int]]
"""What OpenAI takes as an input: a text, texts, token ids, or lists of them."""


_Ids = Annotated[list[TokenId], Field(json_schema_extra=AT_LEAST_ONE)]
_Lists = _Ids | Annotated[list[_Ids], Field(json_schema_extra=AT_LEAST_ONE)]
AnyInput = str | Annotated[list[str], Field(json_schema_extra=AT_LEAST_ONE)] | _Lists
"""The same for the JSON schema."""

NotBlankInput = AnyText | Annotated[list[str], Field(json_schema_extra=AT_LEAST_ONE)] | _Lists
"""The same, where a single text is not blank."""


def check_input(value: object) -> object:
    """Validates an input of one of these forms; the error says which item is wrong.

    It does all the work, as a plain validator: pydantic's union would try every form, and collect
    an error per item for those that do not fit.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, or one or more lists of token ids")
    first = value[0]
    expected = "a string" if isinstance(first, str) else "a token id"
    if isinstance(first, list):
        expected = "a list of token ids"
    for index, item in enumerate(value):
        if type(item) is not type(first) or not _is_input(item):
            raise ValueError(f"item {index} must be {expected}")
    return value


def _is_input(item: object) -> bool:
    if isinstance(item, list):
        return all(type(each) is int for each in item)
    return type(item) is int or isinstance(item, str)


def inputs_of(value: TextsOrIds) -> list[TextOrIds]:
    """The texts, or lists of token ids, one by one."""
    if isinstance(value, str):
        return [value]
    ids = [each for each in value if isinstance(each, int)]
    return [ids] if ids else [each for each in value if not isinstance(each, int)]


def is_batch(value: TextsOrIds) -> bool:
    """Whether the value is a list of inputs, so that an error has to say which one it is about."""
    return isinstance(value, list) and not isinstance(value[0], int)
