"""The values of one trace that its blocks read, made once, whichever block comes first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, MutableMapping
from types import CodeType
from typing import Any, TypeVar

from executor.block.barrier import Barrier
from executor.block.binding import Rebuilder, Watch, ordinary_tensors
from executor.block.budget import Budget
from executor.block.namespace import new_namespace
from executor.block.resolver import TraceResolver
from executor.block.rng import RandomState
from executor.block.sources import Sources
from executor.block.uploads import Uploads
from executor.core.errors import BudgetExceeded
from executor.core.programs import Codes, Unit
from executor.model.tree import ModuleTree
from executor.saves.reuse import EarlierTensors
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding
from interpose.wire.decoder import Decoder

T = TypeVar("T")


class Binder:
    """Makes the values of one trace.

    Args:
        trace: the trace; its scope is decoded when a value of it is first read.
        tree: the model's modules.
        uploads: the trace's large values.
        budget: bounds what the user's classes do while they are made.
        codes: what the trace's texts compile to.
        blame: the id of the client's trace, as the budget takes it.

    Attributes:
        sources: the text of the trace's code.
        barriers: the trace's barriers, by number.
        earlier: the tensors of earlier traces that the trace uses.
    """

    def __init__(
        self,
        trace: pb.Trace,
        tree: ModuleTree,
        uploads: Uploads,
        budget: Budget,
        codes: Codes,
        blame: bytes,
    ) -> None:
        self.sources = Sources()
        self.barriers: dict[int, Barrier] = {}
        self.earlier = EarlierTensors(uploads.get)
        self._id = trace.id
        self._budget = budget
        self._blame = blame
        self._codes = codes
        self._random: RandomState | None = None
        self._spaces: list[
            MutableMapping[str, Any]
        ] = []  # the names of functions and classes, and of blocks that lend some
        watch = Watch(budget, self.sources.lines, self.random_state, blame)
        rebuild = Rebuilder(self._new_space, self.sources.add, watch, codes)
        resolver = TraceResolver(tree, rebuild, watch, self.earlier, self.barriers, self.sources.name, uploads)
        self._decoder = Decoder(trace.scope, get_blob=uploads.get, resolver=resolver)

    def code(self, program: pb.Program) -> CodeType:
        """Return a block's compiled code."""
        self.sources.add(program.source, program.filename, program.first_line)
        return self._codes.of(Unit.of_block(program))

    def values(self, bindings: Iterable[Binding]) -> dict[str, Any]:
        """Return the values of names, by name."""
        bindings = list(bindings)
        if not bindings:
            return {}
        with ordinary_tensors():
            return {binding.name: self._decoder.decode(binding.value) for binding in bindings}

    def bind(self, bindings: Iterable[Binding]) -> dict[str, Any]:
        """Return the names of a block; the names that it reads are bound."""
        names = new_namespace()
        with ordinary_tensors():
            self._decoder.into(names, list(bindings))
        return names

    def made(self) -> dict[int, Any]:
        """Return the objects of the trace's scope that have been made, by their index there."""
        return self._decoder.made()

    def random_state(self) -> RandomState | None:
        """Return the trace's random generators, or None if none of its code can use any."""
        if self._random is None and self.sources.random:
            self._random = RandomState(int.from_bytes(hashlib.sha256(self._id.encode()).digest()[:6], "little"))
        return self._random

    def keep(self, names: MutableMapping[str, Any]) -> None:
        """Keep the names of an ended block until the trace's end."""
        self._spaces.append(names)

    def within(self, do: Callable[[], T], used: float) -> T:
        """Call code that may run code of the trace's objects, within their budget.

        Args:
            do: what to call. It may be broken off anywhere.
            used: seconds that the trace's code has used in this step already.

        Raises:
            BudgetExceeded: it took longer.
        """
        return self._budget.run(do, used, self._blame)[0]

    def let_go(self, drop: Callable[[], object]) -> BudgetExceeded | None:
        """Call a function that drops objects of the trace's blocks, within their budget.

        Returns:
            The error that ended the call if it took longer than the budget, else None.
        """
        try:
            self._budget.run(drop, 0.0, self._blame)
        except BudgetExceeded as error:
            return error
        return None

    def drop(self) -> None:
        """Drop every object; the caller bounds what their `__del__` does."""
        for space in self._spaces:
            space.clear()
        self._decoder.close()
        self._spaces.clear()

    def _new_space(self) -> dict[str, Any]:
        made = new_namespace()
        self._spaces.append(made)
        return made
