"""Fields that are known and cannot be served."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Marks a field that is known and cannot be served; the error says why."""

    reason: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._refuse, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"description": self.reason}

    def _refuse(self, _: object) -> object:
        raise ValueError(self.reason)


Gbnf = Annotated[
    Any,
    Unsupported(
        "grammars in GBNF are not supported; send a JSON schema (response_format), guided_regex, "
        "or guided_grammar, which is Lark"
    ),
]
"""llama.cpp's grammars."""

Lora = Annotated[
    Any,
    Unsupported(
        'adapters are models here: name one as "model" (GET /v1/models lists them), and the base '
        "for none; their scale is the one that they were exported with"
    ),
]
"""llama.cpp's choice of adapters, by their places on its command line."""
