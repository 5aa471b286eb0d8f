"""Writes what was measured as docs/fidelity.md, and compares a new measurement with what is written there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from tests.fidelity import recorded
from tests.fidelity.measure import PHASES, Cells, conditions

# tensor-parallel size → architecture → its cells
Measured = dict[int, dict[str, Cells]]
LARGEST = 1e-4  # of an error that is called supported
CHANGED = "changed: "  # begins the row of a change
# What lies between these lines is written by hand and stays.
KEPT = ("<!-- kept: written by hand -->", "<!-- end of kept -->")

HEAD = """\
# Fidelity

Every location of every architecture against transformers' eager float32 forward on the same weights: small random
checkpoints (`interpose demo-model`), two layers, prefill and one decode step, on one rank and over two tensor-parallel
ranks. `tests/fidelity/` measures it and writes this page; the test suite measures it again and fails if a location is
supported or refused otherwise than it says here, or is further off.

A number is the order of magnitude of the largest error of any element and row under all of these conditions:

- alone, and among 8 concurrent traces, four or five of which read it, with plain requests beside them;
- prompts whole, and cut into chunks (a traced prompt is never cut, a plain one beside it is);
- prefix cache off, and on with the same prompt in it.

"R" and a number is a refusal with the message below, under all of them. There is no third verdict: the suite fails on a
value further off than {largest:.0e}, on a location that is refused under some of these conditions only, on tokens that
are not those of transformers, and on a module's location for which nothing says what it must be. An empty cell is a part
that the architecture does not have.

Changes are below as well, of one kind; of other kinds, of modules, and through the whole service with llama and gpt2 over two
ranks they are compared with the same changes in transformers in `tests/engine/` and `tests/e2e/`, to the same {largest:.0e}.

A traced prompt longer than a step of the engine runs (`max_num_batched_tokens`, 8192 by default) is refused: "the prompt has
… tokens, more than the engine runs in one step; trace a shorter one, or have max_num_batched_tokens raised where the model is
served".

An architecture that vLLM has no code for (GPT-NeoX, say) runs through its Transformers backend, whose modules do not hold
requests as rows. There `model.output`, the logits and the samples are given, and every other location is refused
(`tests/engine/test_transformers_backend.py`).
"""
BY_CONDITION = """\
The largest error of any location that is given, canonical value or module; refusals are the same under all conditions."""
CHANGES = """\
Every canonical value of the second layer and outside of the layers changed in every step (`x * 0.5 + ramp`), all at the same
time, each by a trace of its own, with plain requests beside them: the largest error of the logits of both steps against
transformers with the same change."""
RAW = """\
All of vLLM's modules: those outside of the layers, those of the second layer, and of the first layer its first norm, where
the stream begins, and what all layers share. `.input` is the first argument, `.inputs` all arguments. Where transformers has
no module of the kind, the value is compared with what follows from its modules: an attention kernel is given the rotated
queries and keys, a layer what the layer before it returned."""


def render(measured: Measured, written: str = "") -> str:
    """Return the page.

    Args:
        measured: what was measured.
        written: the page as it is, for what is written by hand in it.
    """
    refusals: list[str] = []
    parts = [HEAD.format(largest=LARGEST)]
    for ranks, columns in measured.items():
        for phase in PHASES:
            rows = dict.fromkeys(row for cells in columns.values() for row in cells if ": " not in row)
            parts += [
                f"## {phase.capitalize()}, {_ranks(ranks)}",
                _table(
                    list(columns),
                    {
                        f"`{row}`": [_shown(verdict(cells.get(row), phase), refusals) for cells in columns.values()]
                        for row in sorted(rows, key=_order)
                    },
                ),
            ]
    parts += ["## By condition", BY_CONDITION, _by_condition(measured)]
    parts += ["## Changes", CHANGES]
    parts += [_changes(columns, _ranks(ranks), refusals) for ranks, columns in measured.items()]
    parts += ["## vLLM's modules as they are", RAW]
    for column in dict.fromkeys(column for columns in measured.values() for column in columns):
        parts += [f"### {column}", _modules({ranks: columns[column] for ranks, columns in measured.items()}, refusals)]
    messages = [f"- R{i}: {message}" for i, message in enumerate(refusals, 1)]
    parts += ["## Refusals", 'Where it says "MODULE", the message has the module\'s path.', "\n".join(messages)]
    parts += [recorded.section(), kept(written)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def kept(written: str) -> str:
    """Return the part of a page that is written by hand, with the lines around it."""
    begin, end = KEPT
    inside = written.partition(begin)[2].partition(end)[0].strip("\n")
    return "\n".join([begin, *([inside] if inside else []), end])


def _ranks(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} tensor-parallel ranks"


def _table(columns: list[str], rows: dict[str, list[str]], corner: str = "") -> str:
    lines = [f"| {corner}{' ' if corner else ''}| {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
    return "\n".join([*lines, *(f"| {row} | {' | '.join(cells)} |" for row, cells in rows.items())])


_ROWS = (
    "embed resid_pre attn.q attn.k attn.v rot_q rot_k pattern z resid_mid mlp.gate mlp.up mlp.act router_logits experts "
    "expert_weights resid_post final_norm unembed"
).split()


def _order(row: str) -> tuple[int, str]:
    found = [i for i, name in enumerate(_ROWS) if f".{name}." in f".{row}."]
    return (found[0] if found else len(_ROWS)), row


def _by_condition(measured: Measured) -> str:
    """Return the table of the conditions: each with the largest error that any location has under it."""
    rows = {}
    for ranks, columns in measured.items():
        for condition in conditions():
            rows[f"{_ranks(ranks)}, {condition}"] = [
                f"{max(value for row in cells.values() if isinstance(value := row.get(condition), float)):.0e}"
                for cells in columns.values()
            ]
    return _table(list(next(iter(measured.values()))), rows)


def _changes(columns: dict[str, Cells], ranks: str, refusals: list[str]) -> str:
    """Return the table of what changes do."""
    rows = dict.fromkeys(row for cells in columns.values() for row in cells if row.startswith(CHANGED))
    lines = {
        f"`{row}`": [
            _shown(verdict(cells.get(f"{CHANGED}{row}"), "", set(PHASES)), refusals) for cells in columns.values()
        ]
        for row in sorted((row.removeprefix(CHANGED) for row in rows), key=_order)
    }
    return _table(list(columns), lines, ranks)


def _modules(by_ranks: dict[int, Cells], refusals: list[str]) -> str:
    """Return the table of one architecture's modules."""
    rows = dict.fromkeys(row for cells in by_ranks.values() for row in cells if row.startswith("raw: "))
    return _table(
        [f"{phase}, {_ranks(ranks)}" for ranks in by_ranks for phase in PHASES],
        {
            f"`{row.removeprefix('raw: ')}`": [
                _shown(verdict(cells.get(row), phase), refusals) for cells in by_ranks.values() for phase in PHASES
            ]
            for row in rows
        },
    )


def verdict(
    row: dict[str, float | str] | None, phase: str, expected: AbstractSet[str] = frozenset(conditions())
) -> float | str | None:
    """Return a row's largest error in a phase under all conditions, or its refusal; None if the architecture has no such row.

    Args:
        row: what was measured, by condition.
        phase: with which the conditions that count begin.
        expected: all conditions.

    Raises:
        AssertionError: it is refused under some conditions only, further off than is called supported, or not measured
            under a condition.
    """
    if row is None:
        return None
    assert row.keys() == expected, sorted(row.keys() ^ expected)
    found = [value for condition, value in row.items() if condition.startswith(phase)]
    refused = {value for value in found if isinstance(value, str)}
    if refused:
        assert len(refused) == 1, refused
        assert len(refused) == len(set(found)), f"refused under some conditions only: {row}"
        return refused.pop()
    largest = max(value for value in found if isinstance(value, float))
    assert largest <= LARGEST, row
    return largest


def _shown(value: float | str | None, refusals: list[str]) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        if value not in refusals:
            refusals.append(value)
        return f"R{refusals.index(value) + 1}"
    return "0" if value == 0 else f"1e{math.ceil(math.log10(value)):d}"


def differences(written: str, now: str) -> list[str]:
    """Return the lines of a page that say something else than a new measurement; errors may be smaller, or ten times larger."""
    old, new = written.splitlines(), now.splitlines()
    if len(old) != len(new):
        return [f"{len(old)} lines written, {len(new)} measured", *sorted(set(old) ^ set(new))]
    return [
        f"{before!r} was measured as {after!r}"
        for before, after in zip(old, new, strict=True)
        if not _agree(before, after)
    ]


_ERROR = re.compile(r"(?<=\| )(?:0|\de-\d+)(?= \|)")


def _agree(before: str, after: str) -> bool:
    if _ERROR.sub("x", before) != _ERROR.sub("x", after):
        return False
    pairs: Iterable[tuple[str, str]] = zip(_ERROR.findall(before), _ERROR.findall(after), strict=True)
    return all(float(now) <= max(10 * float(then), 1e-6) for then, now in pairs)


def page() -> Path:
    """Return where the table is written."""
    return Path(__file__).parents[2] / "docs" / "fidelity.md"
