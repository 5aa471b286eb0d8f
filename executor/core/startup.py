"""How far each worker has come while an engine starts, told to the directory, which shows it to whoever waits."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import ClassVar

DIRECTORY = "interpose-directory"
NAMESPACE = "interpose"
# Set in the process of an engine replica, and so in that of its engine; nobody waits for an engine that has none.
REPLICA_VARIABLE = "INTERPOSE_ENGINE_REPLICA"


@dataclass(frozen=True)
class Startup:
    """Where one worker tells of its start.

    Attributes:
        replica: the engine replica's name; "" to tell nobody.
        rank: the worker's.
    """

    replica: str
    rank: int

    _loaded: ClassVar[str] = ""  # in a worker's process: when it had loaded the model

    @classmethod
    def of_worker(cls, rank: int) -> Startup:
        """Return what a worker of this process's engine should have."""
        return cls(os.environ.get(REPLICA_VARIABLE, ""), rank)

    def tell(self, stage: str) -> None:
        """Say what the worker does now. Never fails, and waits for nobody."""
        if not self.replica:
            return
        import ray

        try:
            directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        except ValueError:
            return
        directory.worker_stage.remote(self.replica, self.rank, stage + self._loaded)

    def remember(self) -> None:
        """Have `of_worker` return this in the worker's process too."""
        if self.replica:
            os.environ[REPLICA_VARIABLE] = self.replica

    def loaded(self, begun: float) -> float:
        """Say that the worker is up and has loaded the model.

        Args:
            begun: when its actor was constructed, on the monotonic clock.

        Returns:
            Seconds since then.
        """
        seconds = time.monotonic() - begun
        self.tell(f"model loaded after {seconds:.0f} s")
        Startup._loaded = f" (loaded after {seconds:.0f} s)"
        return seconds
