"""What was measured of trained checkpoints: recorded as JSON in this folder, shown as docs/real-weights.md.

`python -m tests.fidelity LAYOUT… --checkpoint PATH --record NAME` measures, records and writes the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.fidelity.checkpoint import DTYPES, TOKENS, TOLERANCE
from tests.fidelity.half import TIMES
from tests.fidelity.measure import CHANGED

RECORDED = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "real-weights.md"
HEAD = """\
# Real weights

Every location of trained checkpoints against transformers' eager forward on the same weights, on a CPU, prefill and one decode
step, under the conditions that are named above each table. "TP" is the number of tensor-parallel ranks, "PP" of pipeline
stages. A row is the location in every layer of the model. The changes (`x * 0.5 + ramp`, in every step) are of the second layer
and outside of the layers, with plain requests beside them; their number is that of the logits, in bfloat16 that of
`blocks[3].resid_post` where the change comes before it. At the logits rounding has grown to where it says little: with one
prompt of eleven tokens a change of `blocks[1].resid_mid` of SmolLM2 was 0.27 to 0.63 off in the engine, and 0.06 to 0.38 in
transformers, over runs whose last digits were drawn. With twelve other prompts, of 4 to 39 random tokens, and four such changes
of each, the two are alike: in ten layers the engine's distance was, by the median, 1.02 to 1.17 times transformers', and 1.18
times at the logits (0.108 and 0.093 by the mean).

A trained model has rows with numbers of a thousand beside rows with numbers below one, and float32 has seven digits. So in
float32 an error is absolute where the numbers of its row (a token's) are at most 1, and a part of the row's largest number where
that is larger. It is at most {tolerance:.0e} everywhere, and the tokens are those of transformers.

Weights come from `interpose demo-model PATH --pretrained NAME`. The commands above each table measure it again. The test suite
measures some locations again in one layout (`tests/engine/fidelity/test_real_weights.py`)."""
HALF = """\
In bfloat16 a number is the distance ‖a - b‖ / ‖b‖ from the float32 truth, every row counted alike, and in brackets that of
transformers' own bfloat16 forward on the same processor, each under the condition where it is largest. Both round in every layer,
each where its kernels do: no location is more than {times:g} times as far off as transformers is. Both are fed with the engine's
tokens. A token may differ from transformers' where two logits are nearer to each other than bfloat16 can tell: the row `tokens`
says how far the chosen token's float32 logit is below the largest, and in brackets how far off transformers' are."""
# name → what was measured of it
Recorded = dict[str, dict[str, Any]]


def record(name: str, found: dict[str, Any], file: Path = RECORDED, page: Path = PAGE) -> None:
    """Record a report of `tests.fidelity.checkpoint`, and write the page.

    Args:
        name: of the model, as the page calls it.
        found: the report; layouts and precisions that it has not stay as they were recorded.
        file: where it is recorded.
        page: where it is shown.
    """
    recorded: Recorded = json.loads(file.read_text()) if file.exists() else {}
    one = recorded.setdefault(name, {"columns": {}, "commands": {}, "conditions": {}})
    one["where"] = f"{found['processor']}, " + ", ".join(
        f"{package} {number}" for package, number in found["versions"].items()
    )
    one["config_sha256"] = found["config_sha256"]
    fresh: dict[str, dict[str, Any]] = {}
    conditions: dict[str, dict[str, bool]] = {}
    for cell in found["cells"]:
        column = cell["layout"] if cell["dtype"] == DTYPES[0] else f"{cell['layout']}, {cell['dtype']}"
        rows = fresh.setdefault(column, {})
        _, _, under = cell["condition"].partition(", ")
        conditions.setdefault(column, {}).update({under: True} if under else {})
        row = re.sub(r"\.layers\[\d+\]", ".layers[i]", cell["location"])
        value = cell["reason"] if cell["verdict"] == "refused" else [cell["error"], cell.get("transformers", 0.0)]
        before = rows.setdefault(row, value)
        if isinstance(before, str) or isinstance(value, str):
            assert _general(before) == _general(value), f"{row}: {before} and {value}"
        else:
            rows[row] = [max(pair) for pair in zip(before, value, strict=True)]
    one["columns"] |= fresh
    one["conditions"] |= {column: list(under) for column, under in conditions.items()}
    words = found["command"].replace(found["checkpoint"], "PATH")
    one["commands"] |= dict.fromkeys(fresh, words)
    file.write_text(json.dumps(recorded, indent=1) + "\n")
    page.write_text(render(recorded))


def _general(value: Any) -> Any:
    return re.sub(r"\d+", "i", value) if isinstance(value, str) else value


def render(recorded: Recorded) -> str:
    """Return the page."""
    parts = [HEAD.format(tolerance=TOLERANCE)]
    if any(DTYPES[1] in column for one in recorded.values() for column in one["columns"]):
        parts.append(HALF.format(times=TIMES))
    for name, one in recorded.items():
        parts.append(f"## {name}\n\n{one['where']}; `config.json` has the SHA-256 {one['config_sha256'][:16]}….")
        commands = dict.fromkeys(one["commands"].values())
        parts.append("```sh\n" + "\n".join(commands) + "\n```")
        parts.append("\n".join(f"- {column}: {'; '.join(under)}" for column, under in one["conditions"].items()))
        refusals: list[str] = []
        columns = one["columns"]
        rows = dict.fromkeys(row for column in columns.values() for row in column)
        lines = [f"| | {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
        for row in sorted(rows, key=_order):
            cells = [_cell(row, column.get(row), name, refusals) for name, column in columns.items()]
            lines.append(f"| `{row}` | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        parts.append("\n".join(f"- R{i}: {why}" for i, why in enumerate(refusals, 1)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _order(row: str) -> int:
    """Canonical values first, then changes, then modules; each in the order in which they were measured."""
    return 3 if row.startswith("raw: ") else 2 if row.startswith(CHANGED) else 1 if row == TOKENS else 0


def _cell(row: str, value: Any, column: str, refusals: list[str]) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        why = value.replace("MODULE", "…")
        if why not in refusals:
            refusals.append(why)
        return f"R{refusals.index(why) + 1}"
    mine, theirs = value
    if DTYPES[1] in column:
        return f"{mine:.0e} ({theirs:.0e})" if mine or theirs else "0"
    return f"{mine:.0e}" if mine else "0"
