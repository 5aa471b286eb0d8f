"""The tables that the kernel reads on the device: the taps and the rows of each request.

Two tensors, allocated once, whose addresses every captured graph holds:

- `rows`, [most rows, 2], int32: for each row of the batch the slot of its request, and its number among the request's rows. One
  upload a step. A row of padding has the sentinel, the slot after the last, which has no taps.
- `records`, [slots + 1, length], int32: what each slot's request does. First, for each site, the number of its first tap and how
  many taps are open there. Then the taps, `RECORD` numbers each. A record is uploaded when its request joins or leaves, and when
  a window of steps opens or closes.

A tap's record: code, first column, column after the last, first row, row after the last, vector, its stride from row to row, and
the direction of FORM or the offset of READ in the output; then as float32: number, c0, c1, c2, c3, low, high; then 1 for a wide
vector, which is float32 in a bank of a narrower dtype. Where a vector begins is counted in numbers of the bank, its stride in its
own numbers.

Values that taps read go to one flat tensor of the model's dtype. It has two areas: one for steps with one row of a request,
whose used part is appended to the ring in every step, and one for prompts. A request gets its ranges of both when it joins, so a
step never lacks memory. A request that finds no room is refused with `Full`, and runs in another tier.

A program (`programs`) runs for all rows at once, and takes from a third tensor what is open in this step:

- `open_rows`, [most rows, 2], int64: for each row of the batch, where in the output the program of its request leaves the row's
  values, and the program's number. Without an open program these are the scratch range, which stands after both areas, and 0. In
  the prompt's step a program may be open for some rows of a request, whose values lie one row after the other.

Size: the tables and the way in which they are written are one thing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor.graphs.bank import Bank, Use
from executor.graphs.emitted import Emitted, elements_of
from executor.graphs.extents import Extents
from executor.graphs.limits import RECORD, GraphLimits
from executor.graphs.operations import ALL, Code, Refused, Tap

LATER, PROMPT = 0, 1
_MOST_KNOWN = 64  # tuples of taps that are remembered
_MOST_TENANTS, _MOST_COUNTS = 64, 8


@dataclass(frozen=True)
class Part:
    """What a READ or a program leaves in its request's range of the output in a step.

    Attributes:
        tap: the number of the tap among the request's; the values of a program have the numbers after those of the taps.
        at: where it begins in the range, in elements.
        rows, width: its shape.
        form: of a program's value, which lies there as elements of the output: its own shape and dtype.
    """

    tap: int
    at: int
    rows: int
    width: int
    form: tuple[tuple[int, ...], torch.dtype] | None = None


@dataclass(frozen=True)
class Share:
    """A request's range of an area of the output.

    Attributes:
        start, size: in elements of the area.
        parts: what lies there.
    """

    start: int
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Outgoing:
    """What a step leaves in an area of the output.

    Attributes:
        version: differs when the shares differ.
        top: the number of elements of the area that hold all of it.
        shares: by the requests' slots.
    """

    version: int
    top: int
    shares: Mapping[int, Share]


@dataclass(frozen=True)
class _Drawing:
    """The record of a request in some steps, without its own addresses.

    These say where its vectors and its range of the output are.

    Attributes:
        since, until: the first step, and the step after the last.
        record: the numbers, [length].
        reads: the positions of the offsets of READ in it.
        vectors: the tap of each position with a vector, and whether it is the direction's.
        size, parts: of the request's share.
        sites: with open taps.
    """

    since: int
    until: int
    record: npt.NDArray[np.int32]
    reads: npt.NDArray[np.intp]
    vectors: tuple[tuple[int, int, bool], ...]
    size: int
    parts: tuple[Part, ...]
    sites: frozenset[int]


@dataclass(eq=False)
class _Alike:
    """What requests with the very same taps have in common.

    Attributes:
        taps: by their numbers.
        rows: of the prompt.
        needed: the elements of each area of the output.
        drawings: of the records, by the rows of the step.
        uses: where the vectors of the taps are in the bank, by tenant.
    """

    taps: tuple[Tap, ...]
    rows: int
    needed: tuple[int, int]
    drawings: dict[int, list[_Drawing]] = field(default_factory=dict)
    uses: dict[str, list[tuple[Use | None, Use | None]]] = field(default_factory=dict)


@dataclass
class _Joined:
    """A request in the tables.

    Attributes:
        alike: its taps.
        vectors: for each tap, where its vector and its direction are in the bank, -1: none.
        starts: its range in each area, -1: none.
        until: the step in which the record is next to be written anew.
        now: the rows of the step for which the record was written.
        open: the sites with open taps.
        share: its share in the area of the current steps.
        emitted: what its program leaves.
    """

    alike: _Alike
    vectors: list[tuple[int, int]]
    emitted: Emitted | None = None
    starts: list[int] = field(default_factory=lambda: [-1, -1])
    until: int = -1
    since: int = 0
    now: int = 0
    open: frozenset[int] = frozenset()
    share: Share = Share(0, 0, ())


class Tables:
    """The tables of one worker.

    Size: each table that the kernel reads is an attribute.

    Args:
        widths: the number of columns of each site.
        slots: the most requests in a batch; a request's slot is the engine's own.
        rows: the most rows of a step.
        dtype, device: of the model.
        limits: the bounds.

    Attributes:
        rows, records, open_rows: as above.
        owners, flags: which rows the cache is looked at for, and what was found, as of `CacheGuard.launch`; by slots.
        output: the flat output, [elements].
        bank: the vectors.
        split, scratch: where the area of prompts and the scratch range begin in the output.
        widths, slots: as given.
    """

    def __init__(
        self,
        widths: Sequence[int],
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        limits: GraphLimits,
    ) -> None:
        self.widths = tuple(widths)
        self.slots = slots
        self._limits = limits
        size = dtype.itemsize
        elements = limits.bank_bytes // size
        self.bank = Bank(elements, dtype, device, int(elements * limits.bank_share))
        self.split = limits.step_bytes // size
        self._areas = (
            Extents("the output of a step", self.split),
            Extents("the output of prompts", limits.prompt_bytes // size),
        )
        self.scratch = self.split + self._areas[PROMPT].size
        if self.scratch > ALL or elements > ALL:
            raise Refused("the tables hold places as int32: 2**31 elements are the most")
        self.output = torch.zeros(self.scratch + limits.emitted_bytes // size, dtype=dtype, device=device)
        self._heads = 2 * len(self.widths)
        self.length = self._heads + RECORD * limits.taps
        self.records = torch.zeros(slots + 1, self.length, dtype=torch.int32, device=device)
        self.rows = torch.full((rows, 2), slots, dtype=torch.int32, device=device)
        self.owners = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.flags = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.open_rows = torch.tensor([[self.scratch, 0]]).repeat(rows, 1).to(device)
        # By slot: where its program leaves its values, the program's number, its first row and the row after the last, and the
        # elements of a row.
        self._closed = (self.scratch, 0, 0, 0, 0)
        self._open_programs = np.full((slots + 1, len(self._closed)), self._closed, np.int64)
        self._programs_moved = False
        self._rows_open = False  # whether a row on the device may have an open program
        self._joined: dict[int, _Joined] = {}
        self._raised: set[int] = set()  # the slots whose flags may be those of an earlier request
        self._known: OrderedDict[tuple[int, int], _Alike] = OrderedDict()
        self._sites: Counter[int] = Counter()
        self._dirty: dict[int, npt.NDArray[np.int32]] = {}
        self._version = [0, 0]
        self._epochs: dict[int, int] = {}
        self._last: list[tuple[tuple[int, int], ...]] = [(), ()]
        self._outgoing = [Outgoing(0, 0, {}), Outgoing(0, 0, {})]
        self._writes = 0
        self._laid_out: tuple[object, ...] | None = None  # what the rows on the device are
        self._owner_of = np.full(slots + 1, -1, np.int32)

    @property
    def sites(self) -> frozenset[int]:
        """The sites at which a request has an open tap."""
        return frozenset(self._sites)

    def __contains__(self, slot: int) -> bool:
        return slot in self._joined

    def join(
        self,
        slot: int,
        tenant: str,
        taps: Iterable[Tap],
        rows: int,
        emitted: Emitted | None = None,
        changes: bool = False,
        again: bool = False,
    ) -> None:
        """Give a request its taps, and open its program in the program's steps.

        Args:
            slot: the request's.
            tenant: whose share of the bank its vectors are in.
            taps: in the order in which they run at a site.
            rows: the rows of its prompt, all in its first step.
            emitted: what its program leaves; None: it has no program.
            changes: whether it changes the model's values, so that the cache is looked at.
            again: whether requests may come with this very tuple of taps, whose vectors nothing changes.

        Raises:
            Refused: a tap does not fit its site, or the request has too many taps, or its program leaves too much.
            Full: there is no room for its vectors or for what it reads. Nothing of it stays.
        """
        if slot in self._joined or not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is taken, or none")
        alike = self._alike_of(tuple(taps), rows, again)
        own = emitted.elements(self.output.dtype) if emitted is not None else 0
        if own > len(self.output) - self.scratch:
            raise Refused(f"a program leaves {own} elements in a step, more than {len(self.output) - self.scratch}")
        joined = _Joined(alike, [], emitted)
        try:
            if not self._use_again(tenant, joined):
                self._add_vectors(tenant, joined)
            in_prompt = own * emitted.prompt_rows if emitted is not None else 0
            for area, needed in enumerate((alike.needed[LATER] + own, alike.needed[PROMPT] + in_prompt)):
                if needed:
                    joined.starts[area] = self._areas[area].take(needed)
        except BaseException:
            self._release(joined)
            raise
        self._joined[slot] = joined
        if changes:
            self._owner_of[slot] = slot
            self._raised.add(slot)

    def _lower_flags(self) -> None:
        """Lower the flags of requests that have joined."""
        if len(self._raised) == 1:
            self.flags[next(iter(self._raised))].zero_()
        elif self._raised:
            self.flags.index_fill_(0, self.put([sorted(self._raised)])[0], 0)
        self._raised.clear()

    def _alike_of(self, taps: tuple[Tap, ...], rows: int, again: bool) -> _Alike:
        """Return what requests have in common that are given this very tuple of taps.

        Args:
            taps, rows, again: as of `join`.

        Raises:
            Refused: as of `join`.
        """
        known = self._known.get((id(taps), rows)) if again else None
        if known is not None:
            self._known.move_to_end((id(taps), rows))
            return known
        if len(taps) > self._limits.taps:
            raise Refused(f"{len(taps)} taps; a request has at most {self._limits.taps}")
        for tap in taps:
            if not 0 <= tap.site < len(self.widths):
                raise Refused(f"there is no site {tap.site}")
            tap.check(self.widths[tap.site])
            vector = tap.vector
            if tap.exact and vector is not None and vector.dtype != self.output.dtype and not self._wide(tap):
                raise Refused(f"a vector in {vector.dtype} for a model in {self.output.dtype}")
        made = _Alike(taps, rows, (_most_read(taps), _read_in(taps, 0, rows) if rows > 1 else 0))
        if again:
            self._known[id(taps), rows] = made  # it has the tuple, so that the id stays the tuple's
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return made

    def _use_again(self, tenant: str, joined: _Joined) -> bool:
        """Have a request use the vectors of requests like it; return whether all are in the bank."""
        uses = joined.alike.uses.get(tenant)
        for pair in uses or ():
            starts = [-1, -1]
            for i, use in enumerate(pair):
                if use is not None and self.bank.again(use):
                    starts[i] = use.start
                elif use is not None:
                    joined.vectors.append((starts[0], starts[1]))
                    self._drop_vectors(joined)
                    return False
            joined.vectors.append((starts[0], starts[1]))
        return uses is not None

    def _add_vectors(self, tenant: str, joined: _Joined) -> None:
        """Put the vectors of a request's taps into the bank."""
        for tap in joined.alike.taps:
            joined.vectors.append((-1, -1))
            for i, vector in enumerate((tap.vector, tap.direction)):
                if vector is not None:
                    start = self.bank.add(tenant, vector, wide=i == 0 and self._wide(tap))
                    joined.vectors[-1] = (start, -1) if i == 0 else (joined.vectors[-1][0], start)
        uses = joined.alike.uses
        if len(uses) >= _MOST_TENANTS:
            uses.clear()
        use = self.bank.use
        uses[tenant] = [
            (use(one) if one >= 0 else None, use(other) if other >= 0 else None) for one, other in joined.vectors
        ]

    def leave(self, slot: int) -> None:
        """Take a request out of the tables; its slot may then be another request's."""
        joined = self._joined.pop(slot)
        if slot in self._raised:
            self._lower_flags()
        self._count(joined.open, frozenset())
        self._release(joined)
        self._dirty[slot] = np.zeros(self.length, np.int32)
        self._open(slot, self._closed)
        self._owner_of[slot] = -1

    def _release(self, joined: _Joined) -> None:
        self._drop_vectors(joined)
        for area in (LATER, PROMPT):
            self._give(joined, area)

    def _drop_vectors(self, joined: _Joined) -> None:
        for pair in joined.vectors:
            for start in pair:
                if start >= 0:
                    self.bank.drop(start)
        joined.vectors = []

    def _give(self, joined: _Joined, area: int) -> None:
        if joined.starts[area] >= 0:
            self._areas[area].give(joined.starts[area])
            joined.starts[area] = -1

    def begin_step(
        self, batch: Sequence[tuple[int, int]], steps: Mapping[int, int], padded: int
    ) -> tuple[Outgoing, Outgoing]:
        """Write the tables of a step and upload what changed, on the current stream.

        Args:
            batch: the slot and the number of rows of each request, plain requests too, in the order of their rows.
            steps: the step of each request that has taps; the prompt is in step 0.
            padded: the rows of the tensors, padding included.

        Returns:
            What the step leaves in the areas `LATER` and `PROMPT`.

        Raises:
            Refused: a request has more rows than its prompt had.
        """
        self._lower_flags()
        present: list[list[tuple[int, int]]] = [[], []]
        for slot, count in batch:
            joined = self._joined.get(slot)
            if joined is None:
                continue
            step = steps[slot]
            if not joined.since <= step < joined.until or count != joined.now:
                self._write(slot, joined, step, count)
            if joined.share.parts:
                present[LATER if count == 1 else PROMPT].append((slot, self._epochs[slot]))
        self._upload(batch, padded)
        for area in (LATER, PROMPT):
            now = tuple(present[area])
            if now != self._last[area]:
                self._last[area] = now
                self._version[area] += 1
                shares = {slot: self._joined[slot].share for slot, _ in now}
                top = max((share.start + share.size for share in shares.values()), default=0)
                self._outgoing[area] = Outgoing(self._version[area], top, shares)
        return self._outgoing[LATER], self._outgoing[PROMPT]

    def edge(self, slot: int) -> int:
        """Return the step in which a request's record is next to be written anew."""
        return self._joined[slot].until

    def blank(self, rows: int) -> None:
        """Have the next pass of so many rows run no tap."""
        self.rows[:rows].fill_(self.slots)
        self.owners[:rows].fill_(-1)
        self._close_rows()
        self._laid_out = None

    def read_now(self, outgoing: tuple[Outgoing, Outgoing]) -> torch.Tensor:
        """Return a copy of the used part of the output after a step, bit by bit: [bytes]."""
        later, prompt = outgoing
        used = self.output[: later.top], self.output[self.split : self.split + prompt.top]
        return torch.cat(used).view(torch.uint8)  # what a program left there is no number of the output's dtype

    def _write(self, slot: int, joined: _Joined, step: int, count: int) -> None:
        """Write a request's record from a step on, until a window opens or closes."""
        alike, emitted = joined.alike, joined.emitted
        if count > max(alike.rows, 1):
            raise Refused(f"{count} rows of a request whose prompt had {alike.rows}")
        area = LATER if count == 1 else PROMPT
        if step and count == 1:
            self._give(joined, PROMPT)
        elif area == PROMPT and joined.starts[PROMPT] < 0 and _read_in(alike.taps, step, count):
            raise Refused("a prompt's rows come after the prompt")
        start, offset, of_program = joined.starts[area], 0, list[Part]()
        if emitted is not None and emitted.steps[0] <= step < emitted.steps[1]:
            if count > 1 and (emitted.prompt is None or step or count != alike.rows):
                raise Refused(f"{count} rows of a request whose program is for one")
            first, after = emitted.prompt if count > 1 and emitted.prompt is not None else (0, 1)
            width = emitted.elements(self.output.dtype)
            begin = start + (self.split if area == PROMPT else 0) if width else self.scratch
            self._open(slot, (begin, emitted.program, first, after, width))
            of_program = self._left(emitted, len(alike.taps), count)
            offset = (after - first) * width
        else:
            self._open(slot, self._closed)
        drawn = self._drawn(alike, step, count)
        edges = (0, ALL) if emitted is None else (0, *emitted.steps, ALL)
        joined.since = max(drawn.since, *(edge for edge in edges if edge <= step))
        joined.until = min(drawn.until, *(edge for edge in edges if edge > step))
        joined.now = count
        record = drawn.record.copy()
        record[drawn.reads] += start + offset + (self.split if area == PROMPT else 0)
        for position, i, is_direction in drawn.vectors:
            record[position] = joined.vectors[i][is_direction]
        self._count(joined.open, drawn.sites)
        joined.open = drawn.sites
        parts = drawn.parts
        if of_program:
            parts = (*of_program, *(replace(part, at=part.at + offset) for part in parts))
        joined.share = Share(start, offset + drawn.size, parts)
        self._dirty[slot] = record
        self._writes += 1
        self._epochs[slot] = self._writes

    def _drawn(self, alike: _Alike, step: int, count: int) -> _Drawing:
        """Return the drawing of requests with the same taps, for a step with `count` rows."""
        if count not in alike.drawings and len(alike.drawings) >= _MOST_COUNTS:
            alike.drawings.clear()
        drawings = alike.drawings.setdefault(count, [])
        found = next((one for one in drawings if one.since <= step < one.until), None)
        if found is None:
            found = self._draw(alike.taps, step, count)
            drawings.append(found)
        return found

    def _draw(self, taps: tuple[Tap, ...], step: int, count: int) -> _Drawing:
        edges = sorted({edge for tap in taps for edge in tap.steps} | {0, ALL})
        record = np.zeros(self.length, np.int32)
        heads = record[: self._heads].reshape(-1, 2)
        ints = record[self._heads :].reshape(-1, RECORD)
        floats = ints.view(np.float32)
        number, offset, parts = 0, 0, []
        reads: list[int] = []
        vectors: list[tuple[int, int, bool]] = []
        for i in sorted(range(len(taps)), key=lambda i: taps[i].site):
            tap = taps[i]
            first, after = tap.rows[0], min(tap.rows[1], count)
            if not tap.steps[0] <= step < tap.steps[1] or first >= after:
                continue
            at, last = self._heads + number * RECORD, -1
            if tap.vector is not None:
                vectors.append((at + 5, i, False))
            if tap.code is Code.READ:
                last = offset
                reads.append(at + 7)
                parts.append(Part(i, offset, after - first, tap.width))
                offset += (after - first) * tap.width
            elif tap.direction is not None:
                vectors.append((at + 7, i, True))
            stride = tap.width if tap.vector is not None and tap.vector.dim() == 2 else 0
            ints[number, :8] = (tap.code, *tap.columns, first, after, -1, stride, last)
            with np.errstate(over="ignore"):
                ints[number, 15] = self._wide(tap)
                floats[number, 8:15] = (self._number(tap), *tap.coefficients, tap.low, tap.high)
            if not heads[tap.site, 1]:
                heads[tap.site, 0] = number
            heads[tap.site, 1] += 1
            number += 1
        return _Drawing(
            since=max(edge for edge in edges if edge <= step),
            until=min(edge for edge in edges if edge > step),
            record=record,
            reads=np.array(reads, np.intp),
            vectors=tuple(vectors),
            size=offset,
            parts=tuple(parts),
            sites=frozenset(int(site) for site in np.flatnonzero(heads[:, 1])),
        )

    def _left(self, emitted: Emitted, number: int, count: int) -> list[Part]:
        """Return what a program leaves in a step with `count` rows of the request.

        In the prompt's step, the lines of all of its rows are one part.

        Args:
            emitted: what it leaves for a row.
            number: of its first value, as of `Part.tap`.
        """
        dtype, parts, offset = self.output.dtype, list[Part](), 0
        if count > 1:
            width, rows = emitted.elements(dtype), emitted.prompt_rows
            return [Part(number + len(emitted.forms), 0, rows, width)] if width and rows else []
        for i, (shape, form_dtype) in enumerate(emitted.forms):
            width = elements_of(shape, form_dtype, dtype)
            parts.append(Part(number + i, offset, 1, width, (shape, form_dtype)))
            offset += width
        return parts

    def _open(self, slot: int, now: tuple[int, ...]) -> None:
        """Open a request's program from this step on, or close it; `now` is as of `_open_programs`."""
        if tuple(self._open_programs[slot]) != now:
            self._open_programs[slot] = now
            self._programs_moved = True

    def begins_of(self, slots: Sequence[int]) -> list[int]:
        """Return where in the output the programs of some slots leave their values in this step."""
        begins: list[int] = self._open_programs[list(slots), 0].tolist()
        return begins

    def _close_rows(self) -> None:
        """Have no row of the device's tables an open program."""
        if self._rows_open:
            self.open_rows[:, 0].fill_(self.scratch)
            self.open_rows[:, 1].zero_()
            self._rows_open = False

    def _open_rows(self, table: npt.NDArray[np.int32]) -> None:
        """Say which rows of the step have an open program; `table` is as of `rows`."""
        self._programs_moved = False
        if not self._open_programs[:, 1].any():
            self._close_rows()
            return
        begin, program, first, after, width = self._open_programs[table[:, 0]].T
        row = table[:, 1]
        opened = (first <= row) & (row < after)
        found = np.empty((len(table), 2), np.int64)
        found[:, 0] = np.where(opened, begin + (row - first) * width, self.scratch)
        found[:, 1] = np.where(opened, program, 0)
        self._copy(self.open_rows[: len(table)], found)
        self._rows_open = True

    def _wide(self, tap: Tap) -> bool:
        """Return whether a tap's vector is wider than the model's numbers."""
        vector = tap.vector
        return tap.exact and self.output.itemsize < 4 and vector is not None and vector.dtype == torch.float32

    def _number(self, tap: Tap) -> float:
        """Return the number of a tap as torch has it on the device.

        The CPU rounds a number before it adds it.
        """
        if tap.code is Code.ADD and self.output.device.type == "cpu":
            return torch.tensor(tap.number, dtype=self.output.dtype).item()
        return tap.number

    def _count(self, before: frozenset[int], now: frozenset[int]) -> None:
        for site in before - now:
            self._sites[site] -= 1
            if not self._sites[site]:
                del self._sites[site]
        for site in now - before:
            self._sites[site] += 1

    def _upload(self, batch: Sequence[tuple[int, int]], padded: int) -> None:
        if len(self._dirty) > 1:
            records = torch.empty(len(self._dirty), self.length, dtype=torch.int32, device=self.records.device)
            self._copy(records, np.stack(list(self._dirty.values())))
            slots = torch.empty(len(self._dirty), dtype=torch.int64, device=self.records.device)
            self._copy(slots, np.fromiter(self._dirty, np.int64, len(self._dirty)))
            self.records.index_copy_(0, slots, records)
        else:
            for slot, record in self._dirty.items():
                self._copy(self.records[slot], record)
        self._dirty.clear()
        laid_out = (tuple(batch), padded, self._owner_of.tobytes())
        if laid_out == self._laid_out and not self._programs_moved:
            return
        self._laid_out = laid_out
        table = np.full((padded, 2), self.slots, np.int32)
        counts = np.fromiter((count for _, count in batch), np.int64, len(batch))
        total = int(counts.sum())
        if total > padded or padded > len(self.rows):
            raise ValueError(f"{total} rows in tensors of {padded}, in tables for {len(self.rows)}")
        if total == len(batch):
            table[:total, 1] = 0
            table[:total, 0] = [slot for slot, _ in batch]
        else:
            table[:total, 0] = np.repeat(np.fromiter((slot for slot, _ in batch), np.int32, len(batch)), counts)
            begins = np.repeat(np.cumsum(counts) - counts, counts)
            table[:total, 1] = np.arange(total) - begins
        self._copy(self.rows[:padded], table)
        self._copy(self.owners[:padded], self._owner_of[table[:, 0]])
        self._open_rows(table)

    def put(self, numbers: Sequence[Sequence[int]]) -> torch.Tensor:  # int64 [lists, numbers of each]
        """Return numbers on the device, without a wait."""
        values = np.array(numbers, np.int64)
        with torch.inference_mode(False):
            target = torch.empty(values.shape, dtype=torch.int64, device=self.output.device)
        self._copy(target, values)
        return target

    @staticmethod
    def _copy(target: torch.Tensor, values: npt.NDArray[Any]) -> None:  # the same shape and dtype
        """Copy numbers to the device without a wait.

        Page-locked memory of torch's allocator is not given to another copy before this copy is over.
        """
        source = torch.from_numpy(values)
        if target.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)


def _most_read(taps: Sequence[Tap]) -> int:
    """Return the most elements that taps read in one step with one row of the request."""
    begins = {tap.steps[0] for tap in taps if tap.code is Code.READ}
    return max((_read_in(taps, step, 1) for step in begins), default=0)


def _read_in(taps: Sequence[Tap], step: int, count: int) -> int:
    """Return the elements that taps read in a step with `count` rows of the request."""
    reads = (tap for tap in taps if tap.code is Code.READ and tap.steps[0] <= step < tap.steps[1])
    return sum(max(0, min(tap.rows[1], count) - tap.rows[0]) * tap.width for tap in reads)
