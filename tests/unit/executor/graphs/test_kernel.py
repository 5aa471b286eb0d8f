"""The Triton kernel against the reference, on the same tables; Triton's interpreter runs the kernel on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("what", ["exact", "forms", "pieces"])
def test_the_kernel_does_what_the_reference_does(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.executor.graphs.interpreted", what, "8"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("compared", 0), done.stderr[-2000:]
