"""A worker's actor is up before anything heavy is imported in it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from executor.cluster.actor import LazyWorkerActor
from executor.cluster.liveness import Ticket  # comes with the arguments of `initialize`
LazyWorkerActor(0)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "vllm", "ray", "numpy", "grpc", "google", "interpose"}))
"""


def test_it_is_constructed_with_the_standard_library_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
