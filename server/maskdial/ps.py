"""The command `maskdial ps`: the models of a running server."""

import argparse
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from maskdial.errors import UnavailableError, printable

_CONNECT_SECONDS = 1.0


def is_reachable(url: str) -> bool:
    """Whether anything listens at the address of a URL."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `ps`."""
    parser.add_argument(
        "--server", dest="url", metavar="URL", help="its address (default: that of this machine)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="bearer token (default: $MASKDIAL_API_KEY)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a line for each model under each attention mask.

    Raises:
        UnavailableError: the server does not answer, or refuses.
    """
    from maskdial_client import Client, MaskdialClientError
    from maskdial_client.transport import DEFAULT_URL

    key = options.api_key or os.environ.get("MASKDIAL_API_KEY") or None
    try:
        with Client(options.url or DEFAULT_URL, api_key=key) as client:
            models = client.models()
    except (MaskdialClientError, ValueError) as error:
        raise UnavailableError(str(error)) from error
    rows = [("name", "state", "tasks", "precision", "runs on", "tokens")]
    rows += [
        (
            model.name,
            f"{model.state}: {model.reason}" if model.reason else model.state,
            ", ".join(task for task in model.tasks if task != "tokenize"),
            model.precision,
            model.provider or "-",
            f"{model.max_length:,}",
        )
        for model in models
    ]
    print(table(rows))
    return 0


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, of which the last one has figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *texts, figure in rows:
        cells = [printable(text).ljust(width) for text, width in zip(texts, widths, strict=False)]
        lines.append("  ".join([*cells, figure.rjust(widths[-1])]))
    return "\n".join(lines)
