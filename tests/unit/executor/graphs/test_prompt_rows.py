"""Blocks that change some rows of their prompts in the tables give what their greenlets give, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from executor.block.fiber import run_as
from executor.graphs.lower import Lowerer
from executor.graphs.operations import Refused
from executor.graphs.tables import PROMPT, Tables
from executor.graphs.taps import Taps
from executor.graphs.template import Lowered
from executor.plan.compile import Context, compile_region, survey
from executor.plan.deliver import Delivery
from executor.plan.eligible import regions
from executor.plan.ir import Plan
from executor.plan.refuse import Refused as Unplanned
from executor.plan.run import Member, inputs_of, leave
from tests.unit.executor.graphs.samples import CPU, LIMITS
from tests.unit.executor.graphs.test_blocks import NUMBERS, SITES, names, same
from tests.unit.executor.graphs.test_random_blocks import LOCATIONS
from tests.unit.executor.plan.bench import HIDDEN, SOURCES, TREE, Forms, Request, Run, hooked
from tests.unit.executor.plan.test_random import FLAGS

ROWS, REQUESTS = 6, 2
FORMS = Forms(rows=ROWS)


def inputs() -> torch.Tensor:  # [requests * rows, hidden]
    return torch.randn(REQUESTS * ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))


def named(number: int) -> dict[str, object]:
    made = torch.Generator().manual_seed(number + 10)
    some = {"w": torch.randn(HIDDEN, generator=made), "many": torch.randn(ROWS, HIDDEN, generator=made)}
    return {**names(number), **some}


class InTables(Run):
    """The requests of one batch, whose blocks are in the tables in the prompt's step."""

    def run(self) -> list[str]:
        """Run the step; return the operations of the taps of one request."""
        lowerer = Lowerer(NUMBERS)
        tables = Tables([site.width for site in SITES], REQUESTS, 64, torch.float32, CPU, LIMITS)
        taps = Taps({path: module for module, path in TREE.paths.items()}, SITES, tables)
        lowered = []
        for i, request in enumerate(self.requests):
            [region] = regions(request.unit)
            environment = survey(region, request.names, SOURCES.get)
            registry = request.registry
            request.member = Member(environment, request.names, registry.mark, registry.mark_all)
            context = Context(TREE, FORMS, run_as, SOURCES.get)
            plan = compile_region(region, request.names, frozenset(request.writes), 0, context)
            lowered.append(lowerer.lower(plan, inputs_of(plan, request.member), (0, 1)))
            tables.join(i, str(i), lowered[-1].taps, ROWS)
            self.plans.append(plan)
        outgoing = tables.begin_step([(i, ROWS) for i in range(REQUESTS)], dict.fromkeys(range(REQUESTS), 0), 12)
        ends = torch.tensor([ROWS - 1, 2 * ROWS - 1])
        with taps.hooked(tables.sites):
            _, logits = hooked(lambda path, kind, value: None, inputs, ends)
        self.outputs.append(logits.clone())
        for i, (request, mine, plan) in enumerate(zip(self.requests, lowered, self.plans, strict=True)):
            share, read = outgoing[PROMPT].shares.get(i), {}
            for part in share.parts if share is not None else ():
                start = tables.split + share.start + part.at
                values = tables.output[start : start + part.rows * part.width]
                read[part.tap] = values.view(1, part.rows, part.width).clone()
            kept = mine.values(read.__getitem__, 1)
            assert request.member is not None
            give = Delivery(lambda output, kept=kept: kept[output][0].clone(), 0, request.member.mark)
            for append in plan.appends:
                give.add(append, request.member.environment)
            leave(plan, request.member, give)
            request.member.deliver()
        return [tap.code.name for tap in lowered[0].taps]


def compare(text: str) -> list[str]:
    """Compare a block in the tables with its greenlet; return its taps.

    Raises:
        Refused: the tables do not take it.
    """
    made = InTables(text, [named(i) for i in range(REQUESTS)])
    taps = made.run()
    plain = Run(text, [named(i) for i in range(REQUESTS)]).go([inputs()])
    same(plain, made)
    return taps


X, S, Y = "model.layers[1].output[0]", "model.layers[1].resid_post", "model.layers[1].mlp.output"
BLOCKS = {
    f"{X}[-1] += w": "ADD",
    f"{X}[3] = w": "SET",
    f"{X}[2:5] *= 0": "MULTIPLY",
    f"{X}[[1, 4]] = w": "SET SET",
    f"{S}[[3, 4, 0]] += w": "ADD ADD",
    f"h = {S}\nh[::2] = 0\nkept = [h.save()]": "SET SET SET READ",
    f"h = {S}\nh[-2:, 3:9] = w[:6]\nlast = h[-1].save()": "SET READ",
    f"{Y}[:, 3] = w[3]": "SET",
    f"{Y}[:, 3] = many[:, 3]": "SET",
    f"{Y} += many": "ADD",
    f"{Y}[1:4] = many[:3]": "SET",
    f"{Y}[[4, 5, 1]] -= many[:3]": "ADD ADD",
    f"{Y}[-1, [2, 3, 9]] = 0": "SET SET",
    f"{Y}[-3:].clamp_(-0.5, 0.25)": "CLAMP",
    f"h = {Y}\na = h[-1].save()\nh[-1] += w\nb = h[-1].save()\nc = h.save()": "READ ADD READ READ",
    f"h = {Y}\nh[1:5][1:3] = w\nkept = [h[2].save(), h[1:][0].save()]": "SET READ READ",
    f"h = {Y}\nh[0], h[1] = w, 2 * w": "SET SET",
    f"h = {Y}\nh[:-1] = 0\n{X}[-1:] = h[-1:]": "",
    f"h = {Y}\nh[-1] = h[0]": "",
    f"h = {Y}\nh[[1, 1]] += w": "",
    f"h = {Y}\nh[1:] = h[:-1].clone()": "",
}


@pytest.mark.parametrize("text", BLOCKS)
def test_some_rows_of_a_prompt(text: str) -> None:
    if not BLOCKS[text]:
        with pytest.raises(Refused):
            compare(text)
        return
    assert compare(text) == BLOCKS[text].split()


class Author:
    """Writes blocks whose changes are mostly operations of the tables on some rows."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def text(self) -> str:
        lines: list[str] = ["kept, table, last = [].save(), {}.save(), None"]
        for i in sorted(self.source.sample(range(len(LOCATIONS)), self.source.randint(1, 4))):
            lines.append(f"h = {LOCATIONS[i]}")
            lines += [self.statement(LOCATIONS[i]) for _ in range(self.source.randint(1, 5))]
        return "\n".join(lines) + "\n"

    def part(self) -> tuple[str, int, int]:
        """Return a subscript, how many rows it has (0: no dimension), and how many columns."""
        rows, count = self.source.choice(
            [("-1", 0), ("0", 0), ("3", 0), (":", ROWS), ("2:5", 3), ("-2:", 2), (":-1", ROWS - 1), ("::2", 3), ("1::4", 2),
             ("[1, 4]", 2), ("[5, 0, 1]", 3), ("[-1]", 1), ("4:99", 2)]
        )  # fmt: skip
        columns, width = self.source.choice([("", HIDDEN), ("", HIDDEN), (", 3:9", 6), (", -4:", 4), (", :", HIDDEN)])
        return (f"[{rows}]", count, HIDDEN) if rows[0] == "[" else (f"[{rows}{columns}]", count, width)

    def operand(self, count: int, width: int) -> str:
        number = self.source.choice(["0.5", "-2", "0", "alpha", "scale"])
        vector = self.source.choice(["v", "mean", "(alpha * w)", "(w - mean)"]) + f"[:{width}]"
        several = f"many[:{count}, :{width}]" if count > 1 else vector
        return self.source.choice([number, vector, vector, several])

    def kept(self) -> str:
        return self.source.choice(
            ["h", "h.clone()", "h[-1]", "h[2:4]", "h[:, 3:9]", "h[[1, 4]]", "h.double()", "h[1:] - mean", "h[::2]", "(h > 0)",
             "h.mean(0)", "h[0, 2]", "h[-1:, 4:7]", "h.flip(0)", "h.reshape(-1)[:7]", "torch.where(h > mean, h, mean)"]
        )  # fmt: skip

    def statement(self, place: str) -> str:
        part, count, width = self.part()
        forms = [
            f"kept.append({self.kept()})",
            f"kept.append(({self.kept()}).save())",
            f"table[{self.source.random()}] = {self.kept()}",
            *(f"h{part} {sign} {self.operand(count, width)}" for sign in ("=", "+=", "-=", "*=", "=", "+=")),
            f"h{part if part[1] != '[' else '[-1]'}.clamp_(-0.5, 0.75)",
            "last = h.save()",
            "x = h[1:5]\nx[-1] += w\nx[0] = 0\nkept.append(x.clone())",
        ]
        if not place.endswith("[0]"):
            forms += [f"{place} = {place} * 0.5\nh = {place}", f"{place} = h + w\nh = {place}"]
        return self.source.choice(forms)


taken = []


@settings(max_examples=80, **FLAGS)
@given(st.randoms(use_true_random=False))
def compare_random(source: random.Random) -> None:
    text = Author(source).text()
    note(text)
    try:
        compare(text)
    except Refused as refused:
        note(str(refused))
        taken.append(False)
        return
    taken.append(True)


def test_random_blocks_of_a_prompt() -> None:
    compare_random()
    assert sum(taken) > len(taken) // 4, (sum(taken), len(taken))


# Lengths between two others.

SHORT, LONG = 6, 11
PLANNED = {rows: Forms(rows=rows) for rows in range(SHORT, LONG + 1)}


def planned(text: str, rows: int) -> tuple[Plan, dict[int, torch.Tensor]]:
    request = Request(text, named(0), 0)
    [region] = regions(request.unit)
    member = Member(survey(region, request.names, SOURCES.get), request.names, lambda *_: None, lambda *_: None)
    context = Context(TREE, PLANNED[rows], run_as, SOURCES.get)
    plan = compile_region(region, request.names, frozenset(request.writes), 0, context)
    return plan, inputs_of(plan, member)


def content(made: Lowered) -> object:
    """Return all of what a plan has become."""
    taps = [{**vars(tap), "vector": None if tap.vector is None else tap.vector.tolist()} for tap in made.taps]
    return taps, made.reads, {output: value.tolist() for output, value in made.known.items()}


def between_lengths(text: str) -> int:
    """Compare the taps for lengths between two others with those of a plan of their own.

    Returns:
        For how many lengths they follow from the others.
    """
    lowerer, found = Lowerer(NUMBERS), 0
    (low, constants), (high, _) = planned(text, SHORT), planned(text, LONG)
    for rows in range(SHORT + 1, LONG):
        try:
            made = lowerer.lower_between(low, high, rows, constants, (0, 1))
        except Refused:
            continue
        found += 1
        plan, own = planned(text, rows)
        assert content(made) == content(lowerer.lower(plan, own, (0, 1))), (text, rows)
        assert (plan.appends, plan.results, plan.dropped) == (low.appends, low.results, low.dropped)
    return found


@pytest.mark.parametrize("text", [text for text, taps in BLOCKS.items() if taps and "many" not in text])
def test_lengths_between_two_others(text: str) -> None:
    """In a longer prompt every second row has more operations, and a repeated number is longer."""
    assert between_lengths(text) == (0 if "::2" in text or "w[3]" in text else LONG - SHORT - 1)


@pytest.mark.parametrize(
    ("text", "follow"),
    [
        (f"h = {Y}\nif len(h) > 8:\n    h *= 2\nkept = h.save()", 0),
        (f"h = {Y}\nh[h.shape[0] // 2] = w\n", 0),
        (f"h = {Y}\nparts = h.unbind(0)\nif len(parts) > 8:\n    h *= 2\n", 0),
        (f"h = {Y}\nif h[-1].storage_offset() > 100:\n    h *= 2\n", 0),
        (f"h = {Y}\nn = h.numel()\nh[-1] = n\n", 0),
        (f"h = {Y}\nfor row in h:\n    row *= 2\n", 0),
        (f"h = {Y}\nkept = [h[-1].save(), len(h)]\n", 0),
        (f"h = {Y}\nh[5] += w\nh[-3] *= 2\n", 3),  # for 8 rows they are the same row
        (f"h = {Y}\nh[8:] = w\nkept = h.save()\n", 0),  # not there in a short prompt
        (f"h = {Y}\nh[:8] = w\nkept = h.save()\n", 0),
        (f"h = {Y}\nh[1:-1][1:-1] *= alpha\nlast = h[-2].save()\n", 4),
    ],
)
def test_lengths_that_may_be_otherwise(text: str, follow: int) -> None:
    assert between_lengths(text) == follow


@settings(max_examples=40, **FLAGS)
@given(st.randoms(use_true_random=False))
def compare_lengths(source: random.Random) -> None:
    text = Author(source).text()
    note(text)
    try:
        follows.append(between_lengths(text) > 0)
    except Unplanned:
        follows.append(False)


follows: list[bool] = []


def test_random_blocks_for_lengths_between() -> None:
    compare_lengths()
    assert sum(follows) > len(follows) // 8, (sum(follows), len(follows))
