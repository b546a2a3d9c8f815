"""ToolFormat: how a model writes tool calls."""

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
# A tag that no text contains by chance; a bare bracket or brace could be any text.
_TRIGGER = re.compile(r"<[^<>\s]*[A-Za-z][^<>\s]*>?|\[[A-Z_]{2,}\]")
_CONFIG = pydantic.ConfigDict(extra="forbid")
_ALPHABET = string.ascii_letters + string.digits


def split_pattern(pattern: str) -> list[str]:
    """A pattern as alternating literals, possibly empty, and placeholders."""
    return _PLACEHOLDER.split(pattern)


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """How arguments are written that are not a JSON object.

    Attributes:
        parameter: the pattern of one argument, with ``$KEY`` and ``$VALUE``.
        separator: the text between two arguments.
        quote: what surrounds strings: nothing, ``"`` for JSON strings, or a mark such as
            FunctionGemma's ``<escape>``, which comes with nested objects that have bare keys.
        python: constants are True, False and None.
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
        call: the pattern of one call, with ``$NAME``, ``$ARGUMENTS`` and possibly ``$ID``.
        arguments: how ``$ARGUMENTS`` is written; None for a JSON object.
        section_begin: the text before the first call.
        separator: the text between two calls; None if a reply has one call at most.
        section_end: the text after the last call.
        optional_tag: a tag that may precede a call.
        short_ids: call ids are 9 letters or digits.
        text_arguments: the template expects the arguments of past calls as JSON text, not as an
            object.
        special_ids: those of its tags that are special tokens, with their token ids.
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
        """The text of a call up to its name or id."""
        return split_pattern(self.call)[0]

    @property
    def opening(self) -> str:
        """The text of the first call up to its name or id, with what precedes it."""
        return self.section_begin + self.call_begin

    @property
    def trigger(self) -> str:
        """The tag that begins the calls within a text. Empty if the format has none; then only the
        beginning of a reply can be a call.
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
        """A random id for a call, of a form that the chat template accepts."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def to_json(self) -> dict[str, Any]:
        """The format as in the manifest's ``tool_format``, without defaults.

        It has no special tokens, which come from the tokenizer.
        """
        usual = asdict(ToolFormat(call=""))
        values = {key: value for key, value in asdict(self).items() if key != "special_ids"}
        return {key: value for key, value in values.items() if value != usual[key]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ToolFormat":
        """The inverse of `to_json`.

        Raises:
            BundleError: the value is not a usable format.
        """
        try:
            parsed = pydantic.TypeAdapter(ToolFormat).validate_python(dict(value))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BundleError(f"the manifest's tool_format: {where}: {first['msg']}") from error
        if reason := parsed.problem():
            raise BundleError(f"the manifest's tool_format: {reason}")
        return parsed

    def problem(self) -> str | None:
        """Why the format is unusable, or None."""
        parts = split_pattern(self.call)
        if sorted(parts[1::2]) not in ([ARGUMENTS, NAME], [ARGUMENTS, ID, NAME]):
            return "call must have $NAME and $ARGUMENTS once, and $ID at most once"
        if parts.index(ARGUMENTS) < parts.index(NAME):
            return "$NAME must come before $ARGUMENTS in call"
        after = dict(zip(parts[1::2], parts[2::2], strict=True))
        for part in (NAME, ID):
            if part in after and not all(map(_ends_word, self._nexts(after, part))):
                return f"{part} must be followed by something that cannot be part of a name"
        if self.separator is not None and not self.separator + self.call_begin:
            return "two calls must have some text between them"
        if self.arguments is None:
            return None
        parameter = split_pattern(self.arguments.parameter)
        if parameter[1::2] != [KEY, VALUE]:
            return "parameter must have $KEY and then $VALUE"
        if not _ends_word(parameter[2]):
            return "$KEY must be followed by something that cannot be part of a name"
        if not parameter[4].strip() and not self.arguments.quote:
            return "$VALUE without a quote must be followed by a tag"
        if not after[ARGUMENTS]:
            return "$ARGUMENTS must be followed by some text"
        return None

    def _nexts(self, after: Mapping[str, str], part: str) -> list[str]:
        """What may follow a part of a call."""
        if f"{part}{ARGUMENTS}" not in self.call:
            return [after[part]]
        if self.arguments is None:
            return ["{"]
        return [split_pattern(self.arguments.parameter)[0], after[ARGUMENTS]]

    def with_special(self, special_tokens: Mapping[str, int]) -> "ToolFormat":
        """The same format for a tokenizer with these special tokens: token ids by text."""
        quote = "" if self.arguments is None else self.arguments.quote
        parameter = "" if self.arguments is None else self.arguments.parameter
        parts = [self.opening, self.call, self.separator or "", self.section_end]
        text = "\n".join([*parts, self.optional_tag, parameter, quote])
        special = {tag: token_id for tag, token_id in special_tokens.items() if tag and tag in text}
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ToolFormat(**{**values, "special_ids": special})


def _ends_word(text: str) -> bool:
    return bool(re.match(r"[^\w.$-]", text))


# For required and named calls of models whose template does not support tools.
PLAIN_FORMAT = ToolFormat(call='{"name": "$NAME", "arguments": $ARGUMENTS}')
