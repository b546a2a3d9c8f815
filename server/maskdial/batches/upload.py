"""Upload: a form with a file, which goes to the disk as it comes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from io import FileIO
from pathlib import Path

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from maskdial.batches.storage import Storage
from maskdial.errors import TooLargeError, ValidationError, shortened

_WRITE_BYTES = 2**20
_MAX_FIELD_BYTES = 1024
_MAX_NAME = 255
# The parser takes a millisecond for a hundred; no form that is answered has more than four.
_MAX_FIELDS = 16
_HOW = 'send multipart/form-data with the fields "purpose" and "file"'


class Upload:
    """A form.

    Attributes:
        fields: those that are no file, by name.
        filename: that of the file; None: there is no file.
        num_bytes: its size.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._pending = bytearray()  # of the file
        self._field = bytearray()
        self._headers: list[tuple[bytearray, bytearray]] = []
        self._name = ""
        self._num_fields = 0
        self._is_file = False
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_begin": lambda: self._headers.append((bytearray(), bytearray())),
                "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
                "on_headers_finished": self._read_headers,
                "on_part_data": self._take,
                "on_part_end": self._finish,
                "on_end": self._end,
            },
        )

    def feed(self, content: bytes) -> None:
        """Reads the next part of the body.

        Raises:
            ValidationError: it is no form, or one of too many fields.
        """
        try:
            self._parser.write(content)
        except FormParserError as error:
            raise ValidationError(f"the body is no valid form: {error}; {_HOW}") from error

    def take_pending(self, least: int) -> bytes:
        """What has come of the file and was not taken; nothing if that is less."""
        if len(self._pending) < least:
            return b""
        content, self._pending = bytes(self._pending), bytearray()
        return content

    def check_complete(self) -> None:
        """Whether all of it has come.

        Raises:
            ValidationError: it has not, or there is no file.
        """
        if not self._has_ended:
            raise ValidationError(f"the body ends before the form does; {_HOW}")
        if self.filename is None:
            raise ValidationError("file: this field is required, and must be a file", field="file")

    def _begin(self) -> None:
        self._num_fields += 1
        if self._num_fields > _MAX_FIELDS:
            raise ValidationError(f"the form has more than {_MAX_FIELDS} fields; {_HOW}")
        self._headers, self._field = [], bytearray()

    def _add(self, place: int, content: bytes) -> None:
        part = self._headers[-1][place]
        part += content
        if len(part) > _MAX_FIELD_BYTES:
            raise ValidationError(f"a header in the form is too long; {_HOW}")

    def _read_headers(self) -> None:
        headers = {bytes(name).lower(): bytes(value) for name, value in self._headers}
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if b"filename" not in options:
                raise ValidationError("file: must be a file, with a filename", field="file")
            if self.filename is not None:
                raise ValidationError("file: is given twice", field="file")
            self.filename = options[b"filename"].decode("utf-8", "replace")[:_MAX_NAME]

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pending += memoryview(data)[start:end]
            self.num_bytes += end - start
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            name = shortened(self._name)
            raise ValidationError(
                f"{name}: must have at most {_MAX_FIELD_BYTES:,} bytes", field=name
            )

    def _finish(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True


@contextlib.asynccontextmanager
async def receive_upload(
    request: Request,
    storage: Storage,
    path: Path,
    max_bytes: int,
    grow_to: Callable[[int], object],
) -> AsyncIterator[Upload]:
    """Writes the file of a request to a path; it is removed if it is still there in the end.

    Args:
        request: whose body is the form.
        storage: the folder.
        path: in it.
        max_bytes: the size of a file at most.
        grow_to: is told how many bytes of it there are, before they are written; what it raises
            ends the upload.

    Raises:
        ValidationError: the body is no form with a file.
        TooLargeError: the file is.
        UnavailableError: it cannot be written.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ValidationError(f"the body is no form; {_HOW}")
    upload = Upload(options[b"boundary"])
    # Unbuffered, or closing it would write in the event loop, perhaps to a full disk.
    opening = asyncio.ensure_future(storage.run(lambda: path.open("wb", buffering=0)))
    try:
        file = await asyncio.shield(opening)
        async for content in request.stream():
            upload.feed(content)
            if upload.num_bytes > max_bytes:
                raise TooLargeError(
                    f"the file has more than {max_bytes:,} bytes (--batch-max-file-bytes)"
                )
            grow_to(upload.num_bytes)
            if pending := upload.take_pending(_WRITE_BYTES):
                await storage.run(partial(_write, file, pending))
        upload.check_complete()
        await storage.run(partial(_write_rest, file, upload.take_pending(0)))
        yield upload
    finally:
        await asyncio.shield(asyncio.ensure_future(_discard(opening, path, storage)))


def _write(file: FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _write_rest(file: FileIO, content: bytes) -> None:
    _write(file, content)
    os.fsync(file.fileno())


async def _discard(opening: "asyncio.Future[FileIO]", path: Path, storage: Storage) -> None:
    """Closes and removes a file; it is opened also for a request that was cancelled meanwhile."""
    await asyncio.wait({opening})

    def remove() -> None:
        if opening.exception() is None:
            opening.result().close()
        path.unlink(missing_ok=True)

    await storage.run(remove)
