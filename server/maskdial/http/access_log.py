"""The access log: a record for each request, with what was said only for ``json-texts``."""

import logging
from typing import Any

from starlette.types import Scope

from maskdial.http.exchange import Exchange
from maskdial.http.keys import address_of
from maskdial.logs import ACCESS

_log = logging.getLogger(ACCESS)
_MILLISECONDS = ("x-queue-time", "x-inference-time")
_TRUNCATED = "x-truncated-tokens"


def log_access(scope: Scope, exchange: Exchange, path: str | None, key: str | None) -> None:
    """Writes the record of a request that has ended.

    Args:
        scope: of the request.
        exchange: of the request.
        path: the template of its route; None: no route has its path.
        key: the name of its key.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    state = scope["state"]
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": scope["method"],
        "route": path,
        "model": state.get("model"),
        "client": address_of(scope),
        "key": key,
        "status": exchange.status or None,
        "outcome": exchange.outcome,
        "total_ms": round(exchange.elapsed() * 1e3, 3),
    }
    headers = exchange.reply_headers
    for name in _MILLISECONDS:
        if name in headers:
            field = name.removeprefix("x-").removesuffix("-time")
            fields[f"{field}_ms"] = float(headers[name])
    if "usage" in state:
        fields["compute_tokens"] = state["usage"].tokens
    if _TRUNCATED in headers:
        fields["truncated_tokens"] = int(headers[_TRUNCATED])
    if exchange.transcript is not None:
        fields |= exchange.transcript.fields()
    _log.info("request", extra={"access": fields})
