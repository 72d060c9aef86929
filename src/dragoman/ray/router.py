"""Ray Serve's router for the replicas of a model: in the order of `choosing`.

It lives in the process of whoever asks, and may do so in a thread of its own.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from dragoman.ray.replica_call import Asked
from dragoman.ray.replica_order import Choosing


class PrefixRouter(RequestRouter):  # type: ignore[misc,unused-ignore]
    def initialize_state(self, **given: Any) -> None:
        self._choosing = Choosing()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        # Each in a rank of its own: the next is looked at only where there is no room in those before it.
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._choosing.update(by_name)
        if pending_request is not None:
            # Where nobody has room, it is worth waiting a moment before the next look.
            pending_request.routing_context.should_backoff = True
        return [[by_name[name]] for name in self._order(_asked(pending_request))]

    def _order(self, asked: Asked | None) -> list[str]:
        if asked is None:
            return self._choosing.order(())
        order = self._choosing.order(asked.links, asked.tried)
        if order:
            self._send(asked, order[0])
        return order

    def _send(self, asked: Asked, replica: str) -> None:
        asked.heads_for(replica, lambda: self._choosing.take(replica, asked.links))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        asked = _asked(pending_request)
        if asked is not None:
            self._send(asked, replica_id.unique_id)
            asked.tried.append(replica_id.unique_id)


def _asked(pending_request: PendingRequest | None) -> Asked | None:
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, Asked) else None
