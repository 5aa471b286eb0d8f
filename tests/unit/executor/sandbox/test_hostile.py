"""Hundreds of hostile blocks, one after the other, in processes of one zygote: each ends, and nobody else is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.sandbox import line
from executor.sandbox.pool import Pool
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.sandbox.hostile import blocks
from tests.unit.executor.sandbox.parts import Worker, plain

BLOCKS = blocks()
STEP_SECONDS = 0.5
GRACE_SECONDS = 0.25
CODES = (
    pb.ERROR_CODE_INTERVENTION,
    pb.ERROR_CODE_DEADLINE_EXCEEDED,
    pb.ERROR_CODE_QUOTA_EXCEEDED,
    pb.ERROR_CODE_INVALID_ARGUMENT,
    pb.ERROR_CODE_UNKNOWN_LOCATION,
    pb.ERROR_CODE_OUT_OF_ORDER,
)


@pytest.fixture(scope="module")
def hurried(processes: Pool) -> Iterator[Worker]:
    """A worker whose blocks have little time, so that those that never end take little."""
    before, line.GRACE_SECONDS = line.GRACE_SECONDS, GRACE_SECONDS
    made = Worker(processes, STEP_SECONDS)
    yield made
    line.GRACE_SECONDS = before
    patient = Worker(processes, 60.0)
    after = patient.run("h = model.layers[1].output[0].save()")
    assert after.failure is None and after.saved["h"].tolist() == after.outputs[0].tolist()


@pytest.fixture(scope="module")
def undisturbed() -> list[list[float]]:
    return [rows.tolist() for rows in plain()]


def test_there_are_enough() -> None:
    assert len(BLOCKS) >= 200


@pytest.mark.parametrize("name", BLOCKS)
def test_a_hostile_block_ends_and_touches_nobody(hurried: Worker, undisturbed: list[list[float]], name: str) -> None:
    ran = hurried.run(BLOCKS[name])
    assert ran.failure is None or ran.failure.code in CODES, ran.failure
    assert ran.accounting is not None or ran.failure is not None
    assert [rows.tolist() for rows in ran.beside] == undisturbed
    if ran.failure is not None:
        told = str(ran.failure)
        assert os.getcwd() not in told and "/executor/" not in told


def test_no_process_is_left(hurried: Worker, processes: Pool) -> None:
    zygote = processes._zygote
    assert zygote is not None
    children = Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children").read_text().split()
    assert len(children) <= processes._ready + 1
