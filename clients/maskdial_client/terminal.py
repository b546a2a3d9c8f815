"""Terminal: texts of models and servers, as a terminal may get them.

What they write could move the cursor, set the window's title or the clipboard, or pass for another
line of the output. Such characters are shown as Python writes them in a string.
"""

import re

# The C0 and C1 control characters, delete, Unicode's line separators, and halves of pairs, which
# cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """A text with its control characters escaped, but for those in ``keep``."""

    def escaped(match: re.Match[str]) -> str:
        character = match.group()
        return character if character in keep else character.encode("unicode_escape").decode()

    return _UNSAFE.sub(escaped, text)


def printable_json(text: str) -> str:
    """JSON that means the same, with all control characters but line feeds escaped."""
    return _UNSAFE.sub(
        lambda match: match.group() if match.group() == "\n" else f"\\u{ord(match.group()):04x}",
        text,
    )
