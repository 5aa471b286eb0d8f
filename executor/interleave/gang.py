"""Invokes of a trace that started in the same step, while they run: their barriers open, or are known never to.

Whoever is at a barrier goes on when all ranks agree on who is there; everything here follows from what they agree on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from executor.block.mediator import Mediator
from executor.core.request import Span
from executor.interleave.admission import Requests
from executor.interleave.turns import Turns
from interpose.v1 import trace_pb2 as pb

OUT_OF_STEP = "the engine did not run the invokes that an invoke without a prompt sees in the same steps"


class Companions:
    """The companions of one worker.

    Args:
        requests: the requests that are here.
        turns: lets blocks run.
    """

    def __init__(self, requests: Requests, turns: Turns) -> None:
        self._requests = requests
        self._turns = turns
        self._seen: dict[
            str, set[str]
        ] = {}  # by the key of a block without a prompt: the requests it saw in its last step

    def keep_step(self, mediator: Mediator, present: Collection[str]) -> bool:
        """Whether what a block without a prompt sees is in one step of its generation: requests leave it, none joins it."""
        members = [
            one for one in self._requests.companions(mediator.identity.trace_id) if one.identity.request_id in present
        ]
        now = {one.identity.request_id for one in members}
        before = self._seen.get(mediator.identity.request_id, now)
        self._seen = {key: seen for key, seen in self._seen.items() if key in self._requests.live}
        self._seen[mediator.identity.request_id] = now
        steps = {one.state.progress.step for one in members if one.identity.request_id in self._requests.live}
        return now <= before and steps <= {mediator.state.progress.step}

    def apart(self, present: Iterable[str]) -> set[str]:
        """Return the traces of which invokes that were to start together start in this step, and not all of them.

        Args:
            present: the requests of the step, before it has begun.
        """
        starting = Counter(
            mediator.identity.trace_id
            for mediator in (self._requests.live.get(request_id) for request_id in present)
            if mediator is not None and mediator.identity.gang and mediator.state.progress.step < 0
        )
        return {
            trace_id
            for trace_id, count in starting.items()
            if count + self._requests.rejected(trace_id) < self._requests.companions(trace_id)[0].identity.gang
        }

    def seen(self, spans: Mapping[str, Span]) -> list[tuple[Mediator, tuple[Span, ...]]]:
        """Return the blocks without a prompt that are in a step, each with the places of the requests that it sees.

        Args:
            spans: the step's requests.
        """
        found = []
        for trace_id, wholes in self._requests.wholes.items():
            members = [one for one in self._requests.companions(trace_id) if one.identity.request_id in spans]
            places = tuple(spans[one.identity.request_id] for one in members)
            live = [one for one in wholes if one.identity.request_id in self._requests.live]
            found += [(one, places) for one in live if places]
        return found

    def pass_barriers(self, turned: Iterable[Mediator], present: Collection[str], place: int) -> list[Mediator]:
        """Let those go on who wait at a barrier that is complete, or that never will be.

        Args:
            turned: who had a turn, and may have come to a barrier or ended.
            present: the requests of the step.
            place: the model's place in it.

        Returns:
            Who had a turn now.
        """
        traces = {mediator.identity.trace_id for mediator in turned if mediator.identity.gang}
        went: dict[str, Mediator] = {}
        for trace_id in sorted(traces):
            scope = self._requests.scopes.get(trace_id)
            for _, barrier in sorted(scope.barriers.items()) if scope is not None else ():
                group = barrier.complete()
                if group:
                    barrier.check_group(group, present)
                else:
                    barrier.check_deserted([one.state for one in self._requests.companions(trace_id)])
                for waiting in list(barrier.waiting) if barrier.broken else group:
                    mediator = self._requests.mediators[waiting.identity.request_id]
                    self._turns.run(mediator, lambda m=mediator, b=barrier: m.pass_barrier(place, b))  # type: ignore[misc]
                    went[mediator.identity.request_id] = mediator
        return list(went.values())


def no_room(companions: int) -> pb.Failure:
    """Why invokes fail that were to start together and did not."""
    return pb.Failure(
        code=pb.ERROR_CODE_INVALID_ARGUMENT,
        message=f"the {companions} invokes that run together could not start in one step: the engine's KV cache has no "
        "room for all of them at once. Trace fewer or shorter prompts together, or give them a smaller max_tokens",
    )
