"""ServerContext: what the routes of one server work with."""

from dataclasses import dataclass, field

from fastapi import Request

from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.config import Config
from maskdial.errors import ValidationError
from maskdial.http.ignored import IgnoredLog
from maskdial.http.keys import Keys
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.shared import SharedWork
from maskdial.http.tracing import Tracing
from maskdial.http.watchdog import Watchdog
from maskdial.metrics import Metrics
from maskdial.policy.guard import Policies
from maskdial.receipts.signing import SigningKey
from maskdial.registry.registry import Models
from maskdial.responses_store import ResponseStore


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One server's settings, models, metrics, phase, keys, watchdog, tracing, stores of responses
    and of prefixes, policies, the key of its receipts, and what it has told the log of ignored
    fields.
    """

    config: Config
    models: Models
    metrics: Metrics
    lifecycle: Lifecycle
    keys: Keys
    metrics_page: SharedWork[bytes]
    """All metrics in Prometheus' text format."""
    watchdog: Watchdog
    tracing: Tracing | None = None
    responses: ResponseStore | None = None
    disk: DiskStore | None = None
    policies: Policies | None = None
    receipt_key: SigningKey | None = None
    ignored: IgnoredLog = field(default_factory=IgnoredLog)

    @property
    def policy_names(self) -> list[str]:
        """The policies that a request may ask for."""
        return [] if self.policies is None else [each.name for each in self.policies.policies]

    def prefix_owner(self, key: str | None) -> str:
        """Whose prefixes those are of the key with a name; empty where all requests share them.

        Raises:
            ValidationError: there is no such key, or none is named and each has its own.
        """
        if not self.keys.names or self.config.prefix_cache_shared == "on":
            if key is not None:
                raise ValidationError("all requests share prefixes here; leave it out", field="key")
            return ""
        if key is None:
            raise ValidationError("each key has prefixes of its own here; name one", field="key")
        if key not in self.keys.names:
            raise ValidationError("there is no key of this name", field="key")
        return key


def server_context(request: Request) -> ServerContext:
    """The context of the server that a request came to."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context
