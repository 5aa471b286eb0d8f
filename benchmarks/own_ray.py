"""A Ray head of a benchmark's own process, on this machine alone, without a dashboard."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_app.cluster import OwnHead


@contextlib.contextmanager
def own_ray(cpus: int) -> Iterator[OwnHead]:
    """Run a head with at least this many CPUs during the `with` block.

    Processes that are started in the block join the head. Do not use it where Ray has been imported before: Ray reads its
    environment at the import. The head removes the shared memory of workers of vLLM's own executor when it looks after them
    again, or stops, if it has looked after them while they lived.
    """
    from serve_app.environment import own_head_environment

    os.environ.update(own_head_environment())
    # Workers import from this folder, wherever the head was started.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    import ray

    from serve_app.cluster import OwnHead

    head = OwnHead(cpus)
    head.start()
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield head
    finally:
        head.stop()
