"""How Serve's handles choose an engine replica: the one that the caller names, while there is one of that name.

Serve makes a router in every process that has a handle to the deployment and keeps it informed of the replicas that take
requests: one that is being removed is no longer among them while it finishes what it runs. The class gets there pickled by
value, with this module's variables, so that what others of the process are to see lies in `actors.taking`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from actors.protocol import Target
from actors.taking import note


class SessionRouter(RequestRouter):
    """Sends a request to the replica that its handle's `session_id` names; all others to the one with the fewest requests.

    A replica that is named and has as many requests as it may have is waited for.
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
        """Called by Serve with the replicas that take requests now."""
        deployment = self._deployment_id
        note(Target(deployment.app_name, deployment.name), [one.replica_id.unique_id for one in replicas])
        super().update_replicas(replicas)
