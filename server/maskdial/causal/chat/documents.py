"""Documents that a reply is to be written from."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEGIN = "Answer from these documents where they help:"


def document_of(content: object) -> dict[str, Any]:
    """A document as chat templates read it, with a ``text`` and often a ``title``.

    Args:
        content: a text, or a mapping of fields; what has no ``text`` is written as JSON.
    """
    if not isinstance(content, Mapping):
        return {"text": str(content)}
    if isinstance(content.get("text"), str):
        return dict(content)
    return {**content, "text": json.dumps(content, ensure_ascii=False)}


def as_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Documents as a system message, for templates that have no place for them."""
    written = [_BEGIN]
    for number, document in enumerate(documents, 1):
        title = f" {document['title']}" if document.get("title") else ""
        written.append(f"[{number}]{title}\n{document['text']}")
    return "\n\n".join(written)
