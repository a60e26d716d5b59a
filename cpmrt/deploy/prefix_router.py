"""Sends a request to the replica whose prefix cache has most of its prompt, as far as the load allows it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cpmrt.deploy.relay import RoutedRequest

MAX_PREFIXES = 100_000
_SHORTEST = 256
"""The least bytes of a prompt that is routed by its beginning: shorter ones are not worth a detour."""


class PrefixRouter(RequestRouter):
    """Prefers the replica that was last to be sent the longest known beginning of a prompt.

    Where that one has `imbalance` requests more than the least busy replica, or knows nothing of the prompt, the least
    busy one gets it. Prompts must be arguments of type RoutedRequest. Beginnings are told apart by hashes of 256, 512,
    1,024, ... bytes, of which the router keeps the 100,000 that were used last.
    """

    def initialize_state(self, imbalance: int = 4) -> None:
        """Take the `request_router_kwargs` of RequestRouterConfig."""
        self._imbalance = imbalance
        self._owners: OrderedDict[int, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in the order in which they shall be tried; the least busy of a group comes first."""
        owner = self._owner(pending_request, {replica.replica_id for replica in candidate_replicas})
        if owner is None:
            return [candidate_replicas]
        own = [replica for replica in candidate_replicas if replica.replica_id == owner]
        others = [replica for replica in candidate_replicas if replica.replica_id != owner]
        least = min((self._load(replica) for replica in others), default=0)
        if self._load(own[0]) >= least + self._imbalance:
            return [others, own]
        return [own, others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica computes a prompt."""
        for key in _keys(pending_request):
            self._owners[key] = replica_id
            self._owners.move_to_end(key)
        while len(self._owners) > MAX_PREFIXES:
            self._owners.popitem(last=False)

    def _owner(self, request: PendingRequest | None, candidates: set[ReplicaID]) -> ReplicaID | None:
        found = [self._owners.get(key) for key in reversed(_keys(request))]
        return next((replica_id for replica_id in found if replica_id in candidates), None)

    def _load(self, replica: RunningReplica) -> int:
        """Return the requests that a replica has, as far as they are known."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _keys(request: PendingRequest | None) -> list[int]:
    """Return hashes of the beginnings of a prompt, short ones first."""
    prompts = [value.prompt for value in request.args if isinstance(value, RoutedRequest)] if request else []
    keys, length = [], _SHORTEST
    while prompts and length <= len(prompts[0]):
        keys.append(hash(prompts[0][:length]))
        length *= 2
    return keys
