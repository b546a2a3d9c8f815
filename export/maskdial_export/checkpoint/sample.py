"""The texts by which a lower precision is calibrated, and on which its quality is measured."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from maskdial_export.errors import ExportError

_PACKAGE = "maskdial_export"
_OWN, _CALIBRATION = "sample.txt", "calibration.txt"
_OTHERS, _LANGUAGES = ("sample_code.txt", "sample_dialogue.txt"), "sample_languages.txt"
# About 16,000 tokens, more than any evaluation reads, and 250,000, which tuning reads.
_MAX_CHARACTERS, _MAX_TO_CALIBRATE = 2**16, 2**20
_PART = 2**13  # characters, half of what an evaluation reads
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_LONGEST_PASSAGE = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A text, with the name and SHA-256 of its file for the manifest.

    The built-in one has ``others``, which language models read as well (code and dialogue), and a
    text in several ``languages`` for those whose tokens are of as many.
    """

    name: str
    sha256: str
    text: str
    others: tuple[str, ...] = ()
    languages: str = ""

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

    def parts(self) -> Iterator["Sample"]:
        """The text in parts of some pages, each of whole sentences unless those are longer."""
        start = 0
        while start < len(self.text):
            stop = start + _PART
            ends = [match.end() for match in _SENTENCE_END.finditer(self.text, start, stop)]
            if stop < len(self.text) and ends:
                stop = ends[-1]
            yield replace(self, text=self.text[start:stop])
            start = stop


def read_sample(path: Path | None) -> Sample:
    """Reads a text file, or the built-in sample if ``path`` is None.

    Raises:
        ExportError: the file cannot be read, is not UTF-8, or is empty.
    """
    if path is not None:
        return _read(path, "quality")
    others = tuple(_built_in(name).text for name in _OTHERS)
    return replace(_built_in(_OWN), others=others, languages=_built_in(_LANGUAGES).text)


def read_calibration(path: Path | None, quality: Path | None) -> Sample:
    """Reads the text to calibrate with: another one than the sample, unless that is the user's.

    Args:
        path: a text file; None for the built-in page, or for the quality text if there is one.
        quality: the quality text; None for the built-in sample.

    Raises:
        ExportError: as `read_sample`.
    """
    if path is None and quality is None:
        return _built_in(_CALIBRATION)
    return read_sample(quality) if path is None else _read(path, "calibration", _MAX_TO_CALIBRATE)


def _built_in(file: str) -> Sample:
    content = resources.files(_PACKAGE).joinpath(file).read_bytes()
    return _sample(f"{_PACKAGE}/{file}", content, content.decode())


def _read(path: Path, kind: str, longest: int = _MAX_CHARACTERS) -> Sample:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ExportError(f"cannot read the {kind} text {path}: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExportError(
            f"the {kind} text {path} is not UTF-8 (byte {error.start}); convert it to UTF-8"
        ) from error
    if not text.strip():
        raise ExportError(f"the {kind} text {path} is empty")
    return _sample(path.name, content, text[:longest])


def _sample(name: str, content: bytes, text: str) -> Sample:
    return Sample(name, hashlib.sha256(content).hexdigest(), text)
