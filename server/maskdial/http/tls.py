"""Certificate: the server's certificate and key, read again when their files change."""

import logging
import ssl
from pathlib import Path

from maskdial.errors import ConfigError, io_reason

_log = logging.getLogger("maskdial")


class Certificate:
    """A certificate with its key.

    Args:
        certificate: PEM file with the certificate and those that lead to its issuer.
        key: PEM file with the private key; None: it is in the same file.
        protocol: which clients must ask for, as ALPN names it; None: any.

    Raises:
        ConfigError: they cannot be used.
    """

    def __init__(self, certificate: Path, key: Path | None, protocol: str | None = None) -> None:
        self.certificate = certificate
        self.key = key
        self._files = (certificate, key or certificate)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """Of the server; new connections use what it has then."""
        if protocol is not None:
            self.context.set_alpn_protocols([protocol])
        try:
            self._changed = self._last_change()
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificate {certificate} and its key cannot be used: {io_reason(error)}"
            ) from error

    def reload(self) -> None:
        """Has new connections use the files as they are now, if they have changed.

        Files that cannot be used, perhaps because only one of them is there yet, change nothing.
        """
        try:
            if not all(map(_may_be_read, self._files)):
                return
            changed = self._last_change()
            if changed == self._changed:
                return
            self._changed = changed
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ValueError) as error:
            _log.error("the certificate remains as it was: %s", error)
        else:
            _log.info("the certificate was read again")

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certificate, self.key, password=_no_password)

    def _last_change(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)


def _may_be_read(file: Path) -> bool:
    """Not from a pipe or device, for which the event loop would wait."""
    return file.is_file() or not file.exists()


def _no_password() -> str:
    raise ValueError("the key is encrypted; store it without a password")
