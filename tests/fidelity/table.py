"""Writes what was measured as docs/fidelity.md, and compares a new measurement with what is written there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from tests.fidelity.measure import COLUMNS, Cells
from tests.oracle.checkpoints import ARCHITECTURES as RAW

# tensor-parallel size → architecture → its cells
Measured = dict[int, dict[str, Cells]]
PHASES = ("prefill", "decode")
LARGEST = 1e-4  # of an error that is called supported

HEAD = """\
# Fidelity

Every location of every architecture against transformers' eager float32 forward on the same weights: small random
checkpoints (`interpose demo-model`), two layers, prefill and one decode step. `tests/fidelity/` measures it and writes this
page; the test suite measures it again and fails if a location is supported or refused otherwise than it says here, or is
further off.

A number is the order of magnitude of the largest error of any element and row under all of these conditions:

- alone, and among 8 concurrent traces with plain requests beside them;
- prompts whole, and cut into chunks (a traced prompt is never cut, a plain one beside it is);
- prefix cache off, and on with the same prompt in it.

"R" and a number is a refusal with the message below, under all of them. There is no third verdict: the suite fails on a
value further off than {largest:.0e}, on a location that is refused under some of these conditions only, and on tokens that
are not those of transformers. An empty cell is a part that the architecture does not have.

What changes of locations do is compared with the same changes in transformers elsewhere (`tests/engine/`, `tests/e2e/`), to
the same {largest:.0e}. Over two ranks, llama and gpt2 are measured in `tests/e2e/`, through the whole service.

A traced prompt longer than a step of the engine runs (`max_num_batched_tokens`, 8192 by default) is refused: "the prompt has
… tokens, more than the engine runs in one step; trace a shorter one, or have max_num_batched_tokens raised where the model is
served".
"""


def render(measured: Measured) -> str:
    """Return the page."""
    refusals: list[str] = []
    parts = [HEAD.format(largest=LARGEST)]
    for ranks, architectures in measured.items():
        for phase in PHASES:
            title = f"## {phase.capitalize()}, {'one rank' if ranks == 1 else f'{ranks} tensor-parallel ranks'}"
            canonical = _table(architectures, phase, refusals, list(architectures), raw=False)
            raw = _table(
                architectures,
                phase,
                refusals,
                [column for column in architectures if COLUMNS[column][0] in RAW],
                raw=True,
            )
            parts += [title, "Canonical values:", canonical, "vLLM's modules as they are:", raw]
    messages = [f"- R{i}: {message}" for i, message in enumerate(refusals, 1)]
    parts += ["## Refusals", "\n".join(messages)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _table(architectures: dict[str, Cells], phase: str, refusals: list[str], columns: list[str], raw: bool) -> str:
    rows = dict.fromkeys(row for arch in columns for row in architectures[arch] if row.startswith("raw: ") == raw)
    lines = [f"| | {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
    for row in sorted(rows, key=_order):
        cells = [_shown(verdict(architectures[arch].get(row), phase), refusals) for arch in columns]
        lines.append(f"| {row.removeprefix('raw: ') if raw else f'`{row}`'} | {' | '.join(cells)} |")
    return "\n".join(lines)


_ROWS = (
    "embed resid_pre attn.q attn.k attn.v rot_q rot_k pattern z resid_mid mlp.gate mlp.up mlp.act router_logits experts "
    "expert_weights resid_post final_norm unembed"
).split()


def _order(row: str) -> tuple[int, str]:
    found = [i for i, name in enumerate(_ROWS) if f".{name}." in f".{row}."]
    return (found[0] if found and not row.startswith("raw: ") else len(_ROWS)), row


def verdict(conditions: dict[str, float | str] | None, phase: str) -> float | str | None:
    """Return a row's largest error in a phase under all conditions, or its refusal; None if the architecture has no such row.

    Raises:
        AssertionError: it is refused under some conditions only, or further off than is called supported.
    """
    if conditions is None:
        return None
    found = [value for condition, value in conditions.items() if condition.startswith(phase)]
    refused = {value for value in found if isinstance(value, str)}
    if refused:
        assert len(refused) == 1, refused
        assert len(refused) == len(set(found)), f"refused under some conditions only: {conditions}"
        return refused.pop()
    largest = max(value for value in found if isinstance(value, float))
    assert largest <= LARGEST, conditions
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


_ERROR = re.compile(r"(?<=\| )(?:0|1e-\d+)(?= \|)")


def _agree(before: str, after: str) -> bool:
    if _ERROR.sub("x", before) != _ERROR.sub("x", after):
        return False
    pairs: Iterable[tuple[str, str]] = zip(_ERROR.findall(before), _ERROR.findall(after), strict=True)
    return all(float(now) <= max(10 * float(then), 1e-6) for then, now in pairs)


def page() -> Path:
    """Return where the table is written."""
    return Path(__file__).parents[2] / "docs" / "fidelity.md"
