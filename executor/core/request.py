"""What the engine hands to a worker: the work of a traced request, and its place in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from executor.core.fairness import NOBODY, Flow
from executor.core.programs import Code
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class Work:
    """What a new traced request brings with it.

    Attributes:
        trace: the trace with only this invoke in it.
        invoke: the invoke's index.
        expected: the number of invokes of the trace.
        session: the session actor's name.
        together: how many invokes of the trace must start in the same step, this invoke included. 0 and 1 mean none.
        wholes: the outer blocks of the trace, by index. They run beside the blocks of all requests that start with this
            request.
        flow: the tenant and the session of the request.
        codes: what the texts of the request compile to (`executor.core.programs.Codes`).
    """

    trace: pb.Trace
    invoke: int
    expected: int
    session: str
    together: int = 0
    wholes: dict[int, pb.Invoke] = field(default_factory=dict)
    flow: Flow = NOBODY
    codes: dict[str, Code] | None = None

    def to_args(self) -> dict[str, Any]:
        """Return what goes into the request's `extra_args`."""
        return {
            "interpose": {
                "trace": self.trace.SerializeToString(),
                "invoke": self.invoke,
                "expected": self.expected,
                "session": self.session,
                "id": self.trace.id,
                "together": self.together,
                "wholes": [(index, invoke.SerializeToString()) for index, invoke in self.wholes.items()],
                "flow": (self.flow.tenant, self.flow.session, self.flow.share),
                "codes": self.codes,
            }
        }

    @classmethod
    def from_args(cls, extra_args: dict[str, Any] | None) -> Work | None:
        """Return the work in a request's `extra_args`, or None if the request is not traced."""
        args = extra_args.get("interpose") if extra_args else None
        if args is None:
            return None
        trace = pb.Trace.FromString(args["trace"])
        wholes = {index: pb.Invoke.FromString(data) for index, data in args["wholes"]}
        flow = Flow(*args["flow"])
        return cls(
            trace, args["invoke"], args["expected"], args["session"], args["together"], wholes, flow, args["codes"]
        )


@dataclass(frozen=True)
class Placement:
    """What the scheduler needs to know of a traced request; it is read without the program.

    Attributes:
        trace: the trace's id.
        together: as in `Work`.
        flow: as in `Work`.
    """

    trace: str
    together: int
    flow: Flow

    @classmethod
    def from_args(cls, extra_args: dict[str, Any] | None) -> Placement | None:
        """Return the placement in a request's `extra_args`, or None if the request is not traced."""
        args = extra_args.get("interpose") if extra_args else None
        return cls(args["id"], args["together"], Flow(*args["flow"])) if args is not None else None


@dataclass(frozen=True)
class Span:
    """A request's place in a step: its index in the batch, and its rows of the flat tokens."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """One step: the spans of its traced requests by request id, and the sizes of the batch."""

    spans: dict[str, Span]
    tokens: int
    padded_tokens: int
    requests: int


def step_tokens(scheduling: Any) -> int:
    """Return the largest number of tokens in a step, which also bounds a traced prompt.

    Args:
        scheduling: the engine's SchedulerConfig.
    """
    return min(
        scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens, scheduling.max_num_batched_tokens
    )
