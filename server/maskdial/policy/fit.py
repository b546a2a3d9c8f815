"""Fit: whether a text still is what was asked for, once parts of it are redacted."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import MaskdialError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.source import GrammarKind, GrammarRequest, GrammarValue


class Fit:
    """What the texts of a request have to match.

    Args:
        tokenizer: of the model.
        grammars: of the model; None where it takes none.
        grammar: of the content; None for any.
        schemas: of the arguments of each tool.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler | None,
        grammar: GrammarRequest | None,
        schemas: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._grammar = grammar
        self._schemas = schemas

    @property
    def binds_content(self) -> bool:
        """Whether the content has to match anything."""
        return self._grammar is not None

    def names(self, tool: str | None) -> frozenset[str]:
        """The keys that the schema of a tool's arguments has, or that of the content."""
        schema: object = self._schemas.get(tool or "")
        if tool is None and self._grammar is not None and self._grammar.kind == "json_schema":
            schema = self._grammar.value
        return frozenset(_names(schema))

    async def content(self, text: str) -> bool:
        """Whether a text is content that was asked for."""
        if self._grammar is None:
            return True
        return await self._matches(self._grammar.kind, self._grammar.value, text)

    async def arguments(self, tool: str, text: str) -> bool:
        """Whether a text is arguments for a tool."""
        schema = self._schemas.get(tool)
        return schema is None or await self._matches("json_schema", dict(schema), text)

    async def _matches(self, kind: GrammarKind, value: GrammarValue, text: str) -> bool:
        if self._grammars is None:
            return False
        try:
            grammar = await asyncio.wrap_future(self._grammars.submit(kind, value))
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            matcher = await asyncio.to_thread(partial(grammar.matcher, first=True))
            return await asyncio.to_thread(matcher.matches, ids)
        except MaskdialError:
            return False  # what cannot be checked is not passed on


def _names(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, Mapping) else ()
        for each in schema.values():
            yield from _names(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _names(each)
