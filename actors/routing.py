"""Tells Serve's handles which engine replica to choose: the replica that the caller names.

Serve makes a router in every process that has a handle to the deployment, and tells it which replicas take requests. A
draining replica is no longer among them while it finishes its traces. Serve pickles the class by value, with this module's
variables. So state that is shared within a process lies in `actors.taking`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from actors.protocol import Target
from actors.taking import note


class SessionRouter(RequestRouter):
    """Sends a call to the replica that its handle's `session_id` names.

    All other calls go to the replica with the fewest requests. A call waits for a named replica that is full.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to choose from; Serve takes the one with the fewest requests."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.session_id
        named = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note the replicas that take requests now; Serve calls this."""
        deployment = self._deployment_id
        note(Target(deployment.app_name, deployment.name), [one.replica_id.unique_id for one in replicas])
        super().update_replicas(replicas)
