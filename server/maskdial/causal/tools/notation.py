"""Converts values in notations similar to JSON, FunctionGemma's and Python's, to JSON."""

import ast
import json
import re
from collections.abc import Iterator

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORD = re.compile(r"[^\s,:{}\[\]()]+")


def json_from(text: str, quote: str) -> str:
    """Converts a value to JSON text. Numbers keep their spelling.

    Args:
        text: constants, numbers, strings, lists in ``[]``, objects in ``{}`` with bare or quoted
            keys.
        quote: what surrounds strings; ``"`` stands for both of Python's quotes.
    """
    return "".join(_tokens(text, quote))


def _tokens(text: str, quote: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        if quote == '"' and text[position] in "\"'":
            stop = _closing(text, position)
            yield _string(text[position:stop])
        elif text.startswith(quote, position):
            start = position + len(quote)
            stop = text.find(quote, start)
            stop = len(text) if stop < 0 else stop
            yield json.dumps(text[start:stop], ensure_ascii=False)
            stop += len(quote)
        elif (word := _WORD.match(text, position)) is not None:
            stop = word.end()
            if quote != '"' and quote in word[0]:
                stop = text.index(quote, position)
            yield _word(text[position:stop], is_key=text[stop:].lstrip().startswith(":"))
        else:
            stop = position + 1
            yield {",": ", ", ":": ": "}.get(text[position], text[position].strip())
        position = stop


def _closing(text: str, start: int) -> int:
    """The end of the Python or JSON string that begins at ``start``."""
    position = start + 1
    while position < len(text) and text[position] != text[start]:
        position += 2 if text[position] == "\\" else 1
    return position + 1


def _string(text: str) -> str:
    try:
        value = json.loads(text) if text.startswith('"') else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text[1:-1]
    return json.dumps(value, ensure_ascii=False)


def _word(word: str, *, is_key: bool) -> str:
    word = word if is_key else _CONSTANTS.get(word, word)
    if not is_key and _JSON_WORD.fullmatch(word):
        return word
    return json.dumps(word, ensure_ascii=False)
