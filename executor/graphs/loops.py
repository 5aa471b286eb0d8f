"""Loops over steps that run in the tables, while their blocks stay parked.

A loop whose plan `lower` takes goes into the tables before its first step, which may be the prompt's. From then on the engine's
steps run its taps, in a captured graph or at hooks, and nothing of the block runs. When the request ends, or no plan is for
further steps, the loop comes back with all that it read, and its block goes on.

`joining` decides what runs for a loop, and `table_loop` says what a loop is.

Size: a loop's life in the tables, and the steps meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from executor.graphs.buffers import Outputs
from executor.graphs.extents import Full
from executor.graphs.joining import Joining
from executor.graphs.lower import Lowerer
from executor.graphs.operations import Refused
from executor.graphs.outside import Outside
from executor.graphs.programs import Programs
from executor.graphs.shares import Outgoing
from executor.graphs.table_loop import ComeBack, Left, PlannedSteps, TableLoop, Window
from executor.graphs.tables import Tables
from executor.graphs.taps import Taps
from executor.model.kv_guard import CacheGuard
from executor.plan.run import Member

_REASONS = 64  # reasons that are counted


class TableLoops:
    """The loops of one worker's requests that run in the tables.

    Size: what a step of the loops has to do with, and where the steps are.

    Args:
        taps: the model's sites.
        tables: of these sites.
        outputs: carries what taps read to the host.
        cache: looks after what the loops leave in the engine's cache.
        programs: run what no taps can; None: such loops stay out of the tables.

    Attributes:
        steps: how many steps of loops ran in the tables.
        refused: why loops did not go into the tables, and how often.
    """

    def __init__(
        self, taps: Taps, tables: Tables, outputs: Outputs, cache: CacheGuard, programs: Programs | None = None
    ) -> None:
        self._taps = taps
        self._cache = cache
        self._programs = programs
        self._tables = tables
        self._outputs = outputs
        lowerer = Lowerer({one.key: i for i, one in enumerate(taps.sites)})
        self._joining = Joining(lowerer, tables, cache, programs)
        self._free = list(range(tables.slots))[::-1]
        self._loops: dict[str, TableLoop] = {}
        self._resting: dict[str, TableLoop] = {}  # out of the tables; what they have read waits for the end
        self._keys: dict[int, str] = {}
        self._present: list[TableLoop] = []
        self._outgoing: tuple[Outgoing, Outgoing] | None = None
        self._padded = 0
        self._program_rows: list[int] = []  # the rows of the requests with a program
        self._outside: list[Outside] = []  # what runs after the pass of the step
        self._quiet = self._repeated = 0  # steps that may repeat the last one, and steps that have
        self._stale = False  # whether loops have come since the last step began
        self.steps = 0
        self.refused: dict[str, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._loops or key in self._resting

    def __bool__(self) -> bool:
        return bool(self._loops or self._resting)

    def enter(
        self,
        key: str,
        tenant: str,
        steps: Sequence[PlannedSteps],
        member: Member,
        since: int,
        back: ComeBack,
        rows: int = 1,
        alike: object = None,
        once: bool = False,
    ) -> str:
        """Put a loop into the tables; return why this cannot be, "" if it is there.

        Args:
            key: the request.
            tenant: whose share of the tables' memory it takes.
            steps: its steps, one after the other.
            member: what its block reads.
            since: the next step of the request.
            back: lets its block go on.
            rows: the rows of the request in the next step.
            alike: an object that stands for the tensors that its block reads, which nothing changes; None: none does.
            once: as of `TableLoop`.
        """
        if not self._free:
            return "more requests than the tables have places"
        slot = self._free[-1]
        try:
            made = self._joining.join(slot, tenant, steps, member, rows, alike)
        except (Refused, Full) as why:
            if len(self.refused) < _REASONS:
                self.refused[str(why)] = self.refused.get(str(why), 0) + 1
            return str(why)
        self._free.pop()
        self._settle()
        self._stale = True
        window = Window(since, steps[0].first, steps[-1].until)
        self._loops[key] = TableLoop(slot, made, window, since, once, back)
        self._keys[slot] = key
        return ""

    def why_not(self, tenant: str, steps: Sequence[PlannedSteps], member: Member, rows: int = 1) -> str:
        """Return why a loop could not go into the tables now, "" if it could.

        The loop goes in and out again.

        Args:
            tenant, steps, member, rows: as of `enter`.
        """
        self._settle()
        if not self._free:
            return "more requests than the tables have places"
        slot = self._free[-1]
        try:
            made = self._joining.join(slot, tenant, steps, member, rows)
        except (Refused, Full) as why:
            return str(why)
        self._joining.leave(slot, made)
        return ""

    def due(self, key: str) -> bool:
        """Return whether the next step of a request is no more a step of its loop in the tables."""
        self._settle()
        loop = self._loops.get(key)
        return loop is not None and loop.next >= loop.window.until

    def present(self, keys: Iterable[str]) -> list[str]:
        """Return the requests that have a loop in the tables."""
        loops = self._loops
        return [key for key in keys if key in loops] if loops else []

    def sites_of(self, keys: Iterable[str]) -> frozenset[int]:
        """Return the sites at which some requests have taps."""
        return frozenset().union(*{self._loops[key].joined.sites for key in keys})

    def programs_of(self, keys: Iterable[str]) -> frozenset[str]:
        """Return the programs of some requests that run in the pass of the next step."""
        loops = (self._loops[key] for key in keys)
        return frozenset(loop.joined.program for loop in loops if loop.runs_program and loop.joined.within)

    def program_of(self, key: str) -> str:
        """Return the key of the program of a request's loop, "" for a loop of taps alone."""
        return self._loops[key].joined.program

    def in_pass(self, keys: Iterable[str]) -> bool:
        """Return whether loops of some requests run in the pass of the next step.

        Other loops run after it alone.
        """
        loops = (self._loops[key] for key in keys)
        return any(loop.joined.within and loop.window.first <= loop.next for loop in loops)

    def changes(self, keys: Iterable[str]) -> list[str]:
        """Return the requests among some whose loops change the model's values."""
        return [key for key in keys if (self._loops.get(key) or self._resting[key]).writes]

    def begin_step(self, batch: Iterable[tuple[str, int]], riding: Collection[str], padded: int) -> None:
        """Write the tables of a step.

        Args:
            batch: every request of the step and the number of its rows, in the order of the rows.
            riding: the requests of the step with a loop in the tables. A loop that came after the step began is not among them.
            padded: the rows of the tensors, padding included.
        """
        nobody = self._tables.slots
        self._settle()
        self._stale = False
        self._padded = padded
        loops = {key: self._loops[key] for key in riding}
        self._present = list(loops.values())
        rows = [(loops[key].slot if key in loops else nobody, count) for key, count in batch]
        begins = itertools.accumulate((count for _, count in rows), initial=0)
        with_programs = {loop.slot: loop for loop in self._present if loop.runs_program and loop.joined.within}
        self._program_rows = [
            at + row
            for (slot, count), at in zip(rows, begins, strict=False)
            if slot in with_programs
            for row in with_programs[slot].program_rows(count)
        ]
        self._outgoing = self._tables.begin_step(rows, {loop.slot: loop.next for loop in self._present}, padded)
        self._outputs.before(self._outgoing)
        self._outside = self._opened(rows) if any(loop.joined.outside for loop in self._present) else []

    def _opened(self, rows: Sequence[tuple[int, int]]) -> list[Outside]:
        """Return what runs after the pass of a step.

        Args:
            rows: the slot and the number of rows of each request of the batch.
        """
        assert self._programs is not None
        at = {slot: i for i, (slot, _) in enumerate(rows)}
        found: dict[str, list[int]] = {}
        for loop in self._present:
            if loop.joined.outside and loop.window.first <= loop.next < loop.window.until:
                found.setdefault(loop.joined.program, []).append(loop.slot)
        return [
            Outside(self._programs.program_of(key), self._tables, self._outputs.ring, [at[one] for one in slots], slots)
            for key, slots in found.items()
        ]

    @property
    def outside(self) -> bool:
        """Whether loops of the step run at the logits or the samples."""
        return bool(self._outside)

    def visit(self, path: str, value: torch.Tensor) -> torch.Tensor:  # [requests of the batch, ...]
        """Run what loops do at the logits or the samples; return what the engine goes on with."""
        for one in self._outside:
            value = one.visit(path, value)
        return value

    def compile_kernels(self) -> None:
        """Compile the kernel of each site, on CUDA."""
        from executor.graphs.kernel import compile_all

        compile_all(self._tables, frozenset(i for i, site in enumerate(self._taps.sites) if len(site.at) == 2))

    def blank(self, rows: int) -> None:
        """Have the next pass run no tap and append nothing: a capture, whose rows are nobody's."""
        self._settle()
        self._tables.blank(rows)
        self._outputs.pause()

    def read_now(self) -> torch.Tensor:
        """Return a copy of what the loops of the step have left, bit by bit: [bytes]."""
        assert self._outgoing is not None
        return self._tables.read_now(self._outgoing)

    def ran(self, slots: Mapping[str, torch.Tensor], rows: int) -> None:
        """Look after the cache and append what was read, when the model has run; can be captured.

        Args:
            slots: where each row's keys and values went, [rows or more] by the layer's name.
            rows: of the step, padding included.
        """
        self._cache.launch(slots, self._tables.owners[:rows], self._tables.flags)
        self._outputs.ring.append()

    def ran_apart(self) -> None:
        """Append for a step of the engine's own, in whose pass no loop runs."""
        self._outputs.ring.append()

    def again(self) -> None:
        """Have the next pass append where the step that was given to the device last did."""
        self._settle()
        self._outputs.again()

    @contextmanager
    def running(self, keys: Collection[str]) -> Iterator[None]:
        """Return a context for the model's pass with the loops of some requests, in an eager step."""
        # A long prompt beside the loops would make programs for all rows expensive.
        only = torch.tensor(self._program_rows, dtype=torch.int64).to(self._tables.output.device, non_blocking=True)
        with self.hooked(self.sites_of(keys), self.programs_of(keys), only):
            yield
        self._cache.launch_here(self._tables.owners[: self._padded], self._tables.flags)
        self._outputs.ring.append()

    @contextmanager
    def hooked(
        self, sites: Iterable[int], programs: Collection[str], only: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Return a context in which the model's modules run the taps of some sites, and programs.

        Args:
            sites, programs: their numbers and keys.
            only: int64 [some rows], the rows that programs run for; None: for all rows, as in a graph.
        """
        with ExitStack() as stack:
            stack.enter_context(self._taps.hooked(sites))
            if programs and self._programs is not None:
                stack.enter_context(self._programs.hooked(programs, only))
            yield

    def unchanged(self, programs: Collection[str]) -> AbstractContextManager[None]:
        """Return a context for a pass that does not count: programs carry on from before it."""
        return self._programs.unchanged(programs) if programs and self._programs is not None else nullcontext()

    def end_step(self) -> None:
        """Note that the step was given to the device."""
        assert self._outgoing is not None
        self._outputs.after(self._outgoing, self._keys)
        for loop in self._present:
            loop.next += 1
        if self._stale:  # a loop has come since the step began
            return
        edges = (min(loop.window.until, self._tables.edge(loop.slot)) - loop.next for loop in self._present)
        self._quiet = min(min(edges, default=0), self._outputs.room(self._outgoing))

    def rest(self) -> list[str]:
        """Take the loops of the step out of the tables whose blocks ask for nothing in a later step.

        What they have read is taken by `leave`, at the end of their requests. Called when the step has ended.

        Returns:
            Their requests.
        """
        keys = [self._keys[one.slot] for one in self._present if one.once and one.next >= one.window.until]
        gone = {key: self._out(key) for key in keys}
        self._resting |= gone
        self._watch(gone)
        return keys

    def _watch(self, gone: Mapping[str, TableLoop]) -> None:
        """Have it looked at once whether loops that have gone left numbers that are not finite."""
        slots = {key: loop.slot for key, loop in gone.items() if loop.writes}
        if slots:
            flags = self._tables.flags.index_select(0, self._tables.put([list(slots.values())])[0])
            self._cache.watch(flags, [(key,) for key in slots])

    @property
    def repeats(self) -> bool:
        """Whether the next step needs nothing but `repeat` if its batch is that of the last step."""
        return self._quiet > 0

    def repeat(self) -> None:
        """Note that a step like the last one was given to the device."""
        self._quiet -= 1
        self._repeated += 1

    def _settle(self) -> None:
        """Count the repeated steps; the next step is no repetition."""
        if self._repeated:
            self._outputs.repeat(self._repeated)
            for loop in self._present:
                loop.next += self._repeated
        self._quiet = self._repeated = 0

    def loop_of(self, key: str) -> TableLoop:
        """Return the loop of a request."""
        return self._loops[key]

    def ran_of(self, key: str, steps: int) -> int:
        """Return how many steps of a request's loop have run, if the request had so many steps."""
        self._settle()
        loop = self._loops[key]
        return min(loop.next, steps, loop.window.until) - loop.window.first

    def flagged(self, keys: Iterable[str]) -> set[str]:
        """Return the requests among some that left numbers in the cache that are not finite.

        The call waits for the device.
        """
        writing = [key for key in keys if self._loops[key].writes]
        if not writing:
            return set()
        flags = self._tables.flags.tolist()
        return {key for key in writing if flags[self._loops[key].slot]}

    def leave(self, key: str, steps: int | None = None, watched: bool = True) -> Left:
        """Take a loop out of the tables; wait for what it has read.

        Args:
            key: the request.
            steps: how many steps the request had; more may have run. None: as many as ran.
            watched: whether the cache's guard is to say what the loop left in the cache; `flagged` has said it otherwise.
        """
        self._settle()  # what is collected counts the steps
        loop = self._resting.pop(key, None)
        if loop is None:
            loop = self._out(key)
            if watched:
                self._watch({key: loop})
            stop = loop.next if steps is None else min(loop.next, steps)
        else:
            stop = loop.next
        window = loop.window
        ran = max(0, min(stop, window.until) - window.first)
        self.steps += ran
        return Left(loop, max(0, stop - window.since), ran, self._outputs.collect(key))

    def close(self) -> None:
        """End what runs beside the engine."""
        self._outputs.close()

    def drop(self, key: str) -> None:
        """Forget the loop of a request, if it has one."""
        if key in self._loops:
            self._out(key)
            self._outputs.drop(key)
        elif self._resting.pop(key, None) is not None:
            self._outputs.drop(key)

    def _out(self, key: str) -> TableLoop:
        self._settle()
        loop = self._loops.pop(key)
        if loop in self._present:
            self._present.remove(loop)
        del self._keys[loop.slot]
        self._joining.leave(loop.slot, loop.joined)
        self._free.append(loop.slot)
        return loop
