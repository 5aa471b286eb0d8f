"""`tracer.cache()`: records the values of many modules as the model goes on with them, after all blocks had their turns.

A recorder takes the rows of its block, whole, at every location that it was asked for, from the place where its block
declared it to the end of the generation; the block itself may have ended long before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from executor.core.errors import Refusal
from executor.model.items import ListOutputs, Opaque, Outputs
from executor.model.module_name import ModuleName
from executor.model.node import Node
from executor.model.tree import PSEUDO, ModuleTree
from executor.model.values import Served
from interpose.contract.cache import Cache, Visit
from interpose.v1 import trace_pb2 as pb

if TYPE_CHECKING:
    from executor.block.mediator import Mediator
    from executor.block.scope import TraceScope


@dataclass(frozen=True)
class Wish:
    """What a block wants recorded.

    Attributes:
        targets: module paths and kinds of locations, in the order in which the model runs them.
        named: whether the block named the modules; of all modules, those that cannot be given are left out.
        device, dtype: what tensors become; None: as they are.
        frames: the line that asks for it.
    """

    targets: tuple[tuple[str, str], ...]
    named: bool
    device: torch.device | None
    dtype: torch.dtype | None
    frames: tuple[pb.Frame, ...] = ()


class Recorder:
    """Fills one cache.

    Args:
        wish: what to record.

    Attributes:
        cache: what the block has.
        bytes: recorded so far.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.cache = Cache()
        self.bytes = 0
        self._steps: dict[str, int] = {}  # by path: the step of its latest visit

    def record(self, path: str, kind: str, step: int, value: Any) -> None:
        """Take a value that a block was given for it.

        Raises:
            Refusal: it cannot be kept.
        """
        kept = self._kept(value, f"{path}.{kind}")
        visits = self.cache.entries.setdefault(path, [])
        if self._steps.get(path) != step:
            visits.append(Visit())
            self._steps[path] = step
        setattr(visits[-1], "inputs" if kind == "input" else "output", kept)

    def refuse(self, path: str, error: Refusal) -> None:
        """A module of all modules cannot be given."""
        self.cache.refused.setdefault(path, error.message)

    def failure(self, error: Refusal) -> pb.Failure:
        """Return how the block fails for what could not be recorded, at the line that asked for it."""
        return pb.Failure(code=error.code, message=error.message, location=error.location, frames=self.wish.frames)

    def _kept(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            kept = value.detach().to(device=self.wish.device, dtype=self.wish.dtype)
            self.bytes += kept.nbytes
            return kept
        if isinstance(value, Outputs | ListOutputs):
            kept = [self._kept(item, where) for item in value]
            return kept if isinstance(value, ListOutputs) else tuple(kept)
        if isinstance(value, dict):
            return {name: self._kept(item, where) for name, item in value.items()}
        if isinstance(value, Opaque):
            raise Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, f"{value!r} cannot be recorded", location=where)
        return value


def wish(
    tree: ModuleTree,
    modules: object,
    device: object,
    dtype: object,
    include_output: bool,
    include_inputs: bool,
    frames: Sequence[pb.Frame],
) -> Wish:
    """Return what `tracer.cache(…)` asks for.

    Raises:
        Refusal: it names something that has no such value, or a device or dtype that there is not.
    """
    kinds = [kind for kind, wanted in (("input", include_inputs), ("output", include_output)) if wanted]
    if not kinds:
        raise _refuse("tracer.cache(include_output=False, include_inputs=False) records nothing; ask for one of them")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise _refuse(f"dtype is a torch dtype or None, not {dtype!r}")
    targets: list[tuple[str, str]] = []
    if modules is None:
        for path in (*tree.execution_order(), *PSEUDO):
            targets += [(path, kind) for kind in kinds if tree.runs(path, kind)]
    else:
        if not isinstance(modules, list | tuple | set | frozenset):
            raise _refuse(f"modules is a list of modules or of their paths, not {modules!r}")
        for path in dict.fromkeys(_node(tree, module).path for module in modules):
            targets += [(path, kind) for kind in kinds]
        targets.sort(key=lambda target: tree.order_of(*target))
    return Wish(tuple(targets), modules is not None, _device(device), dtype, tuple(frames))


def _node(tree: ModuleTree, module: object) -> Node:
    node = module._node if isinstance(module, ModuleName) else tree.find(module) if isinstance(module, str) else None
    if node is None:
        raise _refuse(f"tracer.cache takes modules or their paths, as 'model.layers.2.mlp', and {module!r} is none")
    if node.module is None and node.path not in PSEUDO:
        raise _refuse(
            f"{node.path} is a canonical value's, and tracer.cache records modules: name the module that it is computed from, "
            "or keep it yourself: kept[name] = value.save()"
        )
    return node


def _device(device: object) -> torch.device | None:
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _refuse(f"device is a torch device or None: {error}") from None
    if found.type not in ("cpu", "cuda"):
        raise _refuse(f"device is 'cpu', 'cuda' or None, not {device!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise _refuse("this engine has no CUDA device; leave device out, and the values come as tensors of the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" else found


def _unkept(path: str, kind: str, error: Exception) -> Refusal:
    """Why a value is not recorded that can be given: it cannot become what the block wants of it, say."""
    message = f"the value at {path}.{kind} cannot be recorded: {error}"
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=f"{path}.{kind}")


def _refuse(message: str) -> Refusal:
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location="tracer.cache")


class Recordings:
    """Who records where in the step that runs.

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
        for recorder in mediator.recorders:
            if recorder in self._listed:
                continue
            self._listed.add(recorder)
            for path, kind in recorder.wish.targets:
                if self._tree.order_of(path, kind) > mediator.position:
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
        scope: TraceScope,
    ) -> pb.Failure | None:
        """Take a value; return why the block fails, None if it does not.

        Args:
            served: gives the value as the block would get it.
            scope: the block's trace.
        """
        before = recorder.bytes
        try:
            recorder.record(path, kind, mediator.step, served().value)
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else _unkept(path, kind, error)
            if recorder.wish.named:
                return recorder.failure(refusal)
            recorder.refuse(path, refusal)
        else:
            mediator.tally.serve(f"{path}.{kind}")
        scope.recorded_bytes += recorder.bytes - before
        if scope.recorded_bytes <= self._limit:
            return None
        message = (
            f"tracer.cache() holds more than the {self._limit >> 20} MiB that a trace may save; name the modules that you need, "
            "modules=[…], a smaller dtype=…, or fewer tokens"
        )
        return recorder.failure(Refusal(pb.ERROR_CODE_QUOTA_EXCEEDED, message, location="tracer.cache"))
