"""Keys of receipts: Ed25519 (RFC 8032), in the files that OpenSSL makes.

``openssl genpkey -algorithm ed25519 -out receipts.pem`` makes a key, and ``openssl pkey -in
receipts.pem -pubout -out receipts.pub`` the public one, with which anybody verifies.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from maskdial.errors import ConfigError, io_reason
from maskdial.extras import how_to_install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519


class PublicKey:
    """Verifies signatures.

    Attributes:
        id: the first 16 digits of its SHA-256, by which receipts name it.
    """

    def __init__(self, key: "ed25519.Ed25519PublicKey") -> None:
        self._key = key
        self.id = hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]

    def verifies(self, signature: bytes, content: bytes) -> bool:
        """Whether the key has signed this."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, content)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """Signs receipts.

    Attributes:
        public: verifies them.
    """

    def __init__(self, key: "ed25519.Ed25519PrivateKey") -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    def sign(self, content: bytes) -> bytes:
        """The 64 bytes of a signature."""
        signature: bytes = self._key.sign(content)
        return signature


def read_signing_key(file: Path) -> SigningKey:
    """A private key, of a PEM file without a passphrase.

    Raises:
        ConfigError: there is none, or cryptography is not installed.
    """
    return SigningKey(_private(file, _read(file)))


def read_public_key(file: Path) -> PublicKey:
    """A public key, of a PEM file, also of one with the private key.

    Raises:
        ConfigError: as `read_signing_key`.
    """
    content = _read(file)
    if b"PRIVATE KEY" in content:
        return SigningKey(_private(file, content)).public
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _no_key(file) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _no_key(file)
    return PublicKey(key)


def _private(file: Path, content: bytes) -> "ed25519.Ed25519PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # the second: a passphrase
        raise _no_key(file) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _no_key(file)
    return key


def _read(file: Path) -> bytes:
    try:
        import cryptography  # noqa: F401 (whether it is there)
    except ImportError as error:
        raise ConfigError(
            f"signatures need cryptography ({error}): {how_to_install('receipts')}"
        ) from error
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {io_reason(error)}") from error


def _no_key(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} has no Ed25519 key in PEM without a passphrase; "
        "'openssl genpkey -algorithm ed25519' makes one"
    )
