"""The interleaver carries out every instruction of the machine, and answers as the instruction says."""

from __future__ import annotations

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
