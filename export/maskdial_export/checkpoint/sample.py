"""The sample text on which the quality of a lower precision is measured."""

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from maskdial_export.errors import ExportError

_PACKAGE = "maskdial_export"
_OWN = "sample.txt"
# About 16,000 tokens, more than any evaluation reads.
_MAX_CHARACTERS = 65_536
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_LONGEST_PASSAGE = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A text, with the name and SHA-256 of its file for the manifest."""

    name: str
    sha256: str
    text: str

    def sentences(self) -> list[str]:
        return [part for part in _SENTENCE_END.split(self.text) if part.strip()]

    def passages(self) -> list[str]:
        """Every run of one to four consecutive sentences, shortest runs first."""
        sentences = self.sentences()
        return [
            " ".join(sentences[start : start + length])
            for length in range(1, _LONGEST_PASSAGE + 1)
            for start in range(len(sentences) - length + 1)
        ]


def read_sample(path: Path | None) -> Sample:
    """Reads a text file, or the built-in sample if ``path`` is None.

    Raises:
        ExportError: the file cannot be read, is not UTF-8, or is empty.
    """
    if path is None:
        name = f"{_PACKAGE}/{_OWN}"
        content = resources.files(_PACKAGE).joinpath(_OWN).read_bytes()
    else:
        try:
            name, content = path.name, path.read_bytes()
        except OSError as error:
            raise ExportError(f"cannot read the quality text {path}: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExportError(
            f"the quality text {path} is not UTF-8 (byte {error.start}); convert it to UTF-8"
        ) from error
    if not text.strip():
        raise ExportError(f"the quality text {path} is empty")
    return Sample(name, hashlib.sha256(content).hexdigest(), text[:_MAX_CHARACTERS])
