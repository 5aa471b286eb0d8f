"""What a worker answers in an engine that takes no traces: every location is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from executor.core.startup import Startup
from executor.model.describe import describe_untraced
from executor.model.tree import ModuleTree

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


class PlainWorker(_Base):
    """Mixed in before a vLLM worker; steps are vLLM's own."""

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as stock, and report it."""
        warmed_up = super().compile_or_warm_up_model()
        Startup.of_worker(self.rank).tell("ready")
        return warmed_up

    def interpose_describe(self) -> bytes:
        """Return the model's description, a serialized ModelDescription."""
        tree = ModuleTree(self.model_runner.get_model(), self.parallel_config.tensor_parallel_size)
        why = self.vllm_config.additional_config["interpose"]["untraced"]
        return describe_untraced(self.vllm_config, tree, why).SerializeToString()

    def interpose_row_values(self) -> dict[str, str]:
        """Return nothing: no block runs here."""
        return {}

    def interpose_counters(self) -> dict[str, float]:
        """Return nothing: no block runs here."""
        return {}

    def interpose_idle(self) -> dict[str, Any]:
        """Return that no trace is held."""
        return {"idle": True, "main_thread": threading.current_thread() is threading.main_thread()}
