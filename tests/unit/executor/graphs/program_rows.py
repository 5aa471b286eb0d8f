"""A program for the rows of a prompt, beside the same program for so many requests of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from executor.block.fiber import run_as
from executor.graphs.by_rows import by_rows
from executor.graphs.emitted import unpacked
from executor.graphs.operations import ALL
from executor.graphs.programs import Programs
from executor.graphs.shares import Share
from executor.graphs.tables import LATER, PROMPT
from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import regions
from executor.plan.ir import Plan
from executor.plan.run import Member
from tests.unit.executor.graphs.rides import device, machine
from tests.unit.executor.plan import bench

PROMPT_ROWS, PADDED, SLOT = 5, 12, 6
BEFORE = 3  # rows of other requests before the prompt's
X = "model.layers[1].output[0]"
TEXTS = {
    "all rows": f"h = {X}\nf = torch.tanh(h * v)\nh[:] = torch.where(f > 0, f, h)\nkept.append(f.abs())",
    "the last row": f"h = {X}\nh[-1] = torch.where(h[-1] > 0, h[-1] * v, 0)\nkept.append(h[-1].save())",
    "the first rows": f"h = {X}\nf = torch.tanh(h * v)\nkept.append(f[:3])\nkept.append(f[0].amax())",
    "indices": f"h = {X}\nkept.append((h * v).argmax(-1))\nkept.append(h.sqrt().isnan())",
}
Run = Callable[[Programs, Sequence[str], torch.Tensor], torch.Tensor]


def check(text: str, run: Run) -> None:
    """Compare the rows of a prompt with requests of one row each, bit for bit.

    Args:
        text: the body of a loop, whose operations are elementwise.
        run: runs the model with programs, [rows, hidden].
    """
    programs = machine()
    tables = programs._tables
    kind = {"dtype": tables.output.dtype, "device": device()}
    made = torch.Generator().manual_seed(len(text))
    vector = torch.randn(bench.HIDDEN, generator=made).to(**kind)
    x = torch.randn(PADDED, bench.HIDDEN, generator=made).to(**kind)
    (prompt, _), (one, member) = planned(text, PROMPT_ROWS, vector), planned(text, 1, vector)
    how = by_rows(prompt, one)
    rows = range(BEFORE + how.first, BEFORE + how.after)

    def gone(slots: Sequence[int]) -> None:
        for slot in slots:
            tables.leave(slot)
            programs.leave(slot)

    found = programs.join(SLOT, "a", one, member.environment, (0, ALL), how)
    tables.join(SLOT, "a", (), PROMPT_ROWS, found.emitted)
    batch = [(tables.slots, BEFORE), (SLOT, PROMPT_ROWS), (tables.slots, PADDED - BEFORE - PROMPT_ROWS)]
    left = tables.begin_step(batch, {SLOT: 0}, PADDED)
    assert left[PROMPT].shares.keys() == {SLOT} and not left[LATER].shares
    opened = tables.open_rows[:, 1].nonzero()[:, 0].tolist()
    assert opened == list(rows)
    hidden = run(programs, [found.key], x)
    assert found.in_prompt is not None
    mine = found.in_prompt.values(lambda _: lines(tables.output[tables.split :], left[PROMPT].shares[SLOT]), 1)
    gone([SLOT])

    slots = range(len(rows))
    for slot in slots:
        alone = programs.join(slot, "a", one, member.environment, (0, ALL))
        assert alone.key == found.key, "another program"
        tables.join(slot, "a", (), 1, alone.emitted)
    batch = [(row - rows.start if row in rows else tables.slots, 1) for row in range(PADDED)]
    left = tables.begin_step(batch, dict.fromkeys(slots, 3), PADDED)
    assert torch.equal(hidden, run(programs, [found.key], x))
    for output, of in how.outputs.items():
        each = [lone(alone.lowered.reads[output][0], tables.output, left[LATER].shares[slot]) for slot in slots]
        some = each[of.first - how.first : of.after - how.first]
        value = some[0] if of.dim is None else torch.cat(some, of.dim)
        assert torch.equal(mine[output][0], value), output
    gone(slots)
    plain = [i for i in range(PADDED) if i not in rows]
    tables.begin_step([(tables.slots, PADDED)], {}, PADDED)
    assert not tables.open_rows[:, 1].any()
    assert torch.equal(hidden[plain], run(programs, [found.key], x)[plain]), "rows of other requests"


def planned(text: str, rows: int, vector: torch.Tensor) -> tuple[Plan, Member]:  # [hidden]
    """Return the plan of a loop's body for so many rows, and what a request's block reads."""
    body = "".join(f"    {line}\n" for line in text.splitlines())
    names = {"kept": [], "torch": torch, "v": vector}
    request = bench.Request(f"for step in tracer.iter[:]:\n{body}", names, 0)
    [region] = regions(request.unit)
    environment = survey(region, request.names, bench.SOURCES.get)
    context = Context(bench.TREE, bench.Forms(rows=rows), run_as, bench.SOURCES.get)
    plan = compile_region(region, request.names, frozenset(["kept"]), 0, context)
    return plan, Member(environment, request.names, request.registry.mark, request.registry.mark_all)


def lines(area: torch.Tensor, share: Share) -> torch.Tensor:  # [elements] -> [1, rows, elements]
    """Return what a program left of a prompt's rows."""
    [part] = share.parts
    return area[share.start : share.start + part.rows * part.width].view(1, part.rows, part.width)


def lone(number: int, area: torch.Tensor, share: Share) -> torch.Tensor:  # [elements] -> [...]
    """Return a value that a program left of a request with one row."""
    part = next(one for one in share.parts if one.tap == number)
    assert part.form is not None
    at = share.start + part.at
    return unpacked(area[None, at : at + part.width], *part.form)[0]
