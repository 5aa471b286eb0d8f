"""The interleaver carries out every instruction of the machine, and answers as the instruction says."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from executor.interleave.machine import instructions
from executor.interleave.machine.instructions import Instruction, SeveralTurns, Turn
from tests.engine.bare import Worker

KINDS = {
    kind
    for kind in vars(instructions).values()
    if isinstance(kind, type) and issubclass(kind, Instruction) and kind not in (Instruction, Turn, SeveralTurns)
}


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_every_instruction_is_carried_out(worker: Worker) -> None:
    assert set(worker.interleaver._do) == KINDS


@pytest.mark.parametrize("steps", [1, 3])
def test_blocks_run_to_their_ends(worker: Worker, steps: int) -> None:
    source = """
    seen = []
    for step in tracer.iter[:]:
        seen.append(step)
    seen.save()
    """
    first, second = worker.run(source, source, steps=steps)
    assert first.saved == second.saved == {"seen": list(range(steps))}


def test_a_block_that_fails_leaves_the_other(worker: Worker) -> None:
    failed, ran = worker.run("1 / 0", "kept = [5].save()", steps=1)
    assert failed.failure is not None
    assert failed.failure.exception_type == "ZeroDivisionError"
    assert ran.failure is None
    assert ran.saved == {"kept": [5]}


@pytest.mark.parametrize("steps", [1, 3])
def test_what_the_worker_made_for_a_trace_goes_with_it(worker: Worker, steps: int) -> None:
    source = """
    import torch
    kept, named = [].save(), {}.save()
    for step in tracer.iter[:]:
        kept.append(torch.full((2,), float(step)).save())
        named[str(step)] = torch.zeros(3).save()
    """
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)  # objects that only a collection finds stay in a list
    try:
        [ran] = worker.run(source, steps=steps)
        gc.collect()
        found = [type(one) for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert [one.tolist() for one in ran.saved["kept"]] == [[float(step)] * 2 for step in range(steps)]
    assert [one for one in found if one.__module__.split(".")[0] in ("executor", "interpose", "torch")] == []
