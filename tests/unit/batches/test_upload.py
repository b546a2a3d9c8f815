"""Upload: a form in pieces is the form, and what is none is a sentence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskdial.batches.upload import Upload
from maskdial.errors import ValidationError

BOUNDARY = b"x-y"


def form(content: bytes, name: str = "file", filename: str = "a b.jsonl") -> bytes:
    """A form as browsers and SDKs write it."""
    head = f'Content-Disposition: form-data; name="{name}"; filename="{filename}"'
    return (
        b'--x-y\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x-y\r\n'
        + head.encode()
        + b"\r\nContent-Type: application/octet-stream\r\n\r\n"
        + content
        + b"\r\n--x-y--\r\n"
    )


def read(body: bytes) -> Upload:
    """A whole form."""
    upload = Upload(BOUNDARY)
    upload.feed(body)
    upload.check_complete()
    return upload


@settings(max_examples=60)
@given(
    content=st.one_of(st.binary(max_size=200), st.text("\r\n-xy", max_size=60).map(str.encode)),
    size=st.integers(1, 40),
)
def test_pieces_of_any_size_make_the_same_form(content: bytes, size: int) -> None:
    if b"\r\n--x-y" in b"\r\n" + content:
        return
    upload, whole = Upload(BOUNDARY), form(content)
    taken = b""
    for start in range(0, len(whole), size):
        upload.feed(whole[start : start + size])
        taken += upload.take_pending(50)
    upload.check_complete()
    assert taken + upload.take_pending(0) == content
    assert upload.fields == {"purpose": "batch"}
    assert (upload.filename, upload.num_bytes) == ("a b.jsonl", len(content))


@settings(max_examples=60)
@given(cut=st.integers(0, 200), junk=st.binary(max_size=20))
def test_a_broken_form_is_refused(cut: int, junk: bytes) -> None:
    whole = form(b"some lines")
    with pytest.raises(ValidationError):
        read(whole[: min(cut, len(whole) - 8)] + junk)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (form(b"x", name="other"), "file: this field is required"),
        (form(b"x", name="n" * 2000), "a header in the form is too long"),
        (form(b"x").replace(b"--x-y--", form(b"y")), "file: is given twice"),
        (form(b"x").replace(b"batch", b"b" * 2000), "purpose: must have at most 1,024 bytes"),
        (form(b"x").replace(b'; filename="a b.jsonl"', b""), "file: must be a file"),
    ],
)
def test_other_forms_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        read(body)


def test_a_form_of_too_many_fields_is_refused_at_its_first_ones() -> None:
    """However it comes: the rest of a body of megabytes is not looked at."""
    field = b'--x-y\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    upload = Upload(BOUNDARY)
    upload.feed(field * 16)
    with pytest.raises(ValidationError, match="the form has more than 16 fields; send multipart"):
        upload.feed(field)
    with pytest.raises(ValidationError, match="more than 16 fields"):
        Upload(BOUNDARY).feed(field * 100_000)
