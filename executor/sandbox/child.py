"""A sandboxed process: it runs the block of one trace.

It has nothing but a socket and the memory that it shares with its worker. The block runs as it would in the worker, as a
greenlet with the same names, bounds and errors (`executor.block`). What differs is where a value comes from and where it goes:
a location's rows come as bytes, the changed rows and what the block saves leave as bytes.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from executor.block.api import Program, RunningBlock
from executor.block.binding import BindingFailed
from executor.block.budget import Budget
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.scope import Sent, TraceScope
from executor.block.state import BlockState, Progress, Record
from executor.block.uploads import Uploads
from executor.block.watchdog import padded
from executor.core.errors import Refusal
from executor.core.programs import Codes
from executor.core.text import clip
from executor.model.call import Call
from executor.model.layouts import WHOLE
from executor.model.node import Node
from executor.model.parameters import Parameters
from executor.model.plain import check_plain
from executor.model.read_only import ReadOnly
from executor.model.rows import Rows
from executor.model.skips import Skips
from executor.model.tree import ModuleTree
from executor.model.values import Fixed, Served
from executor.sandbox.channel import ChildEnd, Kind
from executor.sandbox.errors import made_of, told_of
from executor.sandbox.structure import build, describe, replaces
from executor.saves.collect import Limits
from executor.saves.stream import SaveStream
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Blob
from interpose.wire.encoder import WireError

_MOST_LOG = 1 << 20  # characters: the way out cuts a trace's text there, with a note
_PIECE = 64 << 20  # bytes of a blob that travel at a time
_CHUNK = 64 << 10  # characters of a text that travel at a time
_APPLIED = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str))
_RECORDS = "a block in a sandbox cannot record modules with tracer.cache() yet; read the values, and save them"


class _Budget(Budget):
    """The bounds of a block in a process of its own, which can read no file about itself.

    The memory is the largest that the process has had.
    """

    def begin_step(self) -> None:
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _grown(self) -> int:
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._peak) << 10


class _Skips(Skips):
    """Notes what is skipped, for the worker."""

    def __init__(self, tree: ModuleTree) -> None:
        super().__init__(tree)
        self.begun: list[tuple[str, int, int]] = []

    def begin(self, node: Node, step: int, position: int) -> None:
        super().begin(node, step, position)
        self.begun.append((node.path, step, position))


class _Block(RunningBlock):
    """A block that cannot do yet all that a block in the worker can."""

    def record(
        self, modules: object, device: object, dtype: object, include_output: bool, include_inputs: bool
    ) -> NoReturn:
        raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, _RECORDS, location="tracer.cache")


class _FarApplier:
    """Hands modules to apply on to the worker, which has them and checks the values.

    Args:
        memory_bytes: bound on the largest weight that a block gets as one tensor, in bytes.
        widths: as of `Parameters`.
    """

    def __init__(self, memory_bytes: int, widths: tuple[int, int]) -> None:
        self.parameters = Parameters(1, memory_bytes, widths)

    def prepare(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call as it was written.

        Raises:
            Refusal: INVALID_ARGUMENT, a value is not one that a module is applied to.
        """
        for value in (*args, *kwargs.values()):
            if value is not None and type(value) not in _APPLIED:
                raise Refusal(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"{node.path}(…) was given a {type(value).__name__}; in a sandbox modules are applied to tensors and numbers",
                    location=node.path,
                )
        return Call(node, args, kwargs, single=False)


class _Outbox:
    """Where a streamed trace's blobs and increments go: to the worker.

    Args:
        child: the process.
    """

    def __init__(self, child: Child) -> None:
        self._child = child

    def put(self, session: str, trace_id: str, blob_id: str, data: memoryview) -> None:
        self._child.send_blob(blob_id, data)

    def increment(self, session: str, trace_id: str, data: bytes) -> None:
        self._child.end.send(Kind.INCREMENT, data)


class Child:
    """One trace's block, and what the worker asks of it.

    Args:
        end: the channel.
        tree: the skeleton of the model's modules.
        widths: of the model's values, as of `Parameters`.

    Attributes:
        end: as given.
    """

    def __init__(self, end: ChildEnd, tree: ModuleTree, widths: tuple[int, int]) -> None:
        self.end = end
        self._tree = tree
        self._widths = widths
        self._scope: TraceScope
        self._mediator: Mediator
        self._limits: Limits
        self._budget: _Budget
        self._stream: SaveStream | None = None
        self._writes: list[str] = []
        self._logged = 0
        self._given: Any = None  # the containers of the value that the block was served last
        self._count = 0  # and the number of its tensors
        self._do: dict[Kind, Callable[[Any], Any]] = {
            Kind.OPEN: self._open,
            Kind.START: lambda told: self._turn(told, self._mediator.start),
            Kind.SERVE: self._serve,
            Kind.RESUME: self._resume,
            Kind.THROW: lambda told: self._turn(told, lambda: self._mediator.throw(made_of(told["error"]))),
            Kind.SAVES: self._saves,
            Kind.SHARED: self._shared,
            Kind.STREAM: self._increment,
        }

    def run(self) -> NoReturn:
        """Answer the worker's questions until the worker is gone."""
        with torch.inference_mode():
            while True:
                kind, told = self.end.next()
                try:
                    self.end.send(Kind.ANSWER, self._do[kind](told))
                except Refusal as error:  # there is no room for the answer, or it cannot travel
                    self.end.send(Kind.ANSWER, self._instead(kind, error))

    def _instead(self, kind: Kind, error: Refusal) -> dict[str, Any]:
        """Return the answer in place of an answer that cannot travel."""
        if kind in (Kind.SAVES, Kind.SHARED, Kind.STREAM):
            failure = self._failure(error)
            if kind is Kind.STREAM:
                return {"events": [], "failure": failure.SerializeToString(), "on": False}
            return {"events": [pb.Event(failed=failure).SerializeToString()]}
        self._mediator.fail(self._failure(error))
        return self._answer()

    # The trace.

    def _open(self, told: dict[str, Any]) -> dict[str, Any]:
        """Bind the names of the trace's block."""
        trace = pb.Trace.FromString(told["trace"])
        [invoke] = trace.invokes
        self._budget = _Budget(told["step_seconds"], told["memory_bytes"])
        self._budget.begin_step()
        self._limits = Limits(told["inline_bytes"], told["max_saved_bytes"])
        self._writes = list(invoke.program.writes)
        try:
            with torch.inference_mode(False):
                codes = Codes(told["codes"])
                self._scope = TraceScope(trace, 1, "", self._tree, Uploads(self._blob), self._budget, codes)
                code, names = self._scope.program(invoke.program, ())
        except Exception as error:
            return {"failure": _why_unbound(error).SerializeToString()}
        state = BlockState(
            Identity(told["request"], trace.id, 0),
            self._scope.registry,
            emit=self._emit,
            progress=Progress(told["prompt_tokens"]),
            record=Record(_Skips(self._tree)),
        )
        program = Program(code, names, self._scope.sources.lines, streamed=trace.stream)
        bounds = Bounds(self._budget, padded(trace.id), self._scope.random_state())
        applier: Any = _FarApplier(told["memory_bytes"], self._widths)
        runner = GreenletRunner(state, program, self._tree, applier, bounds, _Block)
        self._mediator = Mediator(state, runner)
        if trace.stream:
            outbox: Any = _Outbox(self)
            self._stream = SaveStream(self._scope, invoke.program, 0, self._limits, self._budget, outbox)
        return {"failure": None}

    def _blob(self, blob: Blob) -> bytes:
        """Return the bytes of an uploaded value.

        Raises:
            Refusal: the worker has them not, or there are too many.
        """
        self.end.send(Kind.BLOB, blob.id)
        _, told = self.end.next()
        if told["error"] is not None:
            raise made_of(told["error"])
        data: bytes = told["data"]
        return data

    def _emit(self, text: str) -> bool:
        """Send printed text; return whether the trace may print more."""
        if self._logged > _MOST_LOG:
            return False
        text = text[: _MOST_LOG + 1 - self._logged]
        self._logged += len(text)
        for first in range(0, len(text), _CHUNK):
            self.end.send(Kind.LOG, text[first : first + _CHUNK])
        return True

    # Turns.

    def _turn(self, told: dict[str, Any], turn: Callable[[], None]) -> dict[str, Any]:
        """Let the block run until it waits or ends; return what the worker is told."""
        mediator, shared = self._mediator, self._scope.shared
        progress = mediator.state.progress
        if told["step"] != progress.step or told["finished"] != progress.finished:
            self._budget.begin_step()
        progress.step, progress.position, progress.used = told["step"], told["position"], told["used"]
        progress.finished = told["finished"]
        if told["result"] is not None:
            progress.result = Result.from_plain(told["result"])
        if shared:
            mediator.let_go(lambda: shared.give(mediator.names, False))
        turn()
        if shared:
            mediator.let_go(lambda: shared.take(mediator.names, False))
        return self._answer()

    def _serve(self, told: dict[str, Any]) -> dict[str, Any]:
        """Give the block the value that it waits for."""
        at = self._mediator.state.waits.location
        assert at is not None
        tensors, self._given = told["tensors"], told["value"]
        self._count = len(tensors)
        value = build(told["value"], tensors)
        served = _served(told["how"], told["location"], value, tensors[0].shape[0] if tensors else 0, told["why"])
        return self._turn(told, lambda: self._mediator.serve(served, at, told["position"]))

    def _resume(self, told: dict[str, Any]) -> dict[str, Any]:
        """Let the block go on with what it waits for, which is no location."""
        value = build(told["value"], ())
        progress = self._mediator.state.progress
        return self._turn(told, lambda: self._mediator.resume(progress.result if told["ends"] else value))

    def _answer(self) -> dict[str, Any]:
        """Return what the worker is told after a turn."""
        state = self._mediator.state
        changed, value, misfit = self._changes()
        waits, ending, skips = state.waits, state.ending, state.record.skips
        assert isinstance(skips, _Skips)
        begun, skips.begun = skips.begun, []
        at = waits.location
        return {
            "waits": None if at is None else (str(at.path), str(at.kind), at.step, at.shown),
            "asked": waits.result_asked,
            "call": None if waits.call is None or ending.ended is not None else _call(waits.call),
            "ended": None if ending.ended is None else ending.ended.value,
            "failure": None if ending.failure is None else ending.failure.SerializeToString(),
            "changed": changed,
            "value": value,
            "misfit": misfit,
            "skips": begun,
        }

    def _changes(self) -> tuple[dict[int, torch.Tensor], Any, tuple[Any, ...] | None]:
        """Leave the location that the block has gone on from.

        Returns:
            The tensors that the block changed in place, by number; what it put in their places, None if nothing; and why that
            does not fit, None if it does as far as can be seen here.
        """
        state = self._mediator.state
        served, at = state.progress.served, state.progress.served_at
        if served is None or state.waits.call is not None:
            return {}, None, None
        try:
            if state.ending.failure is not None:
                return {}, None, None
            check_plain(served.value, str(at))
            changed = served.changes()
            told = describe(served.value, served.given()[: self._count])
            return changed, told if replaces(told) or told != self._given else None, None
        except Exception as error:
            message = f"what was assigned at {at} does not fit: {error}"
            misfit = Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=str(at))
            return {}, None, told_of(error if isinstance(error, Refusal) else misfit)
        finally:
            self._mediator.left()

    def _failure(self, error: Refusal) -> pb.Failure:
        """Return the failure of the block by an error that is at no line of its own."""
        identity = self._mediator.identity
        return pb.Failure(
            code=error.code,
            message=clip(error.message),
            location=error.location,
            trace_id=identity.trace_id,
            invoke=identity.invoke,
        )

    # What the block saved.

    def _saves(self, told: dict[str, Any]) -> dict[str, Any]:
        names = self._mediator.bound(self._writes)
        return self._sent(self._scope.saved(0, names, self._mediator.state.progress.used, self._limits))

    def _shared(self, told: dict[str, Any]) -> dict[str, Any]:
        return self._sent(self._scope.given_back(self._limits))

    def _sent(self, sent: Sent) -> dict[str, Any]:
        events, blobs = sent
        for blob_id, data in blobs:
            self.send_blob(blob_id, data)
        return {"events": [event.SerializeToString() for event in events]}

    def _increment(self, told: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream
        assert stream is not None
        names, events, on = self._mediator.names, [], True
        if told["final"]:
            events = [stream.end(names, told["steps"]).SerializeToString()]
        else:
            on = stream.step(names, told["steps"], told["last"])
        failure = None if stream.failure is None else stream.failure.SerializeToString()
        return {"events": events, "failure": failure, "on": on}

    def send_blob(self, blob_id: str, data: memoryview) -> None:
        """Send the bytes of a saved value, in pieces."""
        data = data.cast("B")
        for first in range(0, max(len(data), 1), _PIECE):
            self.end.send(Kind.PIECE, (blob_id, len(data), data[first : first + _PIECE]))
            self.end.next()


def _served(how: str, location: str, value: Any, rows: int, why: str) -> Served:
    """Return a location's value for the block, as the worker would make it."""
    if how == "fixed":
        return Fixed(location, value)
    mine = Rows(0, rows, rows, rows)
    if how == "read only":
        return ReadOnly(location, value, mine, lambda path: WHOLE, why)
    return Served(location, value, mine, lambda path: WHOLE)


def _call(call: Call) -> tuple[Any, ...]:
    """Return a module to apply, or a weight to read, as plain values."""
    if call.wanted is not None:
        rows = call.wanted.rows
        return "weight", call.node.path, call.wanted.name, None if rows is None else list(rows)
    return "apply", call.node.path, list(call.args), dict(call.kwargs)


def _why_unbound(error: Exception) -> pb.Failure:
    """Return the failure of a block whose names could not be bound."""
    if isinstance(error, BindingFailed):
        return error.failure
    code = error.code if isinstance(error, Refusal) else pb.ERROR_CODE_INVALID_ARGUMENT
    said = str(error) if isinstance(error, Refusal | WireError) else f"{type(error).__name__}: {error}"
    return pb.Failure(code=code, message=clip(said))
