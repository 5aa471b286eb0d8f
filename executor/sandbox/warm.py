"""A short trace that a process runs before its own, so that its own begins on warm ground.

After a fork the first write to each page copies the page, and Python writes to whatever it uses. A process that waits in the pool
does that before a trace comes.
"""

from __future__ import annotations

from typing import Any

import torch

from executor.core.programs import Code, made, units_of
from executor.model.tree import LOGITS, ModuleTree
from executor.sandbox.channel import ChildEnd, Kind
from executor.sandbox.child import Child
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value

_SOURCE = """\
import torch
kept = []
for step in tracer.iter[:]:
    rows = model.logits.output
    rows[:] = rows * 2 + 1
    kept.append(rows.save())
"""
_KEY = "warm"


class Warm:
    """The trace, made ready once."""

    def __init__(self) -> None:
        trace = pb.Trace(id=_KEY, stacks=True)
        reads = [Binding(name="model", value=Value(module="")), Binding(name="tracer", value=Value(tracer=True))]
        program = pb.Program(source=_SOURCE, filename="<warm>", first_line=1, reads=reads)
        program.writes.extend(("torch", "kept", "step", "rows"))
        trace.invokes.add(program=program)
        self._trace = trace.SerializeToString()
        self._codes: dict[str, Code] = {unit.key: made(unit, 1 << 20) for unit in units_of(trace)}

    def run(self, end: ChildEnd, tree: ModuleTree, widths: tuple[int, int]) -> None:
        """Run the trace's block up to its second step, and forget it.

        Args:
            end: the channel, over which nothing is sent.
            tree, widths: as of `Child`.
        """
        child = Child(end, tree, widths)
        block = {"key": _KEY, "invoke": 0, "prompt_tokens": 1, "gang": 0, "joint": False}
        opened = {"trace": self._trace, "codes": self._codes, "blocks": [block], "step_seconds": 60.0}
        opened |= {"memory_bytes": 1 << 40, "inline_bytes": 1 << 10, "max_saved_bytes": 1 << 30}
        at: dict[str, Any] = {"block": _KEY, "position": -1, "used": 0.0, "finished": False, "prompt_tokens": 1}
        at |= {"result": None, "broken": {}, "settles": True, "step": 0}
        rows = torch.ones(1, 64)
        served = {"how": "served", "location": LOGITS, "value": ("leaf", 0), "tensors": [rows], "why": ""}
        where = {"position": tree.order_of(LOGITS, "output")}
        with torch.inference_mode():
            for kind, told in (
                (Kind.OPEN, opened),
                (Kind.START, at),
                (Kind.SERVE, at | served | where),
                (Kind.SAVES, {"block": _KEY, "export": False}),
                (Kind.CANCEL, {"block": _KEY}),
            ):
                end.rehearse(child.answer(kind, told))
