"""The blocks of a worker as the machine knows them: facts, and what each block waits for."""

from __future__ import annotations

from dataclasses import dataclass

from executor.core.ended import Ended
from executor.core.location import Kind, Location
from executor.interleave.machine.events import Admitted, AtBarrier, Returned, TurnEnded

# The kinds of locations that a block may go on waiting for when a step ends.
ANY_TIME = (Kind.STEP, Kind.RESULT, Kind.BARRIER)


@dataclass(slots=True, eq=False)
class Block:
    """One block.

    Size: data that the rules of the machine read.

    Attributes:
        facts: the event that brought the block.
        key: the block's key.
        order: the block's place in the order of turns.
        step: the step of the block's request; -1 before the first step.
        early: whether the block started before its first step.
        reported: how the block ended, as the scheduler was told.
        looked_at: whether the cache was looked at for the block's request since that was last settled.
        spoilt: whether the block's request left numbers in the cache that are not finite, as this rank knows.
        waits, ended, barrier, calls, overdue, owes, records, away: as in the last `TurnEnded`.
    """

    facts: Admitted
    key: str
    order: tuple[int, int, int]
    step: int = -1
    early: bool = False
    waits: Location | None = None
    ended: Ended | None = None
    barrier: AtBarrier | None = None
    calls: object | None = None
    overdue: bool = False
    owes: bool = False
    records: bool = False
    away: bool = False
    reported: Ended | None = None
    looked_at: bool = False
    spoilt: bool = False

    @classmethod
    def of(cls, facts: Admitted) -> Block:
        """Return the block that an event brings."""
        return cls(facts, facts.key, (facts.arrival, facts.invoke, facts.rank))

    @property
    def failed(self) -> bool:
        """Whether the block has failed."""
        return self.ended is Ended.FAILED

    @property
    def lost(self) -> bool:
        """Whether the block failed before its first step, because of another rank perhaps."""
        return self.step < 0 and self.ended is not None

    @property
    def resting(self) -> bool:
        """Whether the block has ended or waits for the result: it asks for nothing in a coming step."""
        return self.ended is not None or (self.waits is not None and self.waits.kind == Kind.RESULT)

    @property
    def here(self) -> Location | None:
        """The location that the block waits for in the step of its request, if it waits for one."""
        waits = self.waits
        return waits if waits is not None and waits.step == self.step and waits.kind not in ANY_TIME else None

    def note(self, turned: TurnEnded) -> None:
        """Take over how a turn of the block ended."""
        self.ended = turned.ended
        self.waits = turned.waits if turned.ended is None else None
        self.barrier = turned.barrier
        self.calls = turned.calls
        self.overdue = turned.overdue
        self.owes = turned.owes
        self.records = turned.records
        self.away = turned.away

    def end(self, ended: Ended) -> None:
        """Note that the block was ended from outside."""
        self.ended = ended
        self.waits = self.barrier = None
        self.calls = None


class Blocks:
    """The blocks that have not left.

    Attributes:
        all: the blocks by key.
        live: the blocks that wait for something in a coming step, or must see that there is none.
        joint: the joint blocks, by trace id.
        refused: the trace ids of the requests whose block could not be bound, by key.
        joint_refused: the keys of the joint blocks that could not be bound, with their trace ids.
    """

    def __init__(self) -> None:
        self.all: dict[str, Block] = {}
        self.live: dict[str, Block] = {}
        self.joint: dict[str, list[Block]] = {}
        self.refused: dict[str, str] = {}
        self.joint_refused: dict[str, str] = {}
        self._edits: dict[str, list[Block]] = {}  # by request

    def __bool__(self) -> bool:
        return bool(self.all or self.refused or self.joint_refused)

    def add(self, facts: Admitted) -> None:
        """Take in a block that was bound."""
        block = Block.of(facts)
        self.all[facts.key] = self.live[facts.key] = block
        if facts.owner:
            self._edits.setdefault(facts.owner, []).append(block)
        if facts.joint:
            self.joint.setdefault(facts.trace, []).append(block)

    def bring_back(self, returned: Returned) -> None:
        """Note that a block goes on, after steps that went by without it."""
        block = self.all[returned.key]
        block.step += returned.steps
        block.waits = returned.waits
        block.away = returned.away
        block.looked_at |= returned.looked_at
        if not block.away and not block.resting:
            self.live[block.key] = block

    def remove(self, block: Block) -> None:
        """Forget a block."""
        self.all.pop(block.key, None)
        self.live.pop(block.key, None)
        for lists, key in ((self.joint, block.facts.trace), (self._edits, block.facts.owner)):
            if block in lists.get(key, ()):
                lists[key].remove(block)
                if not lists[key]:
                    del lists[key]

    def edits_of(self, request: str) -> list[Block]:
        """Return the standing edits that run in a request, in their order."""
        return list(self._edits.get(request, ()))

    def gang_of(self, trace: str) -> list[Block]:
        """Return the blocks of a trace's gang that have not left, in order; no joint blocks."""
        found = [
            block
            for block in self.all.values()
            if block.facts.trace == trace and block.facts.gang and not block.facts.joint
        ]
        return sorted(found, key=lambda block: block.facts.invoke)

    def owners_of(self, block: Block) -> list[Block]:
        """Return the own blocks of the requests that a block runs in."""
        if block.facts.joint:
            return self.gang_of(block.facts.trace)
        owner = self.all.get(block.facts.owner or block.key)
        return [owner] if owner is not None else []

    def of_trace(self, trace: str) -> list[Block]:
        """Return the blocks of a trace, without standing edits."""
        return [block for block in self.all.values() if block.facts.trace == trace and not block.facts.owner]

    def waits(self, request: str) -> list[str]:
        """Return the keys of the blocks that wait for a coming step of a request, edits first.

        The request itself is among them as long as a joint block sees its rows.
        """
        live = self.live
        edits = self._edits.get(request)
        if not edits:
            return [request] if request in live or (self.joint and self._seen(request)) else []
        keys = (*(edit.key for edit in edits), request)
        return [key for key in keys if key in live or (self.joint and self._seen(key))]

    def _seen(self, request: str) -> bool:
        block = self.all.get(request)
        if block is None or block.lost:
            return False
        return any(joint.key in self.live for joint in self.joint.get(block.facts.trace, ()))
