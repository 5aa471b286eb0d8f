"""What was measured on GPUs, where the suite seldom runs: recorded as JSON in this folder, shown on the page of fidelity.

`tests.fidelity.on_gpus` measures there and records it: how far off each architecture was, and which locations and changes were
given or refused otherwise than the page says.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.layouts import Layout
from tests.fidelity.half import TIMES, Halves, ratio
from tests.fidelity.measure import CHANGED, PHASES, START, Cells

RECORDED = Path(__file__).with_suffix(".json")
GIVEN = "given"
HEAD = """\
## On GPUs

Measured by the same programs under the same conditions; recorded, and not measured again by the suite: {where}.

A cell has the largest error of any location and of any change, prefill and decode, then how many locations were given and how
many refused, each phase counted.{without} [gpu.md](gpu.md) says what else has run on GPUs."""
WITHOUT = """\
 Locations alone, as the measuring block's own tensor was on the CPU, which has been mended since:
{runs}."""
HALF = """\
In bfloat16 (`tests/fidelity/half.py`), the distance ‖a - b‖ / ‖b‖ from the float32 truth, and in brackets that of transformers'
own bfloat16 forward on the same GPU, each where it is largest. No location and no change is more than {times:g} times as far off
as transformers is there: at most {most:.2f} times."""
ALIKE = "All of them were given, or refused with the same message, as it says above."


def section() -> str:
    """Return the part of the page about GPUs."""
    runs: dict[str, Any] = json.loads(RECORDED.read_text())
    exact, half = ({name: run for name, run in runs.items() if ("most" in run) is one} for one in (False, True))
    otherwise = [
        f"- {name}, {column}: {row}"
        for name, run in runs.items()
        for column, found in run["columns"].items()
        for row in found["otherwise"]
    ]
    where = "; ".join(dict.fromkeys(f"{run['where']}, {run['date']}" for run in runs.values()))
    unchanged = [name for name, run in runs.items() if not any(found["changes"] for found in run["columns"].values())]
    without = WITHOUT.format(runs="; ".join(unchanged)) if unchanged else ""
    parts = [HEAD.format(where=where, without=without), _table(exact)]
    if half:
        parts += [HALF.format(times=TIMES, most=max(run["most"] for run in half.values())), _table(half)]
    return "\n\n".join([*parts, "\n".join(["Otherwise than above:", *otherwise]) if otherwise else ALIKE])


def _table(runs: dict[str, Any]) -> str:
    columns = sorted({column for run in runs.values() for column in run["columns"]})
    lines = [f"| | {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
    for name, run in runs.items():
        cells = [_cell(run["columns"].get(column)) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: dict[str, Any] | None) -> str:
    """Return what is said of one column of a run, which may be older than the column."""
    if found is None:
        return "not measured"
    if "start" in found:
        return "refused at start"
    beside = f" ({found['theirs']:.0e})" if "theirs" in found else ""
    return f"{found['largest']:.0e}{beside}, {found['given']} and {found['refused']}"


def summary(cells: Cells | Halves, written: dict[tuple[str, str], str]) -> dict[str, Any]:
    """Return what is recorded of one architecture.

    If no change was measured, as in runs of which the page says so, there is nothing to compare of them. Of an engine that is
    refused at start there is only the reason.

    Args:
        cells: what was measured, in float32 or in bfloat16.
        written: what the page says of each of its rows in each phase: `GIVEN`, or the refusal.
    """
    if START in cells:
        refusal = cells[START][""]
        said = [f"the engine is refused at start: {refusal}"] if written else []
        return {"given": 0, "refused": 0, "changes": 0, "largest": 0.0, "at": "", "start": refusal, "otherwise": said}
    errors: dict[tuple[str, str], float] = {}
    theirs = []
    for row, found in cells.items():
        for condition, value in found.items():
            if isinstance(value, float):
                errors[row, condition] = value
            elif not isinstance(value, str):
                errors[row, condition] = value[0]
                theirs.append(value[1])
    verdicts = {}
    for row, found in cells.items():
        for phase in PHASES:
            said = {
                value if isinstance(value, str) else GIVEN for name, value in found.items() if name.startswith(phase)
            }
            verdicts[row, phase] = " or ".join(sorted(said))
    changes = {at: said for at, said in verdicts.items() if at[0].startswith(CHANGED)}
    if GIVEN not in changes.values():
        verdicts = {at: said for at, said in verdicts.items() if at not in changes}
        written = {at: said for at, said in written.items() if at not in changes}
    locations = [said for at, said in verdicts.items() if at not in changes]
    return {
        "given": sum(said == GIVEN for said in locations),
        "refused": sum(said != GIVEN for said in locations),
        "changes": sum(said == GIVEN for said in changes.values()),
        "largest": max(errors.values()),
        "at": ", ".join(max(errors, key=lambda one: errors[one])),
        **({"theirs": max(theirs), "most": ratio(cells)} if theirs else {}),  # type: ignore[arg-type] # in bfloat16
        "otherwise": [
            f"{row} in {phase}: {verdicts.get((row, phase))}"
            for row, phase in sorted(verdicts.keys() | written.keys())
            if verdicts.get((row, phase)) != written.get((row, phase))
        ],
    }


def written_on(page: str, layout: Layout) -> dict[str, dict[tuple[str, str], str]]:
    """Return what the page says of each column's rows in each phase in a layout: `GIVEN`, or the refusal."""
    from tests.fidelity.table import is_error, parse

    return {
        name: {
            (row, phase): GIVEN if is_error(said) else said
            for row, phases in column.rows.items()
            for when, said in phases.items()
            for phase in ([when] if when else PHASES)  # of a change it says one thing of both
        }
        for name, column in parse(page)[layout].items()
    }


def record(where: str, name: str, layout: Layout, columns: dict[str, Any]) -> dict[str, Any]:
    """Record what a run measured, and return what is then recorded of it.

    What the run measured of other columns stays if it did so in the same place on the same day.

    Args:
        where: the GPU and the versions.
        name: of the run.
        layout: of its engines.
        columns: what was measured of each.
    """
    from tests.fidelity.table import page

    written = written_on(page().read_text(), layout)
    runs = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    about = {"where": where, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    before = runs.get(name, {})
    kept = before["columns"] if {key: before.get(key) for key in about} == about else {}
    now = kept | {column: summary(columns[column], written[column]) for column in columns}
    run = runs[name] = {**about, "columns": {column: now[column] for column in sorted(now)}}
    if most := [column["most"] for column in now.values() if "most" in column]:
        run["most"] = max(most)
    RECORDED.write_text(json.dumps(runs, indent=1) + "\n")
    return run


def write_page() -> None:
    """Have the page say what is recorded."""
    from tests.fidelity.table import KEPT, page

    written = page().read_text()
    title = HEAD.partition("\n")[0]
    before, after = written[: written.index(title)], written[written.index(KEPT[0]) :]
    page().write_text(f"{before}{section()}\n\n{after}")
