"""One trace inside a worker: its captured values exist once, for all its invokes.

All invokes of a trace bind the same objects, and share names (`executor.block.shared_names`). When the last expected invoke has
ended, the shared values and the captured containers that were changed are sent, and the scope goes.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import CodeType
from typing import Any

from executor.block.barrier import Barrier
from executor.block.binder import Binder
from executor.block.budget import Budget
from executor.block.rng import RandomState
from executor.block.shared_names import SharedNames
from executor.block.sources import Sources
from executor.block.uploads import Uploads
from executor.block.watchdog import padded
from executor.core.errors import BudgetExceeded
from executor.core.programs import Codes
from executor.model.tree import ModuleTree
from executor.saves.collect import Limits, collect
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb

# Events for the client, and the blobs that they name: the id and the bytes of each.
Sent = tuple[list[pb.Event], list[tuple[str, memoryview]]]


class Scope(ABC):
    """What a worker asks of one of its traces, wherever the trace's values are.

    Attributes:
        id: the trace's id.
        expected: how many invokes it has.
        session: the session actor's name, "" for none.
        arrival: how many traces came to this worker before.
        registry: the saved values that are here.
        recorded_bytes: the bytes in the caches of the trace's blocks.
        shared: the names that pass between the blocks that run here.
    """

    id: str
    expected: int
    session: str
    arrival: int
    registry: SaveRegistry
    recorded_bytes: int
    shared: SharedNames

    @property
    @abstractmethod
    def barriers(self) -> dict[int, Barrier]:
        """The trace's barriers, by number."""

    @abstractmethod
    def leave(self, names: MutableMapping[str, Any], lends: bool) -> None:
        """Drop the objects of an ended block's names.

        Args:
            names: the block's names.
            lends: whether other invokes may call functions of the block's.
        """

    @abstractmethod
    def let_go(self) -> BudgetExceeded | None:
        """Drop every object of the ended trace's blocks; return the error if that took too long."""

    @abstractmethod
    def saved(self, invoke: int, names: Mapping[str, Any], used: float, limits: Limits) -> Sent:
        """Encode what an invoke saved.

        Args:
            invoke: the invoke.
            names: its names and their values, of a block that runs here.
            used: seconds that its block has used in this step already.
            limits: bounds on what is saved.
        """

    @abstractmethod
    def given_back(self, limits: Limits) -> Sent:
        """Encode what the whole trace gives back.

        Args:
            limits: bounds on what is saved.
        """


class TraceScope(Scope):
    """The values of one trace, once per worker.

    Args:
        trace: the trace; its scope and shared names are decoded here, its invokes are not looked at.
        expected: how many invokes it has.
        session: the session actor's name, "" for none.
        tree: the model's modules.
        uploads: the trace's large values.
        budget: bounds what the user's classes do while they are made.
        codes: what the trace's texts compile to.
        arrival: how many traces came to this worker before; blocks of earlier traces are served first.
        blame: the id of the client's trace if that is another, as the budget takes it.

    Attributes:
        id, expected, session, arrival: as given.
        remote: whether the trace's tensors stay on the server.
        stacks: whether the trace's client can read stacks.
        of_session: whether the trace shares objects that its session keeps.
        blame: the id of the client's trace.
        registry: the saved values.
        saved_bytes: the bytes encoded so far.
        recorded_bytes: the bytes in the caches of the trace's blocks.
        streamed: captured containers, by index, whose changes the increments of an invoke carry.
        earlier: the tensors of earlier traces that the trace uses.
        shared: the names that pass between the blocks.
    """

    def __init__(
        self,
        trace: pb.Trace,
        expected: int,
        session: str,
        tree: ModuleTree,
        uploads: Uploads,
        budget: Budget,
        codes: Codes,
        arrival: int = 0,
        blame: bytes = b"",
    ) -> None:
        self.id = trace.id
        self.expected = expected
        self.remote = trace.remote
        self.stacks = trace.stacks
        self.session = session
        self.arrival = arrival
        self.blame = blame or padded(trace.id)
        self.registry = SaveRegistry()
        self.saved_bytes = 0
        self.recorded_bytes = 0
        self.streamed: set[int] = set()
        self._binder = Binder(trace, tree, uploads, budget, codes, self.blame)
        self.earlier = self._binder.earlier
        values = self._binder.values(trace.shared)
        for value in values.values():
            self.registry.mark(value, value)
        self.shared = SharedNames(trace, values)
        self.of_session = self.shared.of_session

    @property
    def sources(self) -> Sources:
        """The text of the trace's code."""
        return self._binder.sources

    @property
    def barriers(self) -> dict[int, Barrier]:
        """The trace's barriers, by number."""
        return self._binder.barriers

    @property
    def final(self) -> bool:
        """Whether the trace's code says that some of it runs when objects go."""
        return self.sources.final

    def program(self, program: pb.Program, after: Iterable[int]) -> tuple[CodeType, dict[str, Any]]:
        """Load an invoke's block and bind the names it reads.

        Args:
            program: the block.
            after: the ended invokes whose names it reads.

        Raises:
            Refusal: code of the user's failed while it was bound.
            WireError: this server's Python cannot compile the source, or a value is malformed or cannot be rebuilt here.
        """
        code = self._binder.code(program)
        names = self._binder.bind(binding for binding in program.reads if binding.name not in self.shared)
        for writer in sorted(after):
            names.update(self.shared.exported(writer))
        return code, names

    def random_state(self) -> RandomState | None:
        """Return the trace's random generators, or None if none of its code can use any."""
        return self._binder.random_state()

    def leave(self, names: MutableMapping[str, Any], lends: bool) -> None:
        """Drop the objects of an ended block's names; called within the block's budget.

        Args:
            names: the block's names.
            lends: whether other invokes may call functions of the block's, so that their names stay to the trace's end.
        """
        if lends and self.expected > 1:
            self._binder.keep(names)
        else:
            names.clear()
        if self.final and self.expected == 1:
            gc.collect()

    def let_go(self) -> BudgetExceeded | None:
        """Drop every object of the ended trace's blocks within their budget.

        Returns:
            The error that ended the drop if it took longer than the budget, else None.
        """
        return self._binder.let_go(self._drop)

    def _drop(self) -> None:
        self.registry.clear()
        self.shared.drop()
        self._binder.drop()
        if self.final:
            gc.collect()

    def captured(self) -> dict[int, int]:
        """Return the scope's indices of captured lists, dicts and sets, by the id of the object.

        None of a trace that shares what its session keeps: its copy is replaced when the whole trace has ended well.
        """
        if self.shared.of_session:
            return {}
        made = self._binder.made().items()
        return {id(value): index for index, value in made if isinstance(value, list | dict | set)}

    def changed(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return what the whole trace gives back.

        Returns:
            The shared names that changed, and, by index in the trace's scope, the captured lists, dicts and sets that are saved
            or hold saved values and have not been streamed.
        """
        containers = {}
        for index, value in self._binder.made().items():
            if index in self.streamed:
                continue
            if isinstance(value, list | dict | set) and self.registry.reaches(value):
                containers[index] = value
        return self.shared.changed(), containers

    def saved(self, invoke: int, names: Mapping[str, Any], used: float, limits: Limits) -> Sent:
        if not len(self.registry):
            return [], []
        return self._bounded(invoke, used, lambda put: collect(self, invoke, names, {}, limits, put))

    def given_back(self, limits: Limits) -> Sent:
        made = self._binder.made().values()
        # Objects may have code of their own, which runs within the budget alone; so their types are asked.
        if not self.shared and not any(issubclass(type(value), list | dict | set) for value in made):
            return [], []
        return self._bounded(-1, 0.0, lambda put: collect(self, -1, *self.changed(), limits, put))

    def _bounded(self, invoke: int, used: float, encode: Callable[[Callable[..., object]], list[pb.Event]]) -> Sent:
        """Encode what was saved within the block's budget: objects have code of their own.

        Args:
            invoke: the invoke, -1 for the shared values.
            used: seconds that the block has used in this step already.
            encode: given what takes blobs, returns the events.
        """
        blobs: list[tuple[str, memoryview]] = []
        try:
            events = self._binder.within(lambda: encode(lambda *blob: blobs.append(blob)), used)
        except BudgetExceeded as error:
            message = f"while what was saved was encoded, {error.message}"
            failed = pb.Failure(code=error.code, message=message, trace_id=self.id, invoke=invoke)
            return [pb.Event(failed=failed)], []
        return events, blobs if any(event.WhichOneof("kind") == "saves" for event in events) else []
