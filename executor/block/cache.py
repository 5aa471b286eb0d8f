"""The recorder of `tracer.cache()`: it takes values of many modules after all blocks' turns.

A recorder takes the rows of its block, whole, at every location that it was asked for, from the place where its block
declared it to the end of the generation; the block itself may have ended long before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.core.errors import Refusal
from executor.model.items import ListOutputs, Opaque, Outputs
from executor.model.module_name import ModuleName
from executor.model.node import Node
from executor.model.tree import PSEUDO, ModuleTree
from interpose.contract.cache import Cache, Visit
from interpose.v1 import trace_pb2 as pb


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
        way: a number that stands for the locations that are recorded.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.cache = Cache()
        self.way = zlib.crc32(repr(wish.targets).encode())
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


def _refuse(message: str) -> Refusal:
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location="tracer.cache")
