"""A real vLLM engine whose model is spread over processes: tensor-parallel ranks, pipeline stages, or both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from executor.cluster.shared_memory import forget_names_of_groups
from executor.core.ended import Ended, Ending
from executor.plugin.config import prepare_environment
from executor.saves.outbox import LocalOutbox
from interpose.v1.model_pb2 import ModelDescription
from tests.engine.harness import Limits, LocalEngine

_ALL = 1 << 30  # no saved value of a test is larger, so all come inside the answers of the workers
_OF_RANKS = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD")


def _forget_names(_worker: Any) -> None:
    forget_names_of_groups()


class _Workers:
    """All workers, as the one that a test asks.

    Attributes:
        interpose_outbox: empty; what workers print stays with them.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.interpose_outbox = LocalOutbox()

    @property
    def idle(self) -> bool:
        """Whether no rank holds anything of any trace."""
        return all(state["idle"] for state in self._llm.collective_rpc("interpose_idle"))

    def interpose_open(self, *args: Any) -> str:
        return "".join(self._llm.collective_rpc("interpose_open", args=args))

    def interpose_finish(self, *args: Any) -> Ending:
        return self._finish("interpose_finish", args)

    def interpose_finish_joint(self, *args: Any) -> Ending:
        return self._finish("interpose_finish_joint", args)

    def _finish(self, name: str, args: tuple[Any, ...]) -> Ending:
        replies = self._llm.collective_rpc(name, args=args)
        states = {state for state, _, _ in replies}
        assert len(states) == 1, f"the ranks ended differently: {states}"
        # One rank alone tells of saves, once; failures are known to all.
        assert sum(any(event for event in events) for _, events, _ in replies) in (0, 1, len(replies))
        how, events, logs = max(replies, key=lambda reply: (len(reply[1]), reply[2]))
        return Ended(how), events, logs


class SpreadEngine(LocalEngine):
    """The engine in this process, its workers in others.

    Args:
        checkpoint: the model.
        tensor, pipeline: over how many ranks and stages.
        step_seconds: that a block may take in a step.
        options: further arguments of vLLM.
    """

    def __init__(
        self, checkpoint: Path, tensor: int, pipeline: int, step_seconds: float = Limits.step_seconds, **options: Any
    ) -> None:
        limits = type("Limits", (Limits,), {"inline_bytes": _ALL, "step_seconds": step_seconds})
        from vllm import envs

        # Engines before and after this one have other numbers of ranks, or none.
        envs.disable_envs_cache()
        self._before = {name: os.environ.pop(name, None) for name in _OF_RANKS}
        prepare_environment(tensor * pipeline)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        super().__init__(
            checkpoint,
            limits=limits,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            distributed_executor_backend="mp",
            **options,
        )
        self._workers = _Workers(self.llm)
        # vLLM's own executor may end a rank before it removes what it exchanges tensors through.
        self.llm.collective_rpc(_forget_names)

    def close(self) -> None:
        super().close()
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    @property
    def worker(self) -> Any:
        return self._workers

    @property
    def interleaver(self) -> Any:
        return self._workers

    def describe(self) -> ModelDescription:
        described = set(self.llm.collective_rpc("interpose_describe"))
        assert len(described) == 1, "the ranks describe different models"
        return ModelDescription.FromString(described.pop())
