"""A Ray head of a benchmark's process: like a service's own, on this machine alone, without a dashboard."""

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
    """Start a head with at least so many CPUs for the time of the `with` block; processes started in it join it.

    Not to be used where Ray has been imported before: it reads its environment then. What workers of vLLM's own executor had
    in shared memory is removed when the head looks after them again, or stops, if it has looked after them while they lived.
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
