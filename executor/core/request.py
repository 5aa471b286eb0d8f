"""What the engine hands to its workers: a trace, its requests, and their places in a step.

All that the requests of a trace have in common reaches the workers once (`Opened`), before a request of the trace does. A
request names its trace (`InvokeRequest`). The only request of a trace carries the trace instead, which spares a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from executor.core.fairness import NOBODY, Flow
from executor.core.programs import Code
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest, parse_trace

# Values of which a block cannot make a way to another block: it can put nothing into them.
_UNSHARED = frozenset(
    "none boolean integer big_integer real complex_number text data tensor tuple frozen_set slice ellipsis range dtype device "
    "module tracer python_module symbol size not_implemented remote".split()
)


def shipped(request: TraceRequest, codes: dict[str, Code] | None) -> dict[str, Any]:
    """Return a trace as vLLM carries it to the workers; `Opened.of` reads it there.

    Args:
        request: the trace.
        codes: what the texts of the trace compile to (`executor.core.programs.Codes`).
    """
    return {
        "key": request.key,
        "trace": request.trace,
        "edits": list(request.edits),
        "session": request.session,
        "codes": codes,
        "trusted": request.trusted,
        "tenant": request.tenant,
    }


@dataclass(frozen=True)
class Opened:
    """A trace in a worker: what all its requests have in common.

    Attributes:
        trace: the trace, with its standing edits.
        session: Ray name of the session actor; "" for none.
        codes: what the texts of the trace compile to.
        trusted: whether the trace's tenant may run code in the workers' own processes.
        tenant: the trace's tenant, which the time of its blocks is charged to.
    """

    trace: pb.Trace
    session: str
    codes: dict[str, Code] | None
    trusted: bool = False
    tenant: str = ""

    @classmethod
    def of(cls, shipment: dict[str, Any]) -> Opened:
        """Return the trace that `shipped` made ready."""
        trace = parse_trace(shipment["trace"], shipment["edits"], shipment["key"])
        return cls(trace, shipment["session"], shipment["codes"], shipment["trusted"], shipment["tenant"])

    @cached_property
    def mingles(self) -> bool:
        """Whether blocks of different invokes may have an object in common.

        Only objects count that could hold a value of the model.
        """
        trace = self.trace
        return len(trace.invokes) > 1 and (
            bool(trace.shared or trace.exchanged or trace.variables)
            or any(invoke.joint or invoke.gang or invoke.after for invoke in trace.invokes)
            or any(value.WhichOneof("kind") not in _UNSHARED for value in trace.scope.values)
        )

    @cached_property
    def joint(self) -> dict[int, pb.Invoke]:
        """The joint blocks of the trace, by index. They run beside the blocks of its requests."""
        return {index: invoke for index, invoke in enumerate(self.trace.invokes) if invoke.joint}


@dataclass(frozen=True)
class InvokeRequest:
    """One request of a trace, as it lies in the request's `extra_args`.

    The scheduler reads it too; nothing of the trace is parsed for that.

    Attributes:
        trace: the key of the trace.
        invoke: the invoke's index.
        gang: how many invokes of the trace must start in the same step, this invoke included. 0 and 1 mean none.
        flow: the tenant and the session of the request.
        trusted: whether the block may run in the workers' own processes.
        prefix: whether the prompt may come from the prefix cache and goes there, but for its last rows.
        shipment: the trace as `shipped` made it ready, if this is the trace's only request. Otherwise None: the workers have
            the trace already.
        last: how many of the prompt's last rows the block may ask for, if `prefix`. It asks for no other row.
        from_start: whether it counts them from the beginning of the prompt, and not only from the end.
    """

    trace: str
    invoke: int
    gang: int = 0
    flow: Flow = NOBODY
    trusted: bool = False
    prefix: bool = False
    shipment: dict[str, Any] | None = None
    last: int = 0
    from_start: bool = False

    @classmethod
    def alone(cls, request: TraceRequest, codes: dict[str, Code] | None = None, prefix: bool = False) -> InvokeRequest:
        """Return the request of a trace with one invoke; `prefix` is as of the attribute."""
        return cls(request.key, 0, 0, flow_of(request), request.trusted, prefix, shipped(request, codes))

    def to_args(self) -> dict[str, Any]:
        """Return what goes into the request's `extra_args`."""
        fields = {
            "trace": self.trace,
            "invoke": self.invoke,
            "gang": self.gang,
            "trusted": self.trusted,
            "prefix": self.prefix,
            "last": self.last,
            "from_start": self.from_start,
            "shipment": self.shipment,
        }
        flow = (self.flow.tenant, self.flow.session, self.flow.share, self.flow.weight)
        return {"interpose": {"request": fields, "flow": flow}}

    def salt(self, request_id: str) -> str:
        """Return what keeps the request's blocks of the prefix cache apart from other requests'.

        Requests of a tenant that change nothing of their prompts but the last rows share theirs, plain requests of the endpoint
        among them.
        Tenants share none: how long a prompt takes would tell what others have asked.
        """
        return shared_salt(self.flow.tenant) if self.prefix else request_id

    @classmethod
    def from_args(cls, extra_args: dict[str, Any] | None) -> InvokeRequest | None:
        """Return the request in some `extra_args`, or None if the request is not traced."""
        args = extra_args.get("interpose") if extra_args else None
        return cls(flow=Flow(*args["flow"]), **args["request"]) if args is not None else None


def shared_salt(tenant: str, own: str = "") -> str:
    """Return the salt that a tenant's requests share.

    Args:
        own: the salt that the tenant's client has sent.
    """
    return f"{tenant}\n{own}"


def flow_of(request: TraceRequest) -> Flow:
    """Return the tenant and the session of a trace."""
    return Flow(request.tenant, request.session_id, request.share, request.weight)


@dataclass(frozen=True)
class Span:
    """A request's place in a step: its index in the batch, and its rows of the flat tokens."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """One step: the spans of its traced requests by request id, and the sizes of the batch.

    Attributes:
        spans: of the requests whose blocks wait for the step.
        chunks: of the requests with a chunk of their prompt that is not the last.
    """

    spans: dict[str, Span]
    tokens: int
    padded_tokens: int
    requests: int
    chunks: dict[str, Span] = field(default_factory=dict)


def step_tokens(scheduling: Any) -> int:
    """Return the largest number of tokens in a step, which also bounds a traced prompt.

    Args:
        scheduling: the engine's SchedulerConfig.
    """
    return min(
        scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens, scheduling.max_num_batched_tokens
    )
