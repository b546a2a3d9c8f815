"""Sample: the text that tells how much of a model a lower precision loses."""

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from maskdial_export.errors import ExportError

_OWN = "sample.txt"  # beside this module
# About 16,000 tokens; more would take longer and say the same.
_MOST_CHARACTERS = 65_536
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_LONGEST_PASSAGE = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A text, with the name and the hash of its file for the manifest."""

    name: str
    sha256: str
    text: str

    def sentences(self) -> list[str]:
        return [part for part in _SENTENCE_END.split(self.text) if part.strip()]

    def passages(self) -> list[str]:
        """Every run of one to four sentences: texts of many lengths, one decision each."""
        sentences = self.sentences()
        return [
            " ".join(sentences[start : start + length])
            for length in range(1, _LONGEST_PASSAGE + 1)
            for start in range(len(sentences) - length + 1)
        ]


def read_sample(path: Path | None) -> Sample:
    """Reads a text file, or the sample that comes with the exporter.

    Raises:
        ExportError: it cannot be read, or there is nothing in it.
    """
    if path is None:
        name = f"{__package__}/{_OWN}"
        content = resources.files(__package__).joinpath(_OWN).read_bytes()
    else:
        try:
            name, content = path.name, path.read_bytes()
        except OSError as error:
            raise ExportError(
                f"the quality text {path} cannot be read: {error.strerror}"
            ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExportError(
            f"the quality text {path} is not UTF-8 (byte {error.start}); convert it first"
        ) from error
    if not text.strip():
        raise ExportError(f"the quality text {path} is empty")
    return Sample(name, hashlib.sha256(content).hexdigest(), text[:_MOST_CHARACTERS])
