"""What a traced request costs where it begins and where it ends, besides its steps.

All requests of a batch begin in one step and end in one step, as requests do that are sent at once; each is a trace of its own.
The blocks are loops over all steps, which run in the tables. A figure is CPU time of the engine's thread, in microseconds for
each request. "begin" is what the first two steps take more than those of plain requests, with the parts admission (the block is
bound) and entering (its loop goes into the tables). "finish" is all from the last step to the serialized events, with the parts
leaving (the loop comes back from the tables), block's rest (its code after the loop) and encoding (what it saved). A block
of which all that it does is known does not run, and has no rest.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.edges_child import PARTS
from benchmarks.general_path import ONE_THREAD
from benchmarks.models import Model
from benchmarks.rounds import Child, orders

BATCH = 32
PROMPT_TOKENS, TOKENS = 16, 32
ROUNDS = 8
CASES = ("plain", "capture one", "steer", "probe", "capture all")


def run(
    *, model: str | None = None, dtype: str | None = None, rounds: int | None = None
) -> dict[str, dict[str, float]]:
    """Return the microseconds for each request, by case.

    Args:
        model, dtype: as of `Model.chosen`.
        rounds: how many count.
    """
    chosen = Model.chosen(model, dtype)
    with tempfile.TemporaryDirectory() as folder:
        options = chosen.write(Path(folder) / "model")
        options |= {"disable_log_stats": True, "max_num_seqs": 2 * BATCH, "skip_tokenizer_init": True}
        options |= {"async_scheduling": False}
        environment = {} if chosen.gpu else ONE_THREAD
        child = Child(
            "benchmarks.edges_child", str(Path(folder) / "model"), json.dumps(options), environment=environment
        )
        try:
            return _measured(child, rounds or ROUNDS)
        finally:
            child.close()


def _measured(child: Child, rounds: int) -> dict[str, dict[str, float]]:
    request = {"batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "tokens": TOKENS}
    for case in CASES:
        for _ in range(2):  # plans and graphs are made
            child.ask(row=case, **request)
    spent: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for order in orders(len(CASES), rounds):
        for index in order:
            spent[CASES[index]].append(child.ask(row=CASES[index], **request))

    def middle(case: str, *parts: str) -> float:
        seconds = [sum(one.get(part, 0.0) for part in parts) for one in spent[case]]
        return statistics.median(seconds) / BATCH * 1e6

    results = {}
    for case in CASES:
        figures = {"submit": middle(case, "submit"), "begin": middle(case, "first", "second")}
        if case != "plain":
            figures["begin"] -= middle("plain", "first", "second")
            figures |= {"finish": middle(case, "finish")} | {part: middle(case, part) for part in PARTS}
        results[f"batch {BATCH}, {case}"] = figures
    return results
