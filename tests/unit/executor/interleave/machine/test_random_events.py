"""Random events on two simulated ranks, whose blocks differ now and then: what must hold whatever happens."""

from __future__ import annotations

import random
import zlib
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from executor.core.ended import Ended
from executor.core.location import Kind, Location
from executor.interleave.machine.events import (
    Admitted,
    Arrived,
    AtBarrier,
    CacheSpoilt,
    Changed,
    Compared,
    Dropped,
    Event,
    Failure,
    Generated,
    ModelRan,
    Preempted,
    Reached,
    Recorded,
    Refused,
    Returned,
    Settled,
    SkipsChecked,
    StepBegan,
    StepEnded,
    Streamed,
    TurnEnded,
    TurnsEnded,
)
from executor.interleave.machine.instructions import (
    Apply,
    AwaitCache,
    BeginStep,
    Cancel,
    CheckCache,
    CheckSkips,
    Close,
    Compare,
    CompareAdmitted,
    CompareWritten,
    Fail,
    FailForEdit,
    FindChanged,
    Finish,
    Forget,
    Instruction,
    Miss,
    Overrun,
    Pass,
    Record,
    Report,
    Resume,
    ResumeAll,
    Serve,
    ServeAll,
    Settle,
    SeveralTurns,
    Start,
    Stream,
    Turn,
    Withdraw,
)
from executor.interleave.machine.machine import Machine
from executor.interleave.machine.turns import BETWEEN

MODULES = 4
PROMPT = 3
COLLECTIVE = (Compare, CompareWritten, CompareAdmitted, Serve, ServeAll, Apply, Record)
WHY = Failure(4, "because")


@dataclass
class Code:
    """One block's code on one rank, and where it is.

    Attributes:
        facts: the event that brought the block.
        last: how its last turn ended; None before the first turn.
        turns: the number of turns that it had.
        gone: whether it was closed or forgotten.
        away_as: what stands for its loop in the tables; 0: it has none there.
    """

    facts: Admitted
    last: TurnEnded | None = None
    ended: Ended | None = None
    step: int = -1
    position: int = BETWEEN
    turns: int = 0
    finished: bool = False
    gone: bool = False
    failures: int = 0
    away_as: int = 0

    @property
    def away(self) -> bool:
        """Whether the steps go by without it."""
        return bool(self.away_as) and self.ended is None

    @property
    def way(self) -> int:
        last = self.last
        where = f"{last.waits}|{last.calls}|{last.barrier}|{last.owes}|{last.records}" if last is not None else ""
        return zlib.crc32(f"{self.ended}|{where}".encode())


@dataclass
class Rank:
    """One rank: a machine, and the code of its blocks.

    Attributes:
        number: 0, or 1 for the rank whose blocks differ now and then.
        collective: the collective instructions so far.
        flags: the blocks that spoilt the cache here, as the device knows and the host does not.
        spoilt: the blocks that spoilt the cache here.
    """

    number: int
    seed: int
    differs: bool
    machine: Machine = field(default_factory=lambda: Machine(alone=False))
    codes: dict[str, Code] = field(default_factory=dict)
    reported: dict[str, Ended] = field(default_factory=dict)
    at: Reached | None = None
    flags: set[str] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)

    def chance(self, share: float, *of: object) -> bool:
        """Return the same for the same seed and things, on every rank."""
        return random.Random(f"{self.seed}/{of}").random() < share

    def run(self, event: Event) -> Generator[Instruction, Event]:
        """Tell the machine of an event and carry its instructions out; yields what is collective, and is sent the answer."""
        self.at = event if isinstance(event, Reached) else None
        answer: Event | None = event
        while answer is not None:
            instructions = self.machine.handle(answer)
            answer = None
            for i, do in enumerate(instructions):
                self.check(do)
                if isinstance(do, COLLECTIVE):
                    answer = yield do
                    if isinstance(do, Turn):
                        answer = self.turn(do)
                    elif isinstance(do, SeveralTurns):
                        answer = self.turns(do)
                    elif isinstance(do, Record):
                        answer = Recorded()
                else:
                    answer = self.carry_out(do)
                assert (answer is None) == (do.answer is None)
                assert answer is None or i == len(instructions) - 1

    def check(self, do: Instruction) -> None:
        """What must hold of every instruction."""
        if isinstance(do, SeveralTurns):
            assert len(do.blocks) > 1
            assert all(self.codes[key].facts.apart for key in do.blocks)
            for one in each_of(do):
                self.check(one)
        key = getattr(do, "block", None)
        if key is None:
            return
        if isinstance(do, Close) and key not in self.codes:
            return  # it could not be bound here
        code = self.codes[key]
        assert not code.gone, f"{do} for a block that has left"
        waits = code.last.waits if code.last is not None else None
        match do:
            case Start():
                assert code.last is None
                assert code.step == 0
            case Serve():
                assert self.at is not None
                assert waits == Location(self.at.path, Kind.OUTPUT, code.step)
            case Resume():
                assert waits == Location("", Kind.STEP, code.step)
            case Miss():
                assert waits is not None
                assert (waits.kind, waits.step) == (Kind.OUTPUT, code.step)
            case Pass():
                assert code.last is not None
                assert code.last.barrier is not None
            case Apply() | Overrun():
                assert code.last is not None
                assert code.last.calls
            case Finish():
                assert not code.finished
            case Fail() | FailForEdit():
                assert code.ended is not Ended.FAILED, f"{do}, twice"
        if isinstance(do, Turn | Cancel):
            assert code.ended is None, f"{do} for a block that has ended"
        if isinstance(do, Close | Forget):
            assert code.ended is not None
        if isinstance(do, Close) and key in self.spoilt:
            assert code.ended is Ended.FAILED, "a request that spoilt the cache does not end well"

    def carry_out(self, do: Instruction) -> Event | None:
        """Carry out an instruction that is not collective; return the answer."""
        if isinstance(do, Turn):
            return self.turn(do)
        if isinstance(do, SeveralTurns):
            return self.turns(do)
        match do:
            case BeginStep(blocks):
                for key in blocks:
                    self.codes[key].step += 1
                    self.codes[key].position = -1
            case Withdraw(block):
                assert self.codes[block].away
                self.codes[block].away_as = 0
            case Fail(block, _) | FailForEdit(block, _):
                self.codes[block].ended = Ended.FAILED
            case Cancel(block):
                self.codes[block].ended = Ended.CANCELLED
            case Report(request, ended):
                assert self.reported.get(request) is not ended, f"{do}, twice"
                self.reported[request] = ended
            case Close(block) | Forget(block):
                if block in self.codes:
                    self.codes[block].gone = True
            case FindChanged(blocks):
                return Changed(frozenset(key for key in blocks if self.chance(0.5, "changed", key)))
            case CheckCache(blocks):
                looked_at = {key for key in blocks if self.chance(0.5, "looked at", key, self.codes[key].step)}
                for key in looked_at:
                    if self.chance(0.06, "cache", key, self.number, self.codes[key].step):
                        self.flags.add(key)
                        self.spoilt.add(key)
                come = {key for key in self.flags if self.chance(0.5, "flag", key, self.number, len(self.spoilt))}
                self.flags -= come
                return CacheSpoilt(frozenset(come), frozenset(looked_at))
            case AwaitCache(blocks):
                come = self.flags & set(blocks)
                self.flags -= come
                return CacheSpoilt(frozenset(come))
            case CheckSkips(block):
                return SkipsChecked(WHY if self.chance(0.3, "gap", block, self.codes[block].step) else None)
            case Settle(block, leaving):
                code = self.codes[block]
                bad = code.ended is not Ended.FAILED and self.chance(0.1, "settle", block, code.turns, leaving)
                return Settled(WHY if bad else None)
            case Stream():
                return Streamed()
        return None

    def turns(self, do: SeveralTurns) -> TurnsEnded:
        """Let the code of several blocks run."""
        return TurnsEnded([self.turn(one) for one in each_of(do)])

    def turn(self, do: Turn) -> TurnEnded:
        """Let the code of a block run; on the second rank it may go another way."""
        code = self.codes[do.block]
        match do:
            case Serve():
                assert self.at is not None
                code.position = self.at.position
            case Pass(_, position, _):
                code.position = max(code.position, position - 1)
            case Miss():
                code.position = BETWEEN
            case Finish():
                code.position, code.finished = BETWEEN, True
        number, code.turns = code.turns, code.turns + 1
        way: Any = number
        if self.differs and self.number and self.chance(0.05, "differs", do.block, number):
            way = (number, "another")
        rng = random.Random(f"{self.seed}/{do.block}/{way}")
        misfit = WHY if isinstance(do, Serve) and rng.random() < 0.08 else None
        code.last = self.choose(code, rng, misfit)
        code.ended = code.last.ended
        self.leave_for_the_tables(code, number)
        return code.last

    def leave_for_the_tables(self, code: Code, number: int) -> None:
        """Have a loop go into the tables, now and then on one rank alone, or as another loop there."""
        facts, last = code.facts, code.last
        assert last is not None
        fits = (
            last.waits is not None and last.waits.kind == Kind.STEP and not (last.records or last.owes or last.misfit)
        )
        if not fits or facts.gang or facts.owner or not self.chance(0.5, "away", facts.key, number):
            return
        other = self.number and self.differs and self.chance(0.4, "other", facts.key, number)
        code.away_as = self.chance(0.5, "which", facts.key, number) * 8 if other else 7
        code.last = replace(last, away=bool(code.away_as))

    @staticmethod
    def choose(code: Code, rng: random.Random, misfit: Failure | None) -> TurnEnded:
        """Return how a turn ends."""
        facts = code.facts
        ends = rng.choice([Ended.DONE, Ended.DONE, Ended.FAILED, Ended.STOPPED])
        if ends is Ended.STOPPED and (facts.joint or facts.owner):
            ends = Ended.DONE
        ways = [TurnEnded(ended=ends, misfit=misfit if ends is not Ended.FAILED else None), TurnEnded(calls="f()")]
        if not code.finished:
            ahead = [i for i in range(MODULES) if 10 * i > code.position]
            if ahead:
                now = TurnEnded(waits=Location(f"m{rng.choice(ahead)}", Kind.OUTPUT, code.step), misfit=misfit)
                ways += [now] * 5
            next_step = code.step + 1
            ways.append(TurnEnded(waits=Location(f"m{rng.randrange(MODULES)}", Kind.OUTPUT, next_step), misfit=misfit))
            ways += [TurnEnded(waits=Location("", Kind.STEP, next_step), misfit=misfit)] * 2
            ways.append(TurnEnded(waits=Location("", Kind.RESULT, 0), misfit=misfit))
            if facts.gang and not facts.joint:
                barrier = AtBarrier(rng.randrange(2), rng.choice([2, facts.gang]))
                barrier = AtBarrier(barrier.number, 2 + barrier.number * (facts.gang - 2))
                ways += [TurnEnded(waits=Location("", Kind.BARRIER, 0, str(barrier)), barrier=barrier)] * 4
        chosen = rng.choice(ways)
        last = code.last
        sticky = {
            "records": (last is not None and last.records) or rng.random() < 0.05,
            "owes": (last is not None and last.owes) or rng.random() < 0.05,
        }
        return TurnEnded(
            chosen.waits,
            chosen.ended,
            chosen.barrier,
            chosen.calls,
            rng.random() < 0.1,
            sticky["owes"],
            sticky["records"],
            chosen.misfit,
        )


def each_of(do: SeveralTurns) -> list[Turn]:
    """Return the turns of several blocks as one instruction each."""
    kind = Serve if isinstance(do, ServeAll) else Resume
    assert isinstance(do, ServeAll | ResumeAll)
    return [kind(key) for key in do.blocks]


class TwoRanks(RuleBasedStateMachine):
    """An engine with two ranks that runs random traces."""

    @initialize(seed=st.integers(0, 1 << 32), differs=st.booleans())
    def start(self, seed: int, differs: bool) -> None:
        self.ranks = [Rank(number, seed, differs) for number in (0, 1)]
        self.traces: dict[str, list[str]] = {}  # requests that have not left, by trace
        self.joint: dict[str, str] = {}
        self.begun: set[str] = set()
        self.came = 0
        self.closed: dict[str, int] = {}

    def tell(self, event: Event) -> None:
        """Tell both ranks of an event, and have them meet in what is collective."""
        running = [rank.run(event) for rank in self.ranks]
        answers: list[Event | None] = [None, None]
        while True:
            met: list[Instruction | None] = []
            for run, answer in zip(running, answers, strict=True):
                try:
                    met.append(run.send(answer))  # type: ignore[arg-type]
                except StopIteration:
                    met.append(None)
            if met == [None, None]:
                return
            first, second = met
            assert type(first) is type(second), f"the ranks do not meet: {met} at {event}"
            if isinstance(first, CompareWritten | CompareAdmitted):
                assert getattr(first, "blocks", ()) == getattr(second, "blocks", ())
            else:
                assert first == second, f"the ranks do not meet: {met} at {event}"
            answers = [self.exchange(met)] * 2

    def exchange(self, met: list[Any]) -> Event | None:
        """Return what the ranks learn from each other where they meet."""
        votes = []
        for rank, do in zip(self.ranks, met, strict=True):
            codes = [rank.codes[key] for key in getattr(do, "blocks", ())]
            if isinstance(do, Compare):
                late = [int(code.last is not None and code.last.overdue) for code in codes]
                away = [code.away_as if code.away else 0 for code in codes]
                votes.append([*(code.way for code in codes), *late, *away])
            elif isinstance(do, CompareWritten):
                other = [
                    int(rank.differs and rank.number and rank.chance(0.03, "wrote", code.facts.key, code.step))
                    for code in codes
                ]
                votes.append([*do.spoilt, *other])
            elif isinstance(do, CompareAdmitted):
                votes.append(list(do.here))
        return Compared(votes) if votes else None

    # What happens.

    def admit(self, facts: Admitted, refused: tuple[bool, bool]) -> None:
        for rank, no in zip(self.ranks, refused, strict=True):
            if no:
                for _ in rank.run(Refused(facts.key, facts.trace, facts.joint)):
                    raise AssertionError
            else:
                rank.codes[facts.key] = Code(facts)
                assert rank.machine.handle(facts) == []

    @rule(
        requests=st.integers(1, 3),
        edits=st.integers(0, 2),
        gang=st.booleans(),
        joint=st.booleans(),
        streamed=st.booleans(),
        apart=st.booleans(),
        refused=st.sampled_from([(False, False)] * 8 + [(True, True), (True, False), (False, True)]),
    )
    def a_trace_comes(
        self,
        requests: int,
        edits: int,
        gang: bool,
        joint: bool,
        streamed: bool,
        apart: bool,
        refused: tuple[bool, bool],
    ) -> None:
        number, self.came = self.came, self.came + 1
        trace = f"t{number}"
        together = requests if gang and requests > 1 else 0
        keys = [f"{trace}-{invoke}" for invoke in range(requests)]
        for invoke, key in enumerate(keys):
            bad = refused if invoke == 0 else (False, False)
            if not any(bad) and invoke == 0:
                for edit in range(edits):
                    name = f"{key}#{edit}"
                    facts = Admitted(name, name, invoke, number, PROMPT, owner=key, rank=edit - edits)
                    self.admit(facts, (False, False))
            facts = Admitted(
                key,
                trace,
                invoke,
                number,
                PROMPT,
                gang=together,
                streamed=streamed,
                apart=apart and not together and not edits,
            )
            self.admit(facts, bad)
        self.traces[trace] = keys
        brought = list(keys)
        if joint and together:
            self.joint[trace] = f"{trace}*"
            brought.append(f"{trace}*")
            self.admit(Admitted(f"{trace}*", trace, requests, number, 0, gang=together, joint=True), (False, False))
        self.tell(Arrived(tuple(brought)))

    @precondition(lambda self: any(self.traces.values()))
    @rule(data=st.data(), most=st.booleans())
    def a_step(self, data: st.DataObject, most: bool) -> None:
        """Of all requests, or of some of them."""
        known = [key for keys in self.traces.values() for key in keys]
        chosen = known if most else data.draw(st.lists(st.sampled_from(known), unique=True))
        waiting = [key for request in chosen for key in self.ranks[0].machine.blocks.waits(request)]
        assert waiting == [key for request in chosen for key in self.ranks[1].machine.blocks.waits(request)]
        if not waiting:
            return
        cut = not most and data.draw(st.integers(0, 9)) == 0
        self.tell(StepBegan({key: 1 if key in self.begun else PROMPT - cut for key in waiting}))
        self.begun.update(waiting)
        for module in range(MODULES):
            path = f"m{module}"
            called = self.ranks[0].chance(0.9, "called", path, len(self.begun))
            if called:
                self.tell(Reached(path, str(Kind.OUTPUT), 10 * module))
        self.tell(ModelRan())
        self.tell(StepEnded())
        for rank in self.ranks:
            assert not rank.machine.waiting

    @precondition(lambda self: any(self.traces.values()))
    @rule(data=st.data())
    def an_eviction(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([key for keys in self.traces.values() for key in keys]))
        self.bring_back(request)
        self.tell(Preempted(request))

    @precondition(lambda self: any(self.away(key) for keys in self.traces.values() for key in keys))
    @rule(data=st.data())
    def a_loop_comes_back(self, data: st.DataObject) -> None:
        away = [key for keys in self.traces.values() for key in keys if self.away(key)]
        self.bring_back(data.draw(st.sampled_from(away)), data.draw(st.integers(0, 3)))

    def away(self, request: str) -> bool:
        """Return whether a request's loop is in the tables, which is so on all ranks or on none."""
        found = {rank.codes[request].away for rank in self.ranks if request in rank.codes}
        assert len(found) < 2
        return found == {True}

    def bring_back(self, request: str, steps: int = 1) -> None:
        """Have the block of a loop in the tables go on."""
        if not self.away(request):
            return
        for rank in self.ranks:
            code = rank.codes[request]
            code.step += steps
            code.away_as = 0
            waits = Location("", Kind.STEP, code.step + 1)
            code.last = TurnEnded(waits=waits)
            assert rank.machine.handle(Returned(request, steps, waits)) == []

    @precondition(lambda self: any(self.traces.values()))
    @rule(data=st.data())
    def a_generation_ends(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from([key for keys in self.traces.values() for key in keys])))

    def finish(self, request: str) -> None:
        trace = request.rpartition("-")[0]
        self.bring_back(request)
        self.tell(Generated(request))
        self.traces[trace].remove(request)
        if not self.traces[trace] and trace in self.joint:
            self.tell(Generated(self.joint.pop(trace)))

    @precondition(lambda self: any(self.traces.values()))
    @rule(data=st.data())
    def a_trace_is_dropped(self, data: st.DataObject) -> None:
        trace = data.draw(st.sampled_from([trace for trace, keys in self.traces.items() if keys]))
        self.tell(Dropped(trace))
        self.traces[trace] = []
        self.joint.pop(trace, None)

    # What must hold.

    @invariant()
    def the_ranks_agree(self) -> None:
        first, second = self.ranks
        assert first.machine.blocks.live.keys() == second.machine.blocks.live.keys()
        for key, block in first.machine.blocks.live.items():
            other = second.machine.blocks.live[key]
            assert (block.waits, block.ended, block.barrier) == (other.waits, other.ended, other.barrier)

    @invariant()
    def the_machine_knows_its_blocks(self) -> None:
        for rank in self.ranks:
            for key, block in rank.machine.blocks.all.items():
                assert block.ended == rank.codes[key].ended
                assert not rank.codes[key].gone
                assert not block.calls

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for keys in self.traces.values():
            for request in list(keys):
                self.finish(request)
        for rank in self.ranks:
            assert all(code.gone and code.ended is not None for code in rank.codes.values())
            assert rank.machine.idle
            assert not rank.machine.waiting
            assert not rank.machine._turns.barriers
            assert rank.machine.handle() == []


TestTwoRanks = TwoRanks.TestCase
TestTwoRanks.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
