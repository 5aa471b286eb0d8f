"""The room in which traced requests wait until a step fits them.

A traced request waits here and not in vLLM's queue. In each step the room says which of its requests start in the step. These go
to vLLM's queue for that step, so vLLM never looks at a traced request that it must not start, and never cuts a traced prompt.

The room knows the limits of the engine, and is told what a step has left. It calls nothing of vLLM.

- Waiting requests start in turn (`executor.core.fairness`), plain requests among them: plain requests are one tenant. The tenant
  is first whose running requests hold the least of the engine for its weight: of the seats or of the cache, whichever is more
  (Ghodsi et al., "Dominant Resource Fairness", 2011).
- A traced prompt has its rows in one step, unless it is longer than any step. A prompt that does not fit beside the running
  requests gets a step of its own, at most every second step, once it is next.
- A traced request starts when the cache can hold all traced requests to their ends. Some smaller requests may start before a
  large request; then all wait until the large request has started. But while the tenant of the large request has more of the
  cache than its weight gives it, other tenants do not wait. The same holds for a tenant's share of seats and cache.
- The requests of a gang start in one step, which is their own.
- A request whose block runs in a sandboxed process starts when there is a process for its trace. Other requests do not wait.

Size: the room, and the choice that it makes in each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from executor.core.fairness import Flow, in_turn, parts_of

if TYPE_CHECKING:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.request import Request

# How many requests may start while a larger request waits for the cache.
MOST_PASSES = 16


@dataclass(eq=False)
class Gang:
    """Requests of one trace that start in the same step.

    Attributes:
        expected: how many requests the gang has; a request that ends before it starts counts no longer.
        members: the requests that have come.
    """

    expected: int
    members: list[Traced] = field(default_factory=list)


@dataclass(eq=False)
class Traced:
    """A traced request that the scheduler has.

    Attributes:
        flow: the tenant and session of the request.
        rows: the number of tokens of the prompt.
        prompt_blocks: the number of cache blocks that the prompt needs.
        blocks: the number of cache blocks that the request may come to hold.
        fits: whether the prompt fits into a step. A longer prompt comes in chunks.
        gang: the requests with which this request must start, until it has started.
        text: the generated text, if stop strings end the request.
        passed: how many requests have started while this request waited for the cache.
        released: whether the request has left its gang to start, whatever its tenant's share.
        ahead: whether the request may run a step before the token of the step ahead is known (`executor.plugin.ahead`).
        sandboxed: the trace whose sandboxed process the block needs; "" if the block needs none.
    """

    request: Request
    flow: Flow
    rows: int
    prompt_blocks: int
    blocks: int
    fits: bool
    ahead: bool = False
    sandboxed: str = ""
    text: IncrementalDetokenizer | None = None
    gang: Gang | None = field(default=None, init=False)
    passed: int = field(default=0, init=False)
    released: bool = field(default=False, init=False)


@dataclass(frozen=True)
class Limits:
    """What the engine has.

    Attributes:
        rows: of a step.
        seats: how many requests may run at a time.
        blocks: of the cache.
    """

    rows: int
    seats: int
    blocks: int

    def part(self, seats: int, blocks: int) -> float:
        """Return how much of the engine so many seats and cache blocks are, from 0 to 1."""
        return max(seats / self.seats, blocks / self.blocks)


@dataclass(frozen=True)
class Left:
    """What a step has left for requests that start in it.

    Attributes:
        rows: beside the running requests.
        seats: beside the running requests.
        blocks: the free blocks of the cache.
        may_own: whether the running requests may sit the step out.
        processes: how many sandboxed processes wait for a trace.
        served: the traces that need no further process.
    """

    rows: int
    seats: int
    blocks: int
    may_own: bool
    processes: int = 0
    served: Collection[str] = ()


@dataclass
class Used:
    """What the running requests of each tenant use.

    Attributes:
        seats: how many requests run, plain requests included.
        blocks: the cache blocks that the traced requests may come to hold.
    """

    seats: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)


@dataclass
class Start:
    """Which requests start in a step.

    Attributes:
        requests: the requests that are next, in their order. Plain requests are among them.
        traced: the traced requests of these.
        own: whether the running requests sit the step out.
        closed: whether no request behind these may start.
        passed: the traced requests that let other requests pass in this step.
    """

    requests: list[Request] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)
    own: bool = False
    closed: bool = False
    passed: list[Traced] = field(default_factory=list)


class WaitingRoom:
    """Traced requests that wait.

    Args:
        limits: what the engine has.
        ready: returns whether a request could start, were there room. A request that waits for its grammar could not.
        flow_of: returns the flow of any request.

    Attributes:
        waiting: the requests, by id, in the order in which they came.
        gangs: the gangs that have not started, by trace.
    """

    def __init__(self, limits: Limits, ready: Callable[[Request], bool], flow_of: Callable[[Request], Flow]) -> None:
        self.waiting: dict[str, Traced] = {}
        self.gangs: dict[str, Gang] = {}
        self._limits = limits
        self._ready = ready
        self._flow_of = flow_of
        self._line: list[Request] = []
        self._line_of: object = None  # what the line was made of

    def enter(self, entry: Traced, trace: str, gang: int) -> None:
        """Let a request wait.

        Args:
            entry: the request.
            trace: the key of its trace.
            gang: how many requests of the trace must start in the same step. 0 and 1 mean none.
        """
        self.waiting[entry.request.request_id] = entry
        self._line_of = None
        if gang > 1:
            entry.gang = self.gangs.setdefault(trace, Gang(gang))
            entry.gang.members.append(entry)

    def leave(self, entry: Traced) -> None:
        """Forget a request that has started or ended."""
        if self.waiting.pop(entry.request.request_id, None) is None:
            return
        self._line_of = None
        if entry.gang is not None:
            entry.gang.members.remove(entry)
            entry.gang.expected -= 1
            if not entry.gang.expected:
                self._disband(entry.gang)

    def _disband(self, gang: Gang) -> None:
        for entry in gang.members:
            entry.gang, entry.released = None, True
        self.gangs = {trace: other for trace, other in self.gangs.items() if other is not gang}
        self._line_of = None

    # A step.

    def next(
        self,
        evicted: Sequence[Request],
        came: Sequence[Request],
        running: Sequence[Request],
        used: Used,
        left: Left,
        over: Collection[str] = (),
    ) -> Start:
        """Return which requests start in a step.

        Args:
            evicted: the requests that hold a place in front of all others.
            came: the other requests that wait, plain and traced, in the order in which they came.
            running: the running requests.
            used: what the running requests use; the requests that start are added to it.
            left: what the step has left.
            over: the tenants whose traced requests do not start in the step.
        """
        choice = _Choice(self._limits, used, left, lambda: parts_of(map(self._flow_of, (*came, *running))))
        for request in (*evicted, *self._in_turn(came, running, used)):
            if choice.seats <= 0 or choice.start.closed:
                break
            entry = self.waiting.get(request.request_id)
            if entry is None:
                if self._ready(request):
                    choice.take_plain(request, self._flow_of(request))
            elif entry.flow.tenant in over or not choice.has_process(entry):
                continue
            elif entry.gang is not None:
                self._choose_gang(choice, entry, entry.gang)
            elif entry not in choice.start.traced and self._ready(request):
                choice.take(entry)
        return choice.start

    def _in_turn(self, came: Sequence[Request], running: Sequence[Request], used: Used) -> list[Request]:
        """Return the requests that wait, in the order in which they should start."""
        line_of = ([one.request_id for one in came], [one.request_id for one in running])
        if line_of != self._line_of:
            line = list(came)
            if len({self._flow_of(request) for request in came}) > 1:
                held = {tenant: self._limits.part(used.seats[tenant], used.blocks[tenant]) for tenant in used.seats}
                line = in_turn(came, self._flow_of, map(self._flow_of, running), self._part_of, held)
            # Requests that have left their gang start one after the other.
            line.sort(key=lambda request: not self._released(request))
            self._line, self._line_of = line, line_of
        return self._line

    def _part_of(self, request: Request) -> float:
        entry = self.waiting.get(request.request_id)
        return self._limits.part(1, entry.blocks if entry is not None else 0)

    def _released(self, request: Request) -> bool:
        entry = self.waiting.get(request.request_id)
        return entry is not None and entry.released

    def _choose_gang(self, choice: _Choice, entry: Traced, gang: Gang) -> None:
        """Let the gang of a request start if it is next and complete."""
        if len(gang.members) < gang.expected or not all(self._ready(one.request) for one in gang.members):
            return
        if choice.start.requests or choice.closed_for(entry):
            return  # A gang does not start behind other requests, and other requests may pass it in this step.
        if not self._ever_fits(gang):
            # The members start apart, and a block that needs the others fails with a message.
            self._disband(gang)
            choice.take(entry)
        elif choice.take_gang(gang):
            self._disband(gang)

    def _ever_fits(self, gang: Gang) -> bool:
        """Return whether a step of its own has room for all members of a gang."""
        return (
            sum(one.rows for one in gang.members) <= self._limits.rows
            and sum(one.blocks for one in gang.members) <= self._limits.blocks
            and len(gang.members) <= self._limits.seats
        )


class _Choice:
    """The choice of the requests that start in one step.

    Args:
        limits: what the engine has.
        used: what the running requests use; the requests that start are added to it.
        left: what the step has left.
        weights: returns each tenant's weight as a part of all.

    Attributes:
        start: the choice so far.
        seats: how many requests may still start.
        closed_traced: whether no further traced request may start.
    """

    def __init__(self, limits: Limits, used: Used, left: Left, weights: Callable[[], dict[str, float]]) -> None:
        self.start = Start()
        self.seats = left.seats
        self.closed_traced = False
        self._limits = limits
        self._used = used
        self._left = left
        self._rows = left.rows
        self._weights = weights
        self._closed_tenants: set[str] = set()
        self._served: set[str] = set()  # traces that get a process in this step

    def has_process(self, entry: Traced) -> bool:
        """Return whether there is a sandboxed process for a request, or the request needs none."""
        trace = entry.sandboxed
        known = not trace or trace in self._left.served or trace in self._served
        return known or len(self._served) < self._left.processes

    def take_plain(self, request: Request, flow: Flow) -> None:
        """Let a plain request start, whose prompt may be cut."""
        if self._cut(request):
            self._used.seats[flow.tenant] += 1

    def _cut(self, request: Request) -> bool:
        """Let a request start with as many rows as the step has left, and return whether it has any."""
        if self._rows <= 0:
            self.start.closed = True
            return False
        self._rows -= min(self._rows, request.num_tokens - request.num_computed_tokens)
        self.seats -= 1
        self.start.requests.append(request)
        return True

    def closed_for(self, entry: Traced) -> bool:
        """Return whether a request waits for an earlier request."""
        return self.closed_traced or entry.flow.tenant in self._closed_tenants

    def take(self, entry: Traced) -> None:
        """Let a traced request start if there is room.

        If there is no room, the request lets other requests pass, or nothing behind it starts.
        """
        if self.closed_for(entry):
            return
        if self._over_share(entry):
            if entry.passed >= MOST_PASSES:
                self._closed_tenants.add(entry.flow.tenant)
            self.start.passed.append(entry)
            return
        if not self._reserve([entry]):
            if entry.passed >= MOST_PASSES:
                if self._over_weight([entry]):
                    self._closed_tenants.add(entry.flow.tenant)
                else:
                    self.closed_traced = True
            self.start.passed.append(entry)
            return
        if entry.fits and entry.rows > self._rows and not self._own([entry]):
            self.start.closed = True
            return
        if self._cut(entry.request):
            self._add(entry)

    def take_gang(self, gang: Gang) -> bool:
        """Let a gang start in a step of its own, and return whether it does.

        If it does not, nothing starts: a request that passed the gang would take the room that it waits for. But if the tenant
        has more of the cache than its weight gives it, only its own requests wait.
        """
        members = gang.members
        if not self._reserve(members) and self._over_weight(members):
            self._closed_tenants.add(members[0].flow.tenant)
            return False
        if not (len(members) <= self.seats and self._reserve(members) and self._own(members)):
            self.start.closed = True
            return False
        for entry in members:
            self._cut(entry.request)
            self._add(entry)
        return True

    def _add(self, entry: Traced) -> None:
        self.start.traced.append(entry)
        if entry.sandboxed and entry.sandboxed not in self._left.served:
            self._served.add(entry.sandboxed)
        self._used.seats[entry.flow.tenant] += 1
        self._used.blocks[entry.flow.tenant] += entry.blocks

    def _own(self, entries: Iterable[Traced]) -> bool:
        """Give the step to requests that start, and return whether that is possible.

        Nothing can be evicted for them then, so the cache must have free blocks.
        """
        blocks = sum(entry.prompt_blocks for entry in entries)
        if self.start.requests or not self._left.may_own or blocks > self._left.blocks:
            return False
        self.start.own = True
        self._rows = self._limits.rows
        return True

    def _reserve(self, entries: Iterable[Traced]) -> bool:
        """Return whether the cache can hold all traced requests to their ends, these included."""
        return self._used.blocks.total() + sum(entry.blocks for entry in entries) <= self._limits.blocks

    def _over_weight(self, entries: Sequence[Traced]) -> bool:
        """Return whether a tenant that has some of the cache would have more than its weight."""
        tenant = entries[0].flow.tenant
        held = self._used.blocks[tenant]
        wanted = held + sum(entry.blocks for entry in entries)
        return held > 0 and wanted > self._weights().get(tenant, 1.0) * self._limits.blocks

    def _over_share(self, entry: Traced) -> bool:
        """Return whether one more request would put a tenant over its share.

        A tenant may always run one request.
        """
        share, tenant = entry.flow.share, entry.flow.tenant
        if share >= 1 or entry.released:
            return False
        seats, blocks = self._used.seats[tenant], self._used.blocks[tenant]
        return seats > 0 and (
            seats >= share * self._limits.seats or blocks + entry.blocks > share * self._limits.blocks
        )
