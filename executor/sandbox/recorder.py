"""A recorder of `tracer.cache()` whose cache is in a sandboxed process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from executor.block.cache import Recorder, Wish
from executor.core.errors import Refusal
from executor.core.location import Kind
from executor.core.text import clip
from executor.model.tree import ModuleTree
from executor.sandbox.errors import refusal_of
from executor.sandbox.process import Lost
from executor.sandbox.structure import describe, tensors_in
from interpose.v1 import trace_pb2 as pb

Ask = Callable[[int, dict[str, Any]], dict[str, Any]]


class FarRecorder(Recorder):
    """Sends what is recorded to the block's process.

    Args:
        wish: what to record.
        number: of the recorder among the block's.
        ask: gives the process's recorder a value, and returns the answer.
    """

    def __init__(self, wish: Wish, number: int, ask: Ask) -> None:
        super().__init__(wish)
        self._number = number
        self._ask = ask

    @classmethod
    def of(cls, told: Any, tree: ModuleTree, number: int, ask: Ask) -> FarRecorder:
        """Return a recorder that the process told.

        Args:
            told: the locations, whether the block named them, and a failure with the line that asks.

        Raises:
            Lost: no block asks for that.
        """
        form = isinstance(told, tuple) and [type(item) for item in told] == [list, bool, bytes]
        if not form or len(told[0]) > 2 * len(tree.nodes) + 16:
            raise Lost("it records what there is not")
        targets, named, line = told
        for target in targets:
            known = isinstance(target, tuple) and len(target) == 2 and all(isinstance(part, str) for part in target)
            if not known or target[1] not in (Kind.INPUT, Kind.OUTPUT) or tree.find(target[0]) is None:
                raise Lost("it records what there is not")
            try:
                tree.order_of(*target)
            except Refusal:
                raise Lost("it records what no forward reaches") from None
        try:
            frames = tuple(pb.Failure.FromString(line).frames)
        except Exception:
            raise Lost("it records what there is not") from None
        return cls(Wish(tuple(targets), named, None, None, frames), number, ask)

    def record(self, path: str, kind: str, step: int, value: Any) -> None:
        tensors = tensors_in(value)
        told = {
            "path": path,
            "kind": kind,
            "step": step,
            "value": describe(value, tensors),
            "tensors": tensors,
            "why": "",
        }
        answer = self._ask(self._number, told)
        taken, error = answer.get("bytes"), answer.get("error")
        if type(taken) is not int or not 0 <= taken < 1 << 40:
            raise Refusal(pb.ERROR_CODE_INTERVENTION, "the sandboxed process of the block took no value")
        self.bytes += taken
        if error is not None:
            raise _error_of(error)

    def refuse(self, path: str, error: Refusal) -> None:
        with suppress(Refusal):  # the process is lost, which its block learns by its next turn
            self._ask(self._number, {"path": path, "kind": "", "step": 0, "value": None, "why": error.message})


def _error_of(told: Any) -> Exception:
    """Return why a value is not kept, as the process tells it."""
    try:
        return refusal_of(told)
    except ValueError:
        said = (
            told[2] if isinstance(told, tuple) and len(told) == 5 and isinstance(told[2], str) else "it took no value"
        )
        return ValueError(clip(said))
