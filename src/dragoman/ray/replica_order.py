"""Chooses the replica for a request, without Ray.

Rules
1. The replica with the longest known prefix of the prompt comes first, unless it is much busier than the least busy one
   (as for the servers of `upstream`, see its `pool`).
2. The others follow, least busy first. A replica without room leaves the request to the next.
3. Replicas that were tried already come last.
4. Calls may begin and end in different threads.
5. A call is counted for its replica from the moment of the choice, so that concurrent choices see each other.
"""

import threading
from collections.abc import Callable, Collection, Sequence

from dragoman.engines.upstream.pool import PoolMember, ServerPool


class ReplicaCall:
    """One call to a replica. Only `body` is pickled; the rest stays in the calling process, in any thread."""

    def __init__(self, body: bytes, links: Sequence[bytes] = (), tried: Sequence[str] = ()) -> None:
        self.body = body
        self.links = links
        """Prefix links of the prompt (see `pool`)."""
        self.tried = list(tried)
        """Replicas that have been tried."""
        self._replica: str | None = None
        self._end_count: Callable[[], None] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["ReplicaCall"], tuple[bytes]]:
        return ReplicaCall, (self.body,)

    def retry(self) -> "ReplicaCall":
        return ReplicaCall(self.body, self.links, self.tried)

    def assign(self, replica: str, selector: "ReplicaSelector") -> None:
        """Count the call for a replica."""
        with self._lock:
            if self._is_closed or self._replica == replica:
                return
            self._end_assignment()
            self._replica, self._end_count = replica, selector.begin_call(replica, self.links)

    def close(self) -> None:
        """End the count: the call was answered or has failed."""
        with self._lock:
            self._is_closed = True
            self._end_assignment()

    def _end_assignment(self) -> None:
        end_count, self._end_count, self._replica = self._end_count, None, None
        if end_count is not None:
            end_count()


class ReplicaSelector:
    def __init__(self) -> None:
        self._members: dict[str, PoolMember] = {}
        self._pool: ServerPool[PoolMember] = ServerPool(())
        self._lock = threading.Lock()

    def update(self, replicas: Collection[str]) -> None:
        """Set the replicas that exist now."""
        with self._lock:
            for replica in [known for known in self._members if known not in replicas]:
                self._pool.members.remove(self._members.pop(replica))
            for replica in replicas:
                if replica not in self._members:
                    self._members[replica] = PoolMember()
                    self._pool.add(self._members[replica])

    def order(self, links: Sequence[bytes], tried: Collection[str] = ()) -> list[str]:
        """Return all replicas in the order of preference."""
        with self._lock:
            members = self._members
            first = self._pool.find_preferred(links, {members[replica] for replica in tried if replica in members})
            return sorted(members, key=lambda name: (members[name] is not first, name in tried, members[name].load))

    def begin_call(self, replica: str, links: Sequence[bytes]) -> Callable[[], None]:
        """Count a call to a replica; the caller calls the result once, at the end of the call."""
        with self._lock:
            member = self._members.get(replica)
            # A replica that has gone has no count.
            if member is not None:
                self._pool.take(member, links)
        return lambda: self._end(member)

    def _end(self, member: PoolMember | None) -> None:
        if member is not None:
            with self._lock:
                self._pool.ended(member)
