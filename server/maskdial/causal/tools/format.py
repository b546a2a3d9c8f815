"""ToolFormat: how a model writes tool calls."""

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pydantic

from maskdial.errors import BundleError

NAME, ARGUMENTS, ID, INDEX = "$NAME", "$ARGUMENTS", "$ID", "$INDEX"
KEY, TYPE, VALUE = "$KEY", "$TYPE", "$VALUE"
_PLACEHOLDER = re.compile(r"(\$(?:NAME|ARGUMENTS|ID|INDEX|KEY|TYPE|VALUE))")
_TAG = r"(?:<[^<>\s]*[A-Za-z][^<>\s]*>|\[[A-Z_]{2,}\])"
# A tag that no text contains by chance; a bare bracket or brace could be any text. Of Kimi K3's
# <|open|>tools<|sep|>, the first tag alone may open something else.
_TRIGGER = re.compile(rf"{_TAG}\w+{_TAG}|{_TAG}|<[^<>\s]*[A-Za-z][^<>\s]*")
_PLACEHOLDERS = [sorted([NAME, ARGUMENTS, *other]) for other in ([], [ID], [INDEX])]
JSON_TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})
_CONFIG = pydantic.ConfigDict(extra="forbid")
_ALPHABET = string.ascii_letters + string.digits


def split_pattern(pattern: str) -> list[str]:
    """A pattern as alternating literals, possibly empty, and placeholders."""
    return _PLACEHOLDER.split(pattern)


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """How arguments are written that are not a JSON object.

    Attributes:
        parameter: the pattern of one argument, with ``$KEY``, ``$VALUE`` and possibly ``$TYPE``
            between them.
        separator: the text between two arguments.
        quote: what surrounds strings: nothing, ``"`` for JSON strings, or a mark such as
            FunctionGemma's ``<escape>``, which comes with nested objects that have bare keys.
        python: constants are True, False and None.
        cdata: texts may be within ``<![CDATA[`` and ``]]>``, as MiniCPM 5 writes long ones.
        types: what ``$TYPE`` is, by the JSON type of the value. Strings have one of their own;
            they are written as they are, and values of other types as JSON.
    """

    __pydantic_config__ = _CONFIG

    parameter: str
    separator: str = ""
    quote: str = ""
    python: bool = False
    cdata: bool = False
    types: Mapping[str, str] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Why the notation is unusable, or None."""
        parts = split_pattern(self.parameter)
        if parts[1::2] != ([KEY, TYPE, VALUE] if self.types else [KEY, VALUE]):
            return "parameter must have $KEY and then $VALUE, with $TYPE between them for types"
        if not _ends_word(parts[2]):
            return "$KEY must be followed by something that cannot be part of a name"
        if not parts[-1].strip() and not self.quote:
            return "$VALUE without a quote must be followed by a tag"
        if not self.types:
            return None
        others = {text for kind, text in self.types.items() if kind != "string"}
        if self.types.keys() != JSON_TYPES or self.types["string"] in others or self.quote:
            return "types must name every JSON type, strings by a word of their own"
        if not all(re.fullmatch(r"\w+", each) for each in self.types.values()):
            return "types must be words"
        return None if _ends_word(parts[4]) else "$TYPE must be followed by no letter or digit"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: ``section_begin call (separator call)* section_end``.

    Attributes:
        call: the pattern of one call, with ``$NAME``, ``$ARGUMENTS`` and possibly ``$ID`` or
            ``$INDEX``, which is the number of a call.
        arguments: how ``$ARGUMENTS`` is written; None for a JSON object.
        section_begin: the text before the first call.
        separator: the text between two calls; None if a reply has one call at most.
        section_end: the text after the last call.
        optional_tag: a tag that may precede a call.
        short_ids: call ids are 9 letters or digits.
        text_arguments: the template expects the arguments of past calls as JSON text, not as an
            object.
        id_form: the form of call ids, with ``$NAME`` and ``$INDEX``, where the template writes a
            call's id in the place of its name.
        untold: the template does not write past calls, so they are written into the content.
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
    id_form: str = ""
    untold: bool = False
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
        match = _TRIGGER.match(self.opening)
        tags = [tag for tag in self.special_ids if self.opening.startswith(tag)]
        return max([match[0] if match else "", *tags], key=len)

    @property
    def parallel(self) -> bool:
        """Whether a reply may have several calls."""
        return self.separator is not None

    def new_call_id(self, name: str, index: int) -> str:
        """An id for a call, of a form that the chat template accepts.

        Args:
            name: of the called tool.
            index: the number of the call, from 0: in its reply, or in its conversation where past
                calls are rendered.
        """
        if self.id_form:
            return self.id_form.replace(NAME, name).replace(INDEX, str(index))
        if self.short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def to_json(self) -> dict[str, Any]:
        """The format as in the manifest's ``tool_format``, without defaults.

        It has no special tokens, which come from the tokenizer.
        """
        usual = asdict(ToolFormat(call=""))
        values = {key: value for key, value in asdict(self).items() if key != "special_ids"}
        for rare in ("types", "cdata"):
            if self.arguments is not None and not values["arguments"][rare]:
                del values["arguments"][rare]
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
        placeholders = sorted(parts[1::2])
        if placeholders not in _PLACEHOLDERS:
            return "call must have $NAME and $ARGUMENTS once, and $ID or $INDEX at most once"
        if parts.index(ARGUMENTS) < parts.index(NAME):
            return "$NAME must come before $ARGUMENTS in call"
        after = dict(zip(parts[1::2], parts[2::2], strict=True))
        for part in (NAME, ID, INDEX):
            if part in after and not all(map(_ends_word, self._nexts(after, part))):
                return f"{part} must be followed by something that cannot be part of a name"
        if self.separator is not None and not self.separator + self.call_begin:
            return "two calls must have some text between them"
        if self.id_form and (NAME not in self.id_form or self.id_form not in self.call):
            return "id_form must have $NAME and be a part of call"
        if self.arguments is None:
            return None
        return self.arguments.problem() or (
            None if after[ARGUMENTS] else "$ARGUMENTS must be followed by some text"
        )

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
