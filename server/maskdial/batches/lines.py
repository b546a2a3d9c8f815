"""Lines: the requests of a file, one at a time, and how far it was read.

A line that cannot be read is a `Line` with a fault; those after it are read all the same.
"""

import abc
import csv
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json

from maskdial.dialects.body import check_shape
from maskdial.errors import ConfigError, ValidationError, shortened
from maskdial.extras import how_to_install

Format = Literal["jsonl", "csv", "parquet"]

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Position:
    """How far an input was read: how many lines, what tells their content from another's, and how
    much of the input's size that is.
    """

    number: int
    digest: "hashlib.blake2b"
    done: int

    @property
    def fingerprint(self) -> str:
        """Of all that was read."""
        return self.digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Line:
    """One request: a JSON object, or why there is none.

    ``number`` counts from 1, lines of JSONL and rows of the others. ``end`` is the position after
    it. It has about ``size`` bytes.
    """

    number: int
    content: dict[str, Any]
    fault: str
    end: Position
    size: int


class CustomIds:
    """The ``custom_id`` of every line so far; about 60 bytes are kept of each."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, custom_id: str) -> bool:
        """Whether it is the first line with this one."""
        digest = int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())
        is_new = digest not in self._hashes
        self._hashes.add(digest)
        return is_new


class Input(abc.ABC):
    """A file of requests.

    Attributes:
        size: its bytes, or rows; None if that is not known.
        done: how many of them were read.
        before_line: called in the reading thread before each line of a file that is read by the
            line, blank ones and parts of long ones included; what it raises ends the reading.
    """

    size: int | None = None
    done: int = 0

    def __init__(self) -> None:
        self.before_line: Callable[[], object] = lambda: None
        self._digest = hashlib.blake2b(digest_size=16)
        self._number = 0

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Line]:
        """The lines, once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file."""

    def _line(self, content: dict[str, Any] | None, fault: str = "", size: int = 0) -> Line:
        end = Position(self._number, self._digest.copy(), self.done)
        return Line(self._number, content or {}, fault, end, size)


class _Bytes(Input):
    """A file that is read by the line."""

    def __init__(self, file: BufferedReader, name: str, max_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._name = name
        self._max_bytes = max_bytes
        stat = os.fstat(file.fileno())
        self._is_regular = os.path.isfile(name)
        self.size = stat.st_size if self._is_regular else None

    def close(self) -> None:
        if self._is_regular:  # or it would wait for the pipe's reader
            self._file.close()

    def _raw_lines(self) -> Iterator[bytes | int]:
        """The lines; of one that is too long, how many bytes it has."""
        while raw := self._next(self._max_bytes + 2):
            self._read(raw)
            length = len(raw)
            while not raw.endswith(b"\n") and length > self._max_bytes:
                raw = self._next(_SKIP_BYTES)
                if not raw:
                    break
                self._read(raw)
                length += len(raw)
            length -= raw.endswith(b"\n")
            if length > self._max_bytes:
                yield length
            else:
                yield raw
        if self._is_regular and os.fstat(self._file.fileno()).st_size < self.done:
            raise ConfigError(f"{self._name} has become shorter while it was read")

    def _next(self, most: int) -> bytes:
        self.before_line()
        return self._file.readline(most)

    def _read(self, raw: bytes) -> None:
        self._digest.update(raw)
        self.done += len(raw)
        if self.size is not None:
            self.size = max(self.size, self.done)

    def _too_long(self, num_bytes: int) -> str:
        return (
            f"the line has {num_bytes:,} bytes; one may have at most {self._max_bytes:,} "
            "(MASKDIAL_MAX_BODY_BYTES)"
        )


class JsonLines(_Bytes):
    """One JSON object a line; blank lines mean nothing."""

    def __iter__(self) -> Iterator[Line]:
        for raw in self._raw_lines():
            self._number += 1
            if isinstance(raw, int):
                yield self._line(None, self._too_long(raw))
                continue
            text = raw.removeprefix(_BOM).strip() if self._number == 1 else raw.strip()
            if not text:
                self._skip_blank_lines()
                continue
            try:
                check_shape(text, "the line")
                content = from_json(text, allow_inf_nan=False)
            except ValidationError as error:
                yield self._line(None, error.message)
                continue
            except ValueError as error:
                yield self._line(None, f"the line is not valid JSON: {error}")
                continue
            if isinstance(content, dict):
                yield self._line(content, size=len(text))
            else:
                yield self._line(None, "the line must be a JSON object")

    def _skip_blank_lines(self) -> None:
        """Skips those that are in the buffer: a file may have a hundred million of them."""
        content = self._file.peek()
        num_blank = len(content) - len(content.lstrip())
        if end := content.rfind(b"\n", 0, num_blank) + 1:
            raw = self._file.read(end)
            self._read(raw)
            self._number += raw.count(b"\n")


class _TooLongError(Exception):
    """A line of a CSV file is."""


class CsvRows(_Bytes):
    """A column of a CSV file with a header, as the ``inputs`` of requests."""

    def __init__(
        self, file: BufferedReader, name: str, max_bytes: int, column: str, id_column: str | None
    ) -> None:
        super().__init__(file, name, max_bytes)
        self._columns = [column, *([] if id_column is None else [id_column])]

    def __iter__(self) -> Iterator[Line]:
        csv.field_size_limit(self._max_bytes)
        rows = csv.reader(self._texts())
        header = next(rows, [])
        _check_columns(self._name, header, self._columns)
        places = [header.index(name) for name in self._columns]
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except _TooLongError as error:
                row, fault = [], str(error)
            except csv.Error as error:
                row, fault = [], f"the row is not valid CSV: {error}"
            else:
                if not row:
                    continue
                fault = self._fault_of(row, len(header))
            self._number += 1
            if fault:
                yield self._line(None, fault)
                continue
            names = ("inputs", "id")
            content = {name: row[at] for name, at in zip(names, places, strict=False)}
            yield self._line(content, size=sum(map(len, content.values())))

    def _texts(self) -> Iterator[str]:
        for raw in self._raw_lines():
            if isinstance(raw, int):
                raise _TooLongError(self._too_long(raw))
            yield raw.decode("utf-8", "surrogateescape").removeprefix("\ufeff")

    @staticmethod
    def _fault_of(row: list[str], num_columns: int) -> str:
        if len(row) != num_columns:
            return f"the row has {len(row)} fields; the header has {num_columns}"
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            return "the row is not UTF-8"
        return ""


class ParquetRows(Input):
    """A column of texts of a Parquet file, as the ``inputs`` of requests."""

    def __init__(self, path: Path, column: str, id_column: str | None) -> None:
        super().__init__()
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            how = how_to_install("parquet")
            raise ConfigError(f"Parquet needs pyarrow ({error}): {how}") from error
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{path} is not a Parquet file: {error}") from error
        with path.open("rb") as file:
            self._digest.update(hashlib.file_digest(file, "sha256").digest())
        schema = self._file.schema_arrow
        self._columns = [column, *([] if id_column is None else [id_column])]
        _check_columns(str(path), schema.names, self._columns)
        kind = schema.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ConfigError(f"column {column!r} of {path} has the type {kind}; it must be string")
        self.size = self._file.metadata.num_rows

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        for batch in self._file.iter_batches(1024, columns=self._columns):
            columns = [batch.column(name).to_pylist() for name in self._columns]
            for values in zip(*columns, strict=True):
                self._number += 1
                self.done = self._number
                if values[0] is None:
                    yield self._line(None, f"the column {self._columns[0]!r} is null")
                else:
                    content = dict(zip(("inputs", "id"), values, strict=False))
                    yield self._line(content, size=len(values[0]))


def format_of(path: str, given: Format | None) -> Format:
    """The format of an input: as given, otherwise by the end of its name.

    Raises:
        ConfigError: neither tells.
    """
    if given is not None:
        return given
    if path == "-":
        return "jsonl"
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"the name {path} tells no format: let it end in {', '.join(_SUFFIXES)}, or set "
            "--format"
        )
    return _SUFFIXES[suffix]


def open_input(
    path: str, kind: Format, max_bytes: int, column: str | None, id_column: str | None
) -> Input:
    """The lines of a file; ``-`` is standard input.

    Raises:
        ConfigError: it cannot be read, or a column is missing or of another type.
    """
    if kind == "jsonl":
        if column is not None or id_column is not None:
            raise ConfigError("--column and --id-column are for CSV and Parquet")
    elif column is None:
        raise ConfigError("name the column of the texts with --column")
    if kind == "parquet":
        assert column is not None, "checked above"
        if path == "-":
            raise ConfigError("a Parquet file cannot be read from a pipe; name the file")
        return ParquetRows(Path(path), column, id_column)
    name = "/dev/stdin" if path == "-" else path
    try:
        file = open(0, "rb", closefd=False) if path == "-" else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    if column is None:
        return JsonLines(file, path, max_bytes)
    return CsvRows(file, path, max_bytes, column, id_column)


def _check_columns(name: str, present: list[str], wanted: list[str]) -> None:
    for column in wanted:
        if column not in present:
            known = ", ".join(map(repr, present)) or "none"
            raise ConfigError(
                f"{name} has no column {shortened(column)!r}; it has {shortened(known, 1000)}"
            )
