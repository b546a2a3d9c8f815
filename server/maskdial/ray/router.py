"""SessionRouter: a conversation stays on the replica whose prefix cache has it."""

import random

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):
    """Routes by the header ``x-session-id`` if a request has one, else to the less busy of two.

    Ray's own router spreads requests without a session evenly, however busy the replicas are.
    Prompts cannot be looked at here: Ray's proxy hands bodies to the replica as they arrive.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas to try, in ranks; of the replicas in one rank, Ray takes the least busy."""
        if pending_request is None or pending_request.metadata.session_id:
            ranks: list[list[RunningReplica]] = await super().choose_replicas(
                candidate_replicas, pending_request
            )
            return ranks
        pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
