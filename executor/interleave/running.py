"""Runs the blocks of a worker, one turn at a time, and says how each turn ended.

A block runs with its trace's shared names as they are now. At a location of the model a turn ends with the block's changes in
the value that the model goes on with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from executor.block.mediator import Mediator
from executor.block.scope import Scope
from executor.block.tally import resolve
from executor.core.errors import Refusal
from executor.core.location import Location
from executor.core.request import Span
from executor.interleave.context import Host
from executor.interleave.machine.events import AtBarrier, Changed, Failure, Settled, TurnEnded, TurnsEnded
from executor.interleave.machine.instructions import (
    Apply,
    FindChanged,
    Instruction,
    Miss,
    Overrun,
    Pass,
    Resume,
    ResumeAll,
    Serve,
    ServeAll,
    Settle,
    Start,
    Throw,
)
from executor.interleave.recorders import Recorders
from executor.interleave.serving import Serving, Visit, WideOf
from executor.model.batched import Member, row_bytes
from executor.model.rows import BatchRows, ManyRows, Rows
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb

_NOTHING = (None, None, None, None)
_MOST_BYTES = 64 << 20  # of private copies that blocks are given together


class Running:
    """Runs blocks.

    Args:
        mediators: the blocks, by key.
        scopes: the scopes of the traces that are here, by trace id.
        recorders: what blocks have recorded in the step.
        host: the worker.
        muted: a context in which no hook of the step's sees a module that is called.
        wide, closed: as of `Serving`.

    Attributes:
        spans: the rows of each block in the step, by key.
        visit: the location where the model is, if a block waits for that location or has it recorded; else None.
        serving: makes the values that blocks are served.
        in_step: whether a step runs, so that what a block wants recorded is looked for.
    """

    def __init__(
        self,
        mediators: Mapping[str, Mediator],
        scopes: Mapping[str, Scope],
        recorders: Recorders,
        host: Host,
        muted: Callable[[], AbstractContextManager[None]],
        wide: WideOf,
        closed: Callable[[Iterable[str]], bool],
    ) -> None:
        self.spans: dict[str, tuple[Span, ...]] = {}
        self.visit: Visit | None = None
        self.in_step = False
        self._mediators = mediators
        self._scopes = scopes
        self._recorders = recorders
        self.serving = Serving(host, wide, closed)
        self._applier = host.applier
        self._budget = host.budget
        self._stages = host.stages
        self._muted = muted
        self._last = TurnEnded()
        self._rows: dict[tuple[tuple[str, ...], Rows], BatchRows] = {}
        self._rows_in = self.spans  # the step's rows that these are of

    def handlers(self) -> dict[type[Instruction], Callable[[Any], Any]]:
        """Return what carries out each instruction, by its type."""
        return {
            Start: self._start,
            Resume: lambda do: self._turn(do, lambda mediator: mediator.resume(True)),
            ResumeAll: self._resume_all,
            Serve: self._serve,
            ServeAll: self._serve_all,
            Apply: self._apply,
            Overrun: lambda do: self._turn(do, lambda mediator: mediator.throw(self._budget.exceeded())),
            Throw: lambda do: self._turn(do, lambda mediator: mediator.throw(refusal(do.error))),
            Miss: self._miss,
            Pass: self._pass,
            Settle: self._settle,
            FindChanged: lambda do: Changed(frozenset(self.changed(do.blocks))),
        }

    def turn(self, mediator: Mediator, turn: Callable[[], None], settles: bool = True) -> TurnEnded:
        """Let a block run once; return how its turn ended.

        Args:
            mediator: the block.
            turn: lets the block run.
            settles: whether the changes of a block that has left a location are written back now.
        """
        scope = self._scopes[mediator.identity.trace_id]
        gang = mediator.identity.gang > 0
        if scope.shared or gang:
            # What a name was bound to before may go, with code of its own.
            mediator.let_go(lambda: scope.shared.give(mediator.names, gang))
            turn()
            mediator.let_go(lambda: scope.shared.take(mediator.names, gang))
        else:
            turn()
        return self._ended(mediator, settles)

    def _ended(self, mediator: Mediator, settles: bool) -> TurnEnded:
        misfit = None
        if settles and self.visit is not None and mediator.state.progress.served is not None:
            misfit = self.serving.settle(mediator, self.visit)
        return self._how(mediator, misfit)

    def _how(self, mediator: Mediator, misfit: Failure | None) -> TurnEnded:
        """Return how a block's turn ended."""
        state = mediator.state
        record, waits, ended = state.record, state.waits, state.ending.ended
        if record.recorders and self.in_step:
            self._recorders.enlist(mediator)
        call, barrier, owed = waits.call, waits.barrier, record.skips.owed
        unusual: tuple[object, ...] = (ended, call, barrier, misfit)
        if unusual == _NOTHING and not (owed or record.recorders or waits.away):
            return self._waiting(waits.location)
        return TurnEnded(
            waits=waits.location,
            ended=ended,
            barrier=AtBarrier(barrier.number, barrier.count) if barrier is not None and ended is None else None,
            calls=call if ended is None else None,
            overdue=call is not None and state.progress.used > self._budget.step_seconds,
            owes=bool(owed),
            records=bool(record.recorders),
            misfit=misfit,
            away=waits.away,
        )

    def _waiting(self, at: Location | None) -> TurnEnded:
        """Return the end of a turn of a block that waits for a location.

        It is the last such end, if the block before waits for the same.
        """
        last = self._last
        if at is None or at != last.waits or at.shown != last.waits.shown:
            last = self._last = TurnEnded(at)
        return last

    def rows(self, mediator: Mediator, visit: Visit) -> tuple[Rows | ManyRows, int]:
        """Return a block's rows at a location, and the index of its (first) request in the batch."""
        spans = self.spans[mediator.identity.request_id]
        if mediator.identity.joint:
            return ManyRows(tuple(map(visit.rows_of, spans))), spans[0].index
        return visit.rows_of(spans[0]), spans[0].index

    def changed(self, keys: Iterable[str]) -> list[str]:
        """Return the blocks that have changed anything in the model's pass, after at most one wait."""
        states = {key: self._mediators[key].state for key in keys}
        resolve(state.record.tally for state in states.values())
        return [key for key, state in states.items() if state.changed]

    def leave(self, mediator: Mediator) -> None:
        """A block was failed: take it away from the location where the model is."""
        if self.visit is not None:
            self.serving.settle(mediator, self.visit)

    # What carries out the instructions.

    def _turn(self, do: Any, turn: Callable[[Mediator], None]) -> TurnEnded:
        mediator = self._mediators[do.block]
        return self.turn(mediator, lambda: turn(mediator))

    def _start(self, do: Start) -> TurnEnded:
        mediator = self._mediators[do.block]
        if mediator.identity.joint:
            mediator.state.progress.prompt_tokens = do.tokens
        return self.turn(mediator, mediator.start)

    def _serve(self, do: Serve) -> TurnEnded:
        mediator, visit = self._mediators[do.block], self.visit
        assert visit is not None
        given = self._given(mediator, visit)
        if isinstance(given, Refusal):
            return self.turn(mediator, lambda: mediator.throw(given))
        return self.turn(mediator, lambda: mediator.serve(*given, visit.position))

    def _given(self, mediator: Mediator, visit: Visit) -> tuple[Served, Location] | Refusal:
        """Return what a block is served and where, or why it is not served."""
        at = mediator.state.waits.location
        assert at is not None
        location = str(at)
        try:
            return self.serving.give(mediator, visit, location, *self.rows(mediator, visit)), at
        except Refusal as error:
            return error
        except Exception as error:
            message = f"the value at {location} could not be given: {error}"
            return Refusal(pb.ERROR_CODE_ENGINE, message, location=location)

    def _begin_serve(self, mediator: Mediator, visit: Visit) -> Callable[[], None]:
        """Begin to serve a block with a process of its own; return what ends its turn."""
        given = self._given(mediator, visit)
        if isinstance(given, Refusal):
            return lambda: mediator.throw(given)
        return mediator.begin_serve(*given, visit.position)

    def _resume_all(self, do: ResumeAll) -> TurnsEnded:
        mediators = [self._mediators[key] for key in do.blocks]
        ends = [mediator.begin_resume(True) for mediator in mediators if mediator.own_process]
        self._budget.begin_round()
        try:
            for mediator in mediators:
                if not mediator.own_process:
                    mediator.resume(True)
        finally:
            self._budget.end_round()
        for end in ends:
            end()
        return TurnsEnded([self._how(mediator, None) for mediator in mediators])

    def _serve_all(self, do: ServeAll) -> TurnsEnded:
        """Serve blocks that have nothing in common.

        Blocks with processes of their own run while the others have their turns.
        """
        visit = self.visit
        assert visit is not None
        apart = [mediator for key in do.blocks if (mediator := self._mediators[key]).own_process]
        if not apart:
            return self._serve_here(do, visit)
        ends = [self._begin_serve(mediator, visit) for mediator in apart]
        here = tuple([key for key in do.blocks if not self._mediators[key].own_process])
        turns = dict(zip(here, self._serve_here(ServeAll(here), visit).turns, strict=True)) if here else {}
        for end, mediator in zip(ends, apart, strict=True):
            turns[mediator.identity.request_id] = self.turn(mediator, end)
        return TurnsEnded([turns[key] for key in do.blocks])

    def _serve_here(self, do: ServeAll, visit: Visit) -> TurnsEnded:
        size, rows_of_all = row_bytes(visit.value), self._rows_of(do.blocks, visit)
        if (rows_of_all.stop - rows_of_all.start) * size <= _MOST_BYTES:
            return TurnsEnded(self._serve_some(do.blocks, rows_of_all, visit))
        parts, turns = rows_of_all.parts, list[TurnEnded]()
        first = 0
        while first < len(parts):
            end, rows = first + 1, parts[first].stop - parts[first].start
            while end < len(parts) and (rows + parts[end].stop - parts[end].start) * size <= _MOST_BYTES:
                rows += parts[end].stop - parts[end].start
                end += 1
            turns += self._serve_some(do.blocks[first:end], BatchRows.of(parts[first:end]), visit)
            first = end
        return TurnsEnded(turns)

    def _serve_some(self, keys: Sequence[str], rows: BatchRows, visit: Visit) -> list[TurnEnded]:
        """Serve some blocks that have nothing in common."""
        value = self.serving.shared(visit, rows, keys) if len(keys) > 1 else None
        if value is None:
            return [self._serve(Serve(key)) for key in keys]
        turned: list[tuple[Mediator, Member, Location]] = []
        for i, key in enumerate(keys):
            mediator = self._mediators[key]
            at = mediator.state.waits.location
            assert at is not None
            turned.append((mediator, Member(value, i, at), at))
        self._budget.begin_round()
        try:
            for mediator, member, at in turned:
                mediator.serve(member, at, visit.position)
        finally:
            self._budget.end_round()
        misfits = self.serving.settle_all(turned, visit)
        return [self._how(mediator, misfit) for (mediator, _, _), misfit in zip(turned, misfits, strict=True)]

    def _rows_of(self, keys: tuple[str, ...], visit: Visit) -> BatchRows:
        """Return the rows of some blocks at a location; the same blocks often meet again in a step."""
        if self._rows_in is not self.spans:
            self._rows_in = self.spans
            self._rows.clear()
        # Locations with one row for each request, and with one for each token, differ in the number of all rows.
        known = (keys, visit.rows_of(self.spans[keys[0]][0]))
        rows = self._rows.get(known)
        if rows is None:
            rows = self._rows[known] = BatchRows.of([visit.rows_of(self.spans[key][0]) for key in keys])
        return rows

    def _apply(self, do: Apply) -> TurnEnded:
        mediator = self._mediators[do.block]
        call = mediator.state.waits.call
        assert call is not None
        started = time.monotonic()
        try:
            with self._muted():
                result = self._stages.apply(call.node, lambda: self._applier.run(call))
        except Exception as error:
            raised = error
            return self.turn(mediator, lambda: mediator.throw(raised))
        mediator.state.progress.used += time.monotonic() - started
        return self.turn(mediator, lambda: mediator.resume(result))

    def _miss(self, do: Miss) -> TurnEnded:
        mediator = self._mediators[do.block]
        mediator.pass_step()  # a block that catches the error is not given the next step's values for this one's
        return self.turn(mediator, lambda: mediator.throw(refusal(do.error)))

    def _pass(self, do: Pass) -> TurnEnded:
        mediator = self._mediators[do.block]
        barrier = mediator.state.waits.barrier
        assert barrier is not None
        # Others of the barrier may still use what the block was served: the machine says when that is over.
        return self.turn(mediator, lambda: mediator.pass_barrier(do.position, barrier), settles=False)

    def _settle(self, do: Settle) -> Settled:
        assert self.visit is not None
        return Settled(self.serving.settle(self._mediators[do.block], self.visit, do.leaving))


def refusal(error: Failure) -> Refusal:
    """Return what is raised in a block."""
    return Refusal(error.code, error.message, location=error.location)  # type: ignore[arg-type]
