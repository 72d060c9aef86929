"""Contains the Ray Serve router for the replicas of a model, in the order of `replica_order`.

It runs in the calling process, possibly in its own thread.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from dragoman.ray.replica_order import ReplicaCall, ReplicaSelector


class PrefixRouter(RequestRouter):  # type: ignore[misc,unused-ignore]
    def initialize_state(self, **kwargs: Any) -> None:
        self._selector = ReplicaSelector()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        # One rank per replica: the next rank is used only if the earlier ones have no room.
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._selector.update(by_name)
        if pending_request is not None:
            # Wait before the next attempt if all replicas are full.
            pending_request.routing_context.should_backoff = True
        call = _replica_call(pending_request)
        order = self._selector.order(()) if call is None else self._selector.order(call.links, call.tried)
        if call is not None and order:
            call.assign(order[0], self._selector)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        call = _replica_call(pending_request)
        if call is not None:
            call.assign(replica_id.unique_id, self._selector)
            call.tried.append(replica_id.unique_id)


def _replica_call(pending_request: PendingRequest | None) -> ReplicaCall | None:
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, ReplicaCall) else None
