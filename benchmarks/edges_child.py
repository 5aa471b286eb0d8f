"""One in-process engine of `benchmarks.edges`.

`python -m benchmarks.edges_child CHECKPOINT [OPTIONS]`. OPTIONS are further options of vLLM's LLM, as JSON. An answer is the
seconds of the engine's thread in each part of a batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rounds import answer_forever
from benchmarks.tier_child import Engine
from benchmarks.tier_rows import ROWS
from benchmarks.traced_batch import finish_all

# The parts of a request's edges, in their order. What is in a part's functions counts for the part alone, even where another
# part's function calls them.
ADMISSION, ENTERING, LEAVING, BLOCK, ENCODING = "admission", "entering", "leaving", "block's rest", "encoding"
PARTS = (ADMISSION, ENTERING, LEAVING, BLOCK, ENCODING)


class Clock:
    """Counts the CPU time of a thread in parts of a program.

    Attributes:
        spent: seconds by part.
    """

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a function for a part.

        Args:
            owner: the class or object with the function.
            name: of the function.
            part: the part.
        """
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, name, timed)

    def _turn(self) -> None:
        now = time.thread_time()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, do: Callable[[], Any]) -> Any:
        """Call `do`, and count its time, with that of all parts in it, for a part of its own."""
        began = time.thread_time()
        try:
            return do()
        finally:
            self.spent[part] += time.thread_time() - began


class Edges:
    """An engine whose batches begin and end all at once.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        from executor.block.mediator import Mediator
        from executor.graphs.loops import TableLoops
        from executor.interleave.finish import Endings
        from executor.interleave.interleaver import Interleaver
        from executor.interleave.planned import PlannedRunner
        from executor.saves.lists import Lists

        self._engine = engine
        self._clock = clock = Clock()
        clock.watch(Interleaver, "admit", ADMISSION)
        clock.watch(PlannedRunner, "_enter_tables", ENTERING)
        clock.watch(Interleaver, "_bring_back", LEAVING)
        clock.watch(Mediator, "finish", BLOCK)
        clock.watch(Endings, "_saves", ENCODING)
        # The same parts of requests whose blocks do not run.
        clock.watch(Interleaver, "defer", ADMISSION)
        clock.watch(TableLoops, "enter", ENTERING)
        clock.watch(TableLoops, "leave", LEAVING)
        clock.watch(Lists, "event", ENCODING)

    def answer(self, row: str, batch: int, prompt_tokens: int, tokens: int) -> dict[str, float]:
        """Return the seconds of a batch by part.

        The parts are those of `PARTS`; "submit", in which the requests are given to the engine; "first" and "second", the first
        two steps; "steps", the others; and "finish", in which all blocks end.

        Args:
            row: one of `ROWS`.
            batch: requests of the batch.
            prompt_tokens, tokens: numbers of tokens of each request.
        """
        engine, clock = self._engine, self._clock
        traces = engine.traces(ROWS[row], batch, False)
        names = [engine.name() for _ in range(batch)]
        prompts = [engine.prompt(prompt_tokens) for _ in names]
        finished: dict[str, Any] = {}
        clock.spent.clear()

        def submit() -> None:
            for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
                engine.add(name, prompt, tokens, traces[i].extra_args(0) if traces else None)

        def step() -> None:
            finished.update((output.request_id, output) for output in engine.llm.step() if output.finished)

        def finish() -> None:
            finish_all(engine.worker, [(trace, 0, finished[name]) for name, trace in zip(names, traces, strict=False)])

        clock.timed("submit", submit)
        for part in ("first", "second"):
            clock.timed(part, step)
        while engine.llm.has_unfinished_requests():
            clock.timed("steps", step)
        clock.timed("finish", finish)
        spent = dict(clock.spent)
        check(traces, ROWS[row].expected(engine.layers, tokens), engine.worker.interpose_outbox.blobs)
        return spent


def check(traces: Sequence[Any], expected: int, blobs: Any) -> None:
    """Check that every trace of a batch has brought as many values as it keeps.

    Raises:
        RuntimeError: one has not.
    """
    for trace in traces:
        counts = [len(kept) for kept in trace.values(blobs)]
        if counts != ([expected] if expected else []):
            raise RuntimeError(f"{counts} values came instead of {expected}")


def main(checkpoint: str, given: str = "{}") -> None:
    """Load the engine, and answer requests for batches."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    edges = Edges(Engine("interpose", checkpoint, json.loads(given)))
    answer_forever(edges.answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
