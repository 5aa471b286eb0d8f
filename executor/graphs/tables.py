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
from executor.graphs.emitted import Emitted
from executor.graphs.extents import Extents
from executor.graphs.limits import GraphLimits
from executor.graphs.open_programs import OpenPrograms, left_by
from executor.graphs.operations import ALL, Refused, Tap
from executor.graphs.records import Drawing, Records, most_read, read_in
from executor.graphs.shares import Outgoing, Part, Share

LATER, PROMPT = 0, 1
_MOST_KNOWN = 64  # tuples of taps that are remembered
_MOST_TENANTS, _MOST_COUNTS = 64, 8
_NOTHING = Share(0, 0, ())


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
    drawings: dict[int, list[Drawing]] = field(default_factory=dict)
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
    share: Share = _NOTHING


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
        self._records = Records(len(self.widths), limits.taps, dtype, device.type == "cpu")
        self.length = self._records.length
        self.records = torch.zeros(slots + 1, self.length, dtype=torch.int32, device=device)
        self.rows = torch.full((rows, 2), slots, dtype=torch.int32, device=device)
        self.owners = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.flags = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._opened = OpenPrograms(slots, rows, self.scratch, device)
        self.open_rows = self._opened.rows
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
            if (
                tap.exact
                and vector is not None
                and vector.dtype != self.output.dtype
                and not self._records.is_wide(tap)
            ):
                raise Refused(f"a vector in {vector.dtype} for a model in {self.output.dtype}")
        made = _Alike(taps, rows, (most_read(taps), read_in(taps, 0, rows) if rows > 1 else 0))
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
                    start = self.bank.add(tenant, vector, wide=i == 0 and self._records.is_wide(tap))
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
        self._opened.close(slot)
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

    def begins_of(self, slots: Sequence[int]) -> list[int]:
        """Return where in the output the programs of some slots leave their values in this step."""
        return self._opened.begins_of(slots)

    def edge(self, slot: int) -> int:
        """Return the step in which a request's record is next to be written anew."""
        return self._joined[slot].until

    def blank(self, rows: int) -> None:
        """Have the next pass of so many rows run no tap."""
        self.rows[:rows].fill_(self.slots)
        self.owners[:rows].fill_(-1)
        self._opened.close_rows()
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
        elif area == PROMPT and joined.starts[PROMPT] < 0 and read_in(alike.taps, step, count):
            raise Refused("a prompt's rows come after the prompt")
        start, offset, of_program = joined.starts[area], 0, list[Part]()
        if emitted is not None and emitted.steps[0] <= step < emitted.steps[1]:
            if count > 1 and (emitted.prompt is None or step or count != alike.rows):
                raise Refused(f"{count} rows of a request whose program is for one")
            first, after = emitted.prompt if count > 1 and emitted.prompt is not None else (0, 1)
            width = emitted.elements(self.output.dtype)
            begin = start + (self.split if area == PROMPT else 0) if width else self.scratch
            self._opened.open(slot, (begin, emitted.program, first, after, width))
            of_program = left_by(emitted, len(alike.taps), count, self.output.dtype)
            offset = (after - first) * width
        else:
            self._opened.close(slot)
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

    def _drawn(self, alike: _Alike, step: int, count: int) -> Drawing:
        """Return the drawing of requests with the same taps, for a step with `count` rows."""
        if count not in alike.drawings and len(alike.drawings) >= _MOST_COUNTS:
            alike.drawings.clear()
        drawings = alike.drawings.setdefault(count, [])
        found = next((one for one in drawings if one.since <= step < one.until), None)
        if found is None:
            found = self._records.draw(alike.taps, step, count)
            drawings.append(found)
        return found

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
        if laid_out == self._laid_out and not self._opened.moved:
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
        opened = self._opened.of_step(table)
        if opened is not None:
            self._copy(self.open_rows[:padded], opened)

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
