"""Invokes of a trace that started in the same step, while they run: their barriers open, or are known never to.

Whoever is at a barrier goes on when all ranks agree on who is there; everything here follows from what they agree on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from executor.mediator import Mediator
from executor.requests import Requests
from executor.turns import Turns
from interpose.v1 import trace_pb2 as pb


class Companions:
    """The companions of one worker.

    Args:
        requests: the requests that are here.
        turns: lets blocks run.
    """

    def __init__(self, requests: Requests, turns: Turns) -> None:
        self._requests = requests
        self._turns = turns

    def apart(self, present: Iterable[str]) -> set[str]:
        """Return the traces of which invokes that were to start together start in this step, and not all of them.

        Args:
            present: the requests of the step, before it has begun.
        """
        starting = Counter(
            mediator.trace_id
            for mediator in (self._requests.live.get(request_id) for request_id in present)
            if mediator is not None and mediator.companions and mediator.step < 0
        )
        return {
            trace_id
            for trace_id, count in starting.items()
            if count + self._requests.rejected(trace_id) < self._requests.companions(trace_id)[0].companions
        }

    def pass_barriers(self, turned: Iterable[Mediator], present: Collection[str], place: int) -> list[Mediator]:
        """Let those go on who wait at a barrier that is complete, or that never will be.

        Args:
            turned: who had a turn, and may have come to a barrier or ended.
            present: the requests of the step.
            place: the model's place in it.

        Returns:
            Who had a turn now.
        """
        traces = {mediator.trace_id for mediator in turned if mediator.companions}
        went: dict[str, Mediator] = {}
        for trace_id in sorted(traces):
            scope = self._requests.scopes.get(trace_id)
            for _, barrier in sorted(scope.barriers.items()) if scope is not None else ():
                group = barrier.complete()
                if group:
                    barrier.check_group(group, present)
                else:
                    barrier.check_deserted(self._requests.companions(trace_id))
                for mediator in list(barrier.waiting) if barrier.broken else group:
                    self._turns.run(mediator, lambda m=mediator, b=barrier: m.pass_barrier(place, b))  # type: ignore[misc]
                    went[mediator.request_id] = mediator
        return list(went.values())


def no_room(companions: int) -> pb.Failure:
    """Why invokes fail that were to start together and did not."""
    return pb.Failure(
        code=pb.ERROR_CODE_INVALID_ARGUMENT,
        message=f"the {companions} invokes that wait for each other could not start in one step: the engine's KV cache has no "
        "room for all of them at once. Trace fewer or shorter prompts together, or give them a smaller max_tokens",
    )
