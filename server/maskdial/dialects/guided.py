"""What a text must match, as vLLM's ``guided_*`` fields say it."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from maskdial.bounds import Size
from maskdial.causal.tools.lark import quoted
from maskdial.dialects.body import FieldError, Wire
from maskdial.grammar.source import GrammarKind, GrammarRequest, GrammarValue


def _check_schema(value: object) -> object:
    if value is None or isinstance(value, str | dict | bool):
        return value
    raise ValueError("must be an object, a string, true or false")


Schema = Annotated[str | dict[str, Any] | bool | None, BeforeValidator(_check_schema)]

Choices = Annotated[list[Annotated[str, Size(1, 1024, "characters")]], Size(1, 256, "choices")]


class GuidedFields(Wire):
    """What the text must match: one of the fields."""

    guided_json: Schema = Field(None, description="Extension: a JSON schema.")
    guided_regex: str | None = Field(None, description="Extension: a regular expression.")
    guided_choice: Choices | None = Field(None, description="Extension: texts to choose from.")
    guided_grammar: str | None = Field(None, description="Extension: a Lark grammar.")

    def grammars(self) -> dict[str, GrammarRequest]:
        """The grammars that were given, by the names of their fields."""
        return given_grammars(
            {
                "guided_json": ("json", self.guided_json),
                "guided_regex": ("regex", self.guided_regex),
                "guided_choice": ("lark", one_of(self.guided_choice)),
                "guided_grammar": ("lark", self.guided_grammar),
            }
        )

    @property
    def constraint(self) -> GrammarRequest | None:
        """What the text must match."""
        return next(iter(self.grammars().values()), None)

    @model_validator(mode="after")
    def _check_grammars(self) -> Self:
        """Refuses several grammars."""
        if len(found := self.grammars()) > 1:
            first, *others = found
            raise FieldError(others[0], f"also given as {first}; a text can match one grammar only")
        return self


def given_grammars(
    wanted: dict[str, tuple[GrammarKind, GrammarValue]],
) -> dict[str, GrammarRequest]:
    """The grammars whose value is not null, by name."""
    return {
        name: GrammarRequest(kind, value)
        for name, (kind, value) in wanted.items()
        if value is not None
    }


def one_of(choices: Sequence[str] | None) -> str | None:
    """A Lark grammar of some texts."""
    if choices is None:
        return None
    return "start: " + " | ".join(map(quoted, choices))
