"""Fairness: the shares of an engine that clients have used, and the next client.

Clients that wait for the same engine get equal shares of its tokens for any mix of requests, by
virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): the
client that has been served least is next, and an idle client earns no credit.
"""

from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maskdial.engine.provenance import Provenance

if TYPE_CHECKING:
    from maskdial.engine.model import Model


@dataclass(slots=True, eq=False)
class ClientUsage:
    """What one request has used.

    ``client`` is its sender: the name of a key, or an address. ``key`` is the name of its key,
    empty if none is needed. ``tokens`` are those that engines have computed for it, prompts
    included; ``has_begun``: one has answered some of it, perhaps with what was kept.
    ``background``: an engine turns to it only while nothing else waits or runs there, it does not
    count towards the length of the queue, and it has as long as it takes. ``unlimited``: it comes
    from a caller in this process, who waits for a turn and is refused nothing that bounds what
    strangers have open; such a caller bounds that itself. ``provenance`` is of requests with a
    receipt.
    """

    client: str = ""
    key: str = ""
    tokens: int = 0
    has_begun: bool = False
    background: bool = False
    unlimited: bool = False
    provenance: Provenance | None = None

    @property
    def takes_room(self) -> bool:
        """Whether it waits in line with others, and is refused where a queue has no room.

        One that an engine has answered something of is not: no work that was begun is lost. Nor is
        one in the background, whose sender limits it.
        """
        return not (self.background or self.tokens or self.has_begun)

    def note(self, model: "Model", *asked: object) -> None:
        """Notes what a model was asked, if there is to be a receipt; see `Provenance.note`."""
        if self.provenance is not None:
            self.provenance.note(model, *asked)


usage_of_request: ContextVar[ClientUsage] = ContextVar("usage_of_request")
"""That of the request which is being handled."""


def current_usage() -> ClientUsage:
    """The usage of the request which is being handled; outside of requests, one of this process."""
    return usage_of_request.get(None) or ClientUsage(unlimited=True)


class Shares:
    """How much each client has been served. Not thread-safe.

    A client is counted from its `join` until `prune` finds that it is gone.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._last = 0.0
        self._latest = ""

    def join(self, client: str, waiting: Iterable[str]) -> None:
        """Notes that a client begins to wait.

        Args:
            client: its name.
            waiting: the clients that wait already.
        """
        lowest = min((self._served[other] for other in waiting), default=self._last)
        self._served[client] = max(self._served.get(client, 0.0), lowest)

    def first(self, clients: Iterable[str]) -> str:
        """The client whose turn it is: of those given, the one that has been served least.

        Of several, the first one whose turn it was not the last time: one that begins to wait is on
        a par with those that are served already.
        """
        client = min(clients, key=lambda each: (self._served[each], each == self._latest))
        self._latest, self._last = client, self._served[client]
        return client

    def charge(self, client: str, cost: float) -> None:
        """Notes that a client was served."""
        if client in self._served:
            self._served[client] += cost

    def prune(self, waiting: Collection[str]) -> None:
        """Forgets the clients that would be served next if they came back.

        Args:
            waiting: the clients that wait.
        """
        if not waiting:
            self._served.clear()
        self._served = {
            client: served
            for client, served in self._served.items()
            if client in waiting or served > self._last
        }
