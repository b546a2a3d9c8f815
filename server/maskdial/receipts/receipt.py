"""Receipt: what a reply was made of, as a JSON Web Signature (RFC 7515, EdDSA of RFC 8037).

Any library that reads these verifies it; without a key, it is an unsecured one (``"alg": "none"``).
"""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from maskdial.receipts.signing import PublicKey, SigningKey

HEADER = "x-maskdial-receipt"
"""Header of a request that asks for a receipt, and of the reply that has it."""

_KIND, _VERSION = "maskdial-receipt", 1
_MOST = 16_384  # characters


class ReceiptError(Exception):
    """A text is no receipt, or not one of this version."""


class Receipt(BaseModel):
    """What one reply was made of; hashes are SHA-256 in hexadecimal digits.

    Attributes:
        bundle: the manifest of the model (`maskdial.engine.provenance.Provenance.bundle`).
        numerics: its numerics version; empty where equal bits are not promised.
        server: the version of maskdial.
        request: path, body and seed (`maskdial.receipts.content.request_sha256`).
        asked: what the model was asked, with every default settled.
        seed: of the random numbers; None if there were none.
        reply: what lasts of the reply (`maskdial.receipts.content.reply_sha256`).
        time: when it was made, in seconds since 1970.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bundle: str
    numerics: str
    server: str
    request: str
    asked: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    reply: str
    time: Annotated[int, Field(ge=0)]

    def encode(self, key: SigningKey | None) -> str:
        """The receipt on one line of ASCII, signed if there is a key."""
        header = {"alg": "none"} if key is None else {"alg": "EdDSA", "kid": key.public.id}
        parts = [header | {"typ": _KIND}, {"v": _VERSION} | self.model_dump()]
        signed = ".".join(
            _base64(json.dumps(part, separators=(",", ":")).encode()) for part in parts
        )
        return f"{signed}." + ("" if key is None else _base64(key.sign(signed.encode())))


@dataclass(frozen=True, slots=True)
class ReadReceipt:
    """A receipt as it was read.

    Attributes:
        receipt: what it says.
        key_id: of the key that it claims to be signed with; empty for none.
    """

    receipt: Receipt
    key_id: str
    _signed: bytes
    _signature: bytes

    def is_signed_by(self, key: PublicKey) -> bool:
        """Whether the key has signed just this."""
        return bool(self.key_id) and key.verifies(self._signature, self._signed)


def read_receipt(text: str) -> ReadReceipt:
    """Reads a receipt, without a look at its signature.

    Raises:
        ReceiptError: it is none; with a sentence that says why.
    """
    parts = text.strip().split(".") if len(text) <= _MOST else []
    if len(parts) != 3:
        raise ReceiptError("the receipt is no three parts of base64 with dots between; it was cut")
    try:
        header, content = (json.loads(_bytes(part)) for part in parts[:2])
        signature = _bytes(parts[2])
    except (ValueError, RecursionError) as error:
        raise ReceiptError(
            "the receipt is not the base64 of JSON; it was cut or changed"
        ) from error
    if not isinstance(header, dict) or not isinstance(content, dict) or header.get("typ") != _KIND:
        raise ReceiptError("this is a signature of another kind, not a receipt of maskdial")
    version = content.pop("v", None)
    if version != _VERSION:
        raise ReceiptError(
            f"the receipt has version {version!r}, and this maskdial reads {_VERSION}; use the one "
            "that made it"
        )
    key_id = header.get("kid", "") if header.get("alg") == "EdDSA" else ""
    if header.get("alg") not in ("EdDSA", "none") or not isinstance(key_id, str):
        raise ReceiptError("the receipt is signed in a way that is not known: only EdDSA is")
    return ReadReceipt(
        _checked(content), key_id, text.strip().rpartition(".")[0].encode(), signature
    )


def _checked(content: dict[str, Any]) -> Receipt:
    """A receipt of the right fields.

    Raises:
        ReceiptError: they are others.
    """
    try:
        return Receipt.model_validate(content)
    except pydantic.ValidationError as error:
        raise ReceiptError(
            "the receipt has other fields than one of its version; it was changed"
        ) from error


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(text) from error
