"""Recorders of `tracer.cache()` at the locations of a step."""

from __future__ import annotations

from collections.abc import Callable

from executor.block.cache import Recorder
from executor.block.mediator import Mediator
from executor.block.scope import Scope
from executor.core.errors import Refusal
from executor.model.tree import PSEUDO, ModuleTree
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb


class Recorders:
    """The recorders of the step that runs.

    Args:
        tree: the model's modules.
        hook: has a module's location visited.
        limit: bytes that a trace may record.
    """

    def __init__(self, tree: ModuleTree, hook: Callable[[str, str], None], limit: int) -> None:
        self._tree = tree
        self._hook = hook
        self._limit = limit
        self._listed: set[Recorder] = set()
        self._at: dict[tuple[str, str], list[tuple[Mediator, Recorder]]] = {}

    def clear(self) -> None:
        """The step is over."""
        self._listed.clear()
        self._at.clear()

    def enlist(self, mediator: Mediator) -> None:
        """Have recorded what a block asked for and lies ahead of it. Idempotent."""
        for recorder in mediator.state.record.recorders:
            if recorder in self._listed:
                continue
            self._listed.add(recorder)
            for path, kind in recorder.wish.targets:
                if self._tree.order_of(path, kind) > mediator.state.progress.position:
                    self._at.setdefault((path, kind), []).append((mediator, recorder))
                    if path not in PSEUDO:
                        self._hook(path, kind)

    def at(self, path: str, kind: str) -> list[tuple[Mediator, Recorder]]:
        """Return the blocks that have a location recorded, each with what records it."""
        return self._at.get((path, kind), [])

    def record(
        self,
        mediator: Mediator,
        recorder: Recorder,
        path: str,
        kind: str,
        served: Callable[[], Served],
        scope: Scope,
    ) -> pb.Failure | None:
        """Take a value; return why the block fails, None if it does not.

        Args:
            served: gives the value as the block would get it.
            scope: the block's trace.
        """
        before = recorder.bytes
        try:
            recorder.record(path, kind, mediator.state.progress.step, served().value)
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else _unkept(path, kind, error)
            if recorder.wish.named:
                return recorder.failure(refusal)
            recorder.refuse(path, refusal)
        else:
            mediator.state.record.tally.serve(f"{path}.{kind}")
        scope.recorded_bytes += recorder.bytes - before
        if scope.recorded_bytes <= self._limit:
            return None
        message = (
            f"tracer.cache() holds more than the {self._limit >> 20} MiB that a trace may save; name the modules that you need, "
            "modules=[…], a smaller dtype=…, or fewer tokens"
        )
        return recorder.failure(Refusal(pb.ERROR_CODE_QUOTA_EXCEEDED, message, location="tracer.cache"))


def _unkept(path: str, kind: str, error: Exception) -> Refusal:
    """Return why a value is not recorded that can be given, such as a wrong dtype."""
    message = f"the value at {path}.{kind} cannot be recorded: {error}"
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=f"{path}.{kind}")
