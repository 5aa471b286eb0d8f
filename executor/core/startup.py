"""How far each worker has come while an engine starts, reported to the directory.

The directory shows it to clients.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import ClassVar

DIRECTORY = "interpose-directory"
NAMESPACE = "interpose"
# Set in the process of an engine replica, and so in the process of its engine. An engine without a replica tells nobody.
REPLICA_VARIABLE = "INTERPOSE_ENGINE_REPLICA"


@dataclass(frozen=True)
class Startup:
    """Where one worker reports the progress of its start.

    Attributes:
        replica: the name of the engine replica. With "", the worker reports nothing.
        rank: the worker's rank.
    """

    replica: str
    rank: int

    _loaded: ClassVar[str] = ""  # in a worker's process: when the worker had loaded the model

    @classmethod
    def of_worker(cls, rank: int) -> Startup:
        """Return the startup of a worker of this process's engine."""
        return cls(os.environ.get(REPLICA_VARIABLE, ""), rank)

    def tell(self, stage: str) -> None:
        """Report what the worker does now. The call never fails and never waits."""
        if not self.replica:
            return
        import ray

        try:
            directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        except ValueError:
            return
        directory.worker_stage.remote(self.replica, self.rank, stage + self._loaded)

    def remember(self) -> None:
        """Have `of_worker` return this startup in the worker's process too."""
        if self.replica:
            os.environ[REPLICA_VARIABLE] = self.replica

    def loaded(self, begun: float) -> float:
        """Report that the worker is up and has loaded the model.

        Args:
            begun: when the worker's actor was constructed, in seconds of the monotonic clock.

        Returns:
            Seconds since then.
        """
        seconds = time.monotonic() - begun
        self.tell(f"model loaded after {seconds:.0f} s")
        Startup._loaded = f" (loaded after {seconds:.0f} s)"
        return seconds
