"""ToolFormat: how a model writes the calls of tools."""

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pydantic

from maskdial.errors import BundleError

NAME, ARGUMENTS, ID = "$NAME", "$ARGUMENTS", "$ID"
KEY, VALUE = "$KEY", "$VALUE"
_PLACEHOLDER = re.compile(r"(\$NAME|\$ARGUMENTS|\$ID|\$KEY|\$VALUE)")
# A tag that no text holds by chance. What else may begin a call could begin any text as well.
_TRIGGER = re.compile(r"<[^<>\s]*[A-Za-z][^<>\s]*>?|\[[A-Z_]{2,}\]")
_CONFIG = pydantic.ConfigDict(extra="forbid")
_ALPHABET = string.ascii_letters + string.digits


def split_pattern(pattern: str) -> list[str]:
    """A pattern as literals and placeholders in turns; literals may be empty."""
    return _PLACEHOLDER.split(pattern)


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """Arguments written one by one, not as a JSON object.

    Attributes:
        parameter: one argument, with ``$KEY`` and ``$VALUE``.
        separator: what is between two of them.
        quote: what is around a string: nothing, or ``"`` for JSON's strings, or a mark such as
            FunctionGemma's ``<escape>``, whose notation has objects with bare keys.
        python: whether the constants are True, False and None.
    """

    __pydantic_config__ = _CONFIG

    parameter: str
    separator: str = ""
    quote: str = ""
    python: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: ``section_begin call (separator call)* section_end``.

    Attributes:
        call: one call, with ``$NAME``, ``$ARGUMENTS`` and possibly ``$ID``.
        arguments: how ``$ARGUMENTS`` are written; None: as a JSON object.
        section_begin: what is before the first call.
        separator: what is between two calls; None: a reply has one call.
        section_end: what is after the last call.
        optional_tag: what may be before a call and need not be.
        short_ids: the ids of calls are 9 letters or digits.
        text_arguments: the template takes the arguments of past calls as JSON text, not as objects.
        special_ids: the special tokens among the tags, with their token ids.
    """

    __pydantic_config__ = _CONFIG

    call: str
    arguments: ArgumentList | None = None
    section_begin: str = ""
    separator: str | None = None
    section_end: str = ""
    optional_tag: str = ""
    short_ids: bool = False
    text_arguments: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def call_begin(self) -> str:
        """What each call begins with, up to its name or id."""
        return split_pattern(self.call)[0]

    @property
    def opening(self) -> str:
        """What the first call begins with, up to its name or id."""
        return self.section_begin + self.call_begin

    @property
    def trigger(self) -> str:
        """The tag by which text turns into calls; empty where calls have none, so that only the
        very beginning of a reply can be one.
        """
        for tag in sorted(self.special_ids, key=len, reverse=True):
            if self.opening.startswith(tag):
                return tag
        match = _TRIGGER.match(self.opening)
        return match[0] if match else ""

    @property
    def parallel(self) -> bool:
        """Whether a reply may have several calls."""
        return self.separator is not None

    def new_call_id(self) -> str:
        """A random id for a call, as the model's template takes it."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def to_json(self) -> dict[str, Any]:
        """What was derived, without what is usual: the form of the manifest's ``tool_format``.

        Special tokens are not in it, since they come from the tokenizer.
        """
        usual = asdict(ToolFormat(call=""))
        values = {key: value for key, value in asdict(self).items() if key != "special_ids"}
        return {key: value for key, value in values.items() if value != usual[key]}

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, special_tokens: Mapping[str, int] | None = None
    ) -> "ToolFormat":
        """The inverse of `to_json`.

        Raises:
            BundleError: the value describes no format.
        """
        try:
            parsed = pydantic.TypeAdapter(ToolFormat).validate_python(dict(value))
        except pydantic.ValidationError as error:
            raise BundleError(f"tool_format of the manifest is not usable: {error}") from error
        if reason := parsed.problem():
            raise BundleError(f"tool_format of the manifest is not usable: {reason}")
        return parsed.with_special(special_tokens or {})

    def problem(self) -> str | None:
        """Why the format cannot be generated and parsed, or None."""
        parts = split_pattern(self.call)
        if sorted(parts[1::2]) not in ([ARGUMENTS, NAME], [ARGUMENTS, ID, NAME]):
            return "call needs $NAME and $ARGUMENTS once, and $ID at most once"
        if parts.index(ARGUMENTS) < parts.index(NAME):
            return "call has $ARGUMENTS before $NAME"
        after = dict(zip(parts[1::2], parts[2::2], strict=True))
        for part in (NAME, ID):
            if part in after and not all(map(_ends_word, self._nexts(after, part))):
                return f"nothing in call ends {part}"
        if self.separator is not None and not self.separator + self.call_begin:
            return "nothing is between two calls"
        if self.arguments is None:
            return None
        parameter = split_pattern(self.arguments.parameter)
        if parameter[1::2] != [KEY, VALUE]:
            return "parameter needs $KEY and then $VALUE"
        if not _ends_word(parameter[2]):
            return "nothing in parameter ends $KEY"
        if not parameter[4].strip() and not self.arguments.quote:
            return "nothing in parameter ends $VALUE"
        if not after[ARGUMENTS]:
            return "nothing in call ends $ARGUMENTS"
        return None

    def _nexts(self, after: Mapping[str, str], part: str) -> list[str]:
        """What may be next after a part of a call."""
        if f"{part}{ARGUMENTS}" not in self.call:
            return [after[part]]
        if self.arguments is None:
            return ["{"]
        return [split_pattern(self.arguments.parameter)[0], after[ARGUMENTS]]

    def with_special(self, special_tokens: Mapping[str, int]) -> "ToolFormat":
        """The format of a model that has these special tokens, by their text."""
        quote = "" if self.arguments is None else self.arguments.quote
        parameter = "" if self.arguments is None else self.arguments.parameter
        parts = [self.opening, self.call, self.separator or "", self.section_end]
        text = "\n".join([*parts, self.optional_tag, parameter, quote])
        special = {tag: token_id for tag, token_id in special_tokens.items() if tag and tag in text}
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ToolFormat(**{**values, "special_ids": special})


def _ends_word(text: str) -> bool:
    return bool(re.match(r"[^\w.$-]", text))


# Of models whose template knows no tools: what required and named calls are made of.
PLAIN_FORMAT = ToolFormat(call='{"name": "$NAME", "arguments": $ARGUMENTS}')
