"""Writes what was measured as docs/fidelity.md, reads that page, and compares a new measurement with what it says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.layouts import Layout
from tests.fidelity import recorded
from tests.fidelity.architectures import LIGHT, UNCUT
from tests.fidelity.measure import CHANGED, PHASES, SCHEDULINGS, START, Cells, Scheduling, conditions

LARGEST = 1e-4  # of an error that is called supported
RAW = "raw: "  # begins the row of a module
# What lies between these lines is written by hand and stays.
KEPT = ("<!-- kept: written by hand -->", "<!-- end of kept -->")

HEAD = """\
# Fidelity

Every location of every architecture against transformers' eager float32 forward on the same weights: small random
checkpoints (`interpose demo-model`), two layers, prefill and one decode step, on a CPU. "TP" is the number of tensor-parallel
ranks, "PP" of pipeline stages: with two stages each of the layers is on another one. Four query heads, and two key/value heads
where the architecture has fewer of them, so that with TP 4, and with one head from TP 2 on, ranks hold copies.

A number is the order of magnitude of the largest error of any element and row under all of these conditions:

- alone, and among 8 concurrent traces, four or five of which read it, with plain requests beside them;
- prompts whole, and cut into chunks (a traced prompt that fits a step is not cut, a plain one beside it is);
- prefix cache off, and on with the same prompt in it.

"R" and a number is a refusal with the message below, under all of them. There is no third verdict: the measurement fails on a
value further off than {largest:.0e}, on a location that is refused under some of these conditions only, on tokens that
are not those of transformers, and on a module's location for which nothing says what it must be. An empty cell is a part
that the model does not have: modules that layers share are one module on each pipeline stage.{light}

`make fidelity` measures everything and writes this page; `make fidelity LAYOUTS="'PP 2' 'TP 4'"` measures these layouts and
leaves the others as they are. A number is the record of one processor: another processor rounds elsewhere, and may measure
another order of magnitude below {largest:.0e}. The test suite measures again, and fails if a location is supported or refused
otherwise than it says here, or is further off than {largest:.0e}:

{suite}

Changes are below as well, of one kind; of other kinds, of modules, and through the whole service over two ranks and over two
stages they are compared with the same changes in transformers in `tests/engine/` and `tests/e2e/`, to the same {largest:.0e}.

`python -m tests.fidelity --checkpoint PATH` measures any local checkpoint of these architectures in the same way, and
prints JSON: each location in each condition with its error or refusal, the versions, and the command that measures it
again.

A traced prompt longer than a step of the engine (`max_num_batched_tokens`, 8192 by default) comes in chunks, and its block
sees it whole. `tests/engine/interleave/test_chunks.py` compares values and changes with transformers at lengths around the
edges of chunks, beside other requests, over two ranks, and with an eviction in the middle; `test_long_prompt.py` does so at
32,000 tokens. What cannot be shown to be right in chunks is refused before the request starts ([blocks.md](blocks.md#long-
prompts)).

An architecture that vLLM has no code for (GPT-NeoX, say) runs through its Transformers backend, whose modules do not hold
requests as rows. There `model.output`, the logits and the samples are given, and every other location is refused
(`tests/engine/model/test_transformers_backend.py`).
"""
BY_LAYOUT = """\
The largest error of any location, then how many locations are given and how many refused, each phase counted."""
BY_CONDITION = """\
The largest error of any location that is given, canonical value or module; refusals are the same under all conditions."""
CHANGES = """\
Every canonical value of the second layer (of another layer, where the second has no such value) and outside of the layers changed
in every step (`x * 0.5 + ramp`), all at the same time, each by a trace of its own, with plain requests beside them: the largest
error of the logits of both steps against transformers with the same change."""
MODULES = """\
All of vLLM's modules: those outside of the layers, those of the second layer, and of the first layer its first norm, where
the stream begins, and what all layers share. `.input` is the first argument, `.inputs` all arguments. Where transformers has
no module of the kind, the value is compared with what follows from its modules: an attention kernel is given the rotated
queries and keys, a layer what the layer before it returned."""


@dataclass
class Column:
    """What is said of one architecture in one layout.

    Attributes:
        rows: row → phase → the order of magnitude of its error, or the message that it is refused with. A change is of both
            phases, under "".
        conditions: condition → the largest error of any location under it.
        refused: why an engine does not start like this; "" if it does.
    """

    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    refused: str = ""


# layout → column → what is said of it
Page = dict[Layout, dict[str, Column]]


def column(cells: Cells, schedulings: Sequence[Scheduling] = SCHEDULINGS) -> Column:
    """Return what a measurement says.

    Args:
        cells: what was measured.
        schedulings: under which.
    """
    if START in cells:
        return Column(refused=str(cells[START][""]))
    under = conditions(schedulings)
    made = Column()
    for row, found in cells.items():
        if row.startswith(CHANGED):
            made.rows[row] = {"": verdict(found, "", set(PHASES))}
        else:
            made.rows[row] = {phase: verdict(found, phase, set(under)) for phase in PHASES}
    for condition in under:
        largest = max(error for row in cells.values() if isinstance(error := row.get(condition), float))
        made.conditions[condition] = f"{largest:.0e}"
    return made


def added(before: Column, now: Column) -> Column:
    """Return what is said of a column with further rows, measured under all conditions."""
    largest = {
        condition: max(before.conditions.get(condition, error), error, key=float)
        for condition, error in now.conditions.items()
    }
    return Column(before.rows | now.rows, before.conditions | largest, before.refused)


def verdict(row: dict[str, float | str], phase: str, expected: AbstractSet[str] = frozenset(conditions())) -> str:
    """Return the order of magnitude of a row's largest error in a phase under all conditions, or its refusal.

    Args:
        row: what was measured, by condition.
        phase: with which the conditions that count begin.
        expected: all conditions.

    Raises:
        AssertionError: it is refused under some conditions only, further off than is called supported, or not measured
            under a condition.
    """
    assert row.keys() == expected, sorted(row.keys() ^ expected)
    found = [value for condition, value in row.items() if condition.startswith(phase)]
    refused = {value for value in found if isinstance(value, str)}
    if refused:
        assert len(refused) == 1, refused
        assert len(refused) == len(set(found)), f"refused under some conditions only: {row}"
        return refused.pop()
    largest = max(value for value in found if isinstance(value, float))
    assert largest <= LARGEST, row
    return "0" if largest == 0 else f"1e{math.ceil(math.log10(largest)):d}"


def render(said: Page, suite: str, written: str = "") -> str:
    """Return the page.

    Args:
        said: what it says of each layout and column.
        suite: which of it the test suite measures again.
        written: the page as it is, for what is written by hand in it.
    """
    names = list(dict.fromkeys(name for columns in said.values() for name in columns))
    refusals = _Refusals()
    parts = [HEAD.format(largest=LARGEST, suite=suite, light=_said_of_light())]
    parts += ["## By layout", BY_LAYOUT, _by_layout(said, names, refusals)]
    for layout, columns in said.items():
        for phase in PHASES:
            rows = sorted((row for row in _rows(columns) if ": " not in row), key=_order)
            table = {
                f"`{row}`": [refusals.shown(columns[name].rows.get(row, {}).get(phase)) for name in columns]
                for row in rows
            }
            parts += [f"## {phase.capitalize()}, {layout.name}", _table(list(columns), table)]
    parts += ["## By condition", BY_CONDITION, _by_condition(said, names), "## Changes", CHANGES]
    for layout, columns in said.items():
        rows = sorted((row.removeprefix(CHANGED) for row in _rows(columns) if row.startswith(CHANGED)), key=_order)
        changes = {
            f"`{row}`": [refusals.shown(columns[name].rows.get(CHANGED + row, {}).get("")) for name in columns]
            for row in rows
        }
        parts.append(_table(list(columns), changes, layout.name))
    parts += ["## vLLM's modules as they are", MODULES]
    for name in names:
        found = {layout: columns[name] for layout, columns in said.items() if name in columns}
        if any(row.startswith(RAW) for one in found.values() for row in one.rows):
            parts += [f"### {name}", _modules(found, refusals)]
    parts += ["## Refusals", 'Where it says "MODULE", the message has the module\'s path.', refusals.listed()]
    parts += [recorded.section(), kept(written)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _said_of_light() -> str:
    """Return what the page says of its light columns."""
    if not LIGHT:
        return ""
    said = f"\nOf {', '.join(LIGHT)} only canonical values\nare measured, in the first two layouts."
    uncut = [name for name in LIGHT if name in UNCUT]
    if uncut:
        said += (
            f"\nPrompts of {', '.join(uncut)} are whole and uncached under all conditions, because vLLM's CPU build cuts and "
            "caches no\nprompt of latent attention."
        )
    return said


def kept(written: str) -> str:
    """Return the part of a page that is written by hand, with the lines around it."""
    begin, end = KEPT
    inside = written.partition(begin)[2].partition(end)[0].strip("\n")
    return "\n".join([begin, *([inside] if inside else []), end])


class _Refusals:
    """Numbers messages in the order in which the page first has them."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def shown(self, verdict: str | None) -> str:
        """Return what a cell has for a verdict."""
        if verdict is None or is_error(verdict):
            return verdict or ""
        if verdict not in self._messages:
            self._messages.append(verdict)
        return f"R{self._messages.index(verdict) + 1}"

    def listed(self) -> str:
        return "\n".join(f"- R{i}: {message}" for i, message in enumerate(self._messages, 1))


def _rows(columns: dict[str, Column]) -> list[str]:
    return list(dict.fromkeys(row for one in columns.values() for row in one.rows))


def _table(columns: list[str], rows: dict[str, list[str]], corner: str = "") -> str:
    lines = [f"| {corner}{' ' if corner else ''}| {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
    return "\n".join([*lines, *(f"| {row} | {' | '.join(cells)} |" for row, cells in rows.items())])


_ROWS = (
    "embed resid_pre attn_in attn.q attn.k attn.v norm_q norm_k norm_v rot_q rot_k pattern z attn_out resid_mid "
    "mlp_in mlp.gate mlp.up mlp.act router_logits experts expert_weights expert_act expert_out mlp_out resid_post final_norm "
    "unembed"
).split()


def _order(row: str) -> tuple[int, str]:
    found = [i for i, name in enumerate(_ROWS) if f".{name}." in f".{row}."]
    return (found[0] if found else len(_ROWS)), row


def _by_layout(said: Page, names: list[str], refusals: _Refusals) -> str:
    def shown(one: Column) -> str:
        if one.refused:
            return refusals.shown(one.refused)
        verdicts = [said for row, found in one.rows.items() if not row.startswith(CHANGED) for said in found.values()]
        given = sum(map(is_error, verdicts))
        largest = max(one.conditions.values(), key=float)
        return f"{largest}, {given} and {len(verdicts) - given}"

    return _table(
        names,
        {
            layout.name: [shown(columns[name]) if name in columns else "" for name in names]
            for layout, columns in said.items()
        },
    )


def _by_condition(said: Page, names: list[str]) -> str:
    rows = {
        f"{layout.name}, {condition}": [columns.get(name, Column()).conditions.get(condition, "") for name in names]
        for layout, columns in said.items()
        for condition in conditions()
    }
    return _table(names, rows)


def _modules(layouts: dict[Layout, Column], refusals: _Refusals) -> str:
    """Return the table of one architecture's modules."""
    rows = dict.fromkeys(row for one in layouts.values() for row in one.rows if row.startswith(RAW))
    return _table(
        [f"{phase}, {layout.name}" for layout in layouts for phase in PHASES],
        {
            f"`{row.removeprefix(RAW)}`": [
                refusals.shown(one.rows.get(row, {}).get(phase)) for one in layouts.values() for phase in PHASES
            ]
            for row in rows
        },
    )


def parse(page: str) -> Page:
    """Return what a page says."""
    messages = dict(re.findall(r"^- (R\d+): (.*)$", page, re.MULTILINE))
    said: Page = {}

    def at(layout: str, name: str) -> Column:
        return said.setdefault(Layout.named(layout), {}).setdefault(name, Column())

    def say(layout: str, name: str, row: str, phase: str, cell: str) -> None:
        if cell:
            at(layout, name).rows.setdefault(row, {})[phase] = messages.get(cell, cell)

    for title, corner, names, rows in _tables(page.partition("\n## On GPUs\n")[0]):
        phase, _, layout = title.partition(", ")
        for row, cells in rows:
            for name, cell in zip(names, cells, strict=True):
                if title == "By layout":
                    if cell:
                        at(row, name).refused = messages.get(cell, "")
                elif title == "By condition":
                    where, _, condition = row.partition(", ")
                    if cell:
                        at(where, name).conditions[condition] = cell
                elif title == "Changes":
                    say(corner, name, CHANGED + row, "", cell)
                elif phase.lower() in PHASES and layout:
                    say(layout, name, row, phase.lower(), cell)
                else:  # of modules: the title is the architecture, and over a column are the phase and the layout
                    when, _, where = name.partition(", ")
                    say(where, title, RAW + row, when, cell)
    return said


def _tables(page: str) -> Iterator[tuple[str, str, list[str], list[tuple[str, list[str]]]]]:
    """Yield each table with the title above it: its first cell, the names of its columns, and its rows."""
    title, lines = "", []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip().strip("`") for cell in line[1:-1].split("|")])
        elif lines:
            (corner, *names), _, *rows = lines
            yield title, corner, names, [(row, cells) for row, *cells in rows]
            lines = []
        if line.startswith("#"):
            title = line.lstrip("# ")


def disagreements(written: Page, now: Page) -> list[str]:
    """Return where a page and a measurement of all or some of it say different things.

    They agree on a location if both give it, with any error up to `LARGEST`, or if both refuse it with the same message: the
    order of magnitude depends on the processor. What was measured under some conditions only is compared under these.
    """
    found = []
    for layout, columns in now.items():
        for name, one in columns.items():
            said = written.get(layout, {}).get(name, Column())
            pairs: dict[str, tuple[str | None, str | None]] = {"start": (said.refused, one.refused)}
            for row in dict.fromkeys([*said.rows, *one.rows]):
                for phase in dict.fromkeys([*said.rows.get(row, {}), *one.rows.get(row, {})]):
                    pairs[f"{row} {phase}"] = (said.rows.get(row, {}).get(phase), one.rows.get(row, {}).get(phase))
            pairs |= {condition: (said.conditions.get(condition), error) for condition, error in one.conditions.items()}
            found += [
                f"{layout.name}, {name}, {where}: {before!r} was measured as {after!r}"
                for where, (before, after) in pairs.items()
                if not _agree(before, after)
            ]
    return found


def is_error(said: str) -> bool:
    """Whether it is an error's order of magnitude, and no refusal."""
    return re.fullmatch(r"0|\de[-+]\d+", said) is not None


def _agree(before: str | None, after: str | None) -> bool:
    if before is None or after is None or not (is_error(before) and is_error(after)):
        return before == after
    return float(after) <= LARGEST


def page() -> Path:
    """Return where the table is written."""
    return Path(__file__).parents[2] / "docs" / "fidelity.md"
