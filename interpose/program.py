"""Captured blocks become a `Trace` message: each block's source, and everything its names hold, encoded once per trace.

Functions of the user's travel as source with what they read in turn; modules and functions of installed packages by
name; envoys and the tracer by reference. What cannot travel is refused here, with the notebook's line and what to write
instead. Values are taken when the trace is sent, so all its invokes see one state of an object.
"""

from __future__ import annotations

import ast
import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

from interpose import capture, symbols
from interpose.capture.rewrite import parse_block
from interpose.check import check_locations, frame_at
from interpose.envoy import Envoy, Node
from interpose.errors import InvalidArgument
from interpose.remote import RemoteValue
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Invoke, Program, Prompt, Trace
from interpose.v1.value_pb2 import Binding, Function, Value
from interpose.wire import Encoder, WireError

_UNBOUND = object()


@dataclass
class _Planned:
    """One invoke before its values are encoded."""

    block: capture.Block
    reads: dict[str, object]
    prompt: Prompt
    sampling: Mapping[str, object]


@dataclass
class TraceBuilder:
    """Gathers the invokes of one trace and encodes them with one table of objects.

    Args:
        model: the served model's name.
        tree: its modules.
        limits: what the server takes.
        is_tracer: says whether an object is this trace's tracer.
        sampling: the trace's own sampling parameters.
        session_id: the session it will run in, "" if none is open yet.

    Attributes:
        id: the trace's id.
        blobs: large values by digest, as bytes; alive as long as this is.
    """

    model: str
    tree: Node
    limits: Limits
    is_tracer: Callable[[object], bool]
    sampling: Mapping[str, object] = field(default_factory=dict)
    session_id: str = ""

    def __post_init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.blobs: dict[str, memoryview] = {}
        self._planned: list[_Planned] = []
        self._shared: dict[str, object] = {}
        self._encoder = Encoder(
            inline_bytes=self.limits.inline_bytes or 1 << 14,
            put_blob=self._put_blob,
            special=self._special,
            fallback=self._pickled if self.limits.pickled else None,
        )

    def add_invoke(
        self, block: capture.Block, scope: capture.Scope, prompt: Prompt, sampling: Mapping[str, object]
    ) -> int:
        """Add an invoke and check its locations; return its index.

        Raises:
            UnknownLocation: the block names a module that does not exist.
            InvalidArgument: the block is larger, or the invokes are more, than the server takes.
        """
        if self.limits.max_invokes and len(self._planned) >= self.limits.max_invokes:
            raise InvalidArgument(
                f"a trace may have {self.limits.max_invokes} invokes; start another trace for the rest"
            )
        size = len(block.source.encode())
        if self.limits.max_program_bytes and size > self.limits.max_program_bytes:
            raise InvalidArgument(
                f"the block's source has {size} bytes, the server takes {self.limits.max_program_bytes}; keep large "
                "constants in variables outside of it"
            )
        reads = {}
        for name in block.reads:
            value = _lookup(scope, name)
            if value is not _UNBOUND:
                reads[name] = value
        tracers = frozenset(name for name, value in reads.items() if self.is_tracer(value))
        check_locations(block.body, block.filename, reads, tracers)
        for value in list(reads.values()):
            if isinstance(value, FunctionType):
                self._check_function(value)
        self._planned.append(_Planned(block, reads, prompt, sampling))
        return len(self._planned) - 1

    def share(self, name: str, value: object) -> None:
        """Make a name of the outer block one object for all invokes."""
        self._shared[name] = value

    def build(self) -> Trace:
        """Encode everything and return the trace.

        Raises:
            InvalidArgument: a value cannot travel, or the whole is larger than the server takes.
        """
        trace = Trace(id=self.id, model=self.model)
        for name, value in self._shared.items():
            where = f"the shared variable {name!r}"
            trace.shared.add(
                name=name, value=self._encode(value, where, self._planned[0].block if self._planned else None, name)
            )
        trace.sampling.extend(self._sampling(self.sampling))
        for index, planned in enumerate(self._planned):
            trace.invokes.append(self._invoke(index, planned))
        trace.scope.CopyFrom(self._encoder.objects)
        size = trace.ByteSize()
        if self.limits.max_message_bytes and size > self.limits.max_message_bytes:
            raise InvalidArgument(
                f"the trace has {size >> 20} MiB without its tensors, the server takes {self.limits.max_message_bytes >> 20} "
                "MiB; use fewer invokes, or tensors instead of long lists"
            )
        return trace

    def samplings(self) -> list[Mapping[str, object]]:
        """Return each invoke's own sampling parameters."""
        return [planned.sampling for planned in self._planned]

    def captured(self) -> dict[int, object]:
        """Return the caller's objects by their index in the trace's scope."""
        return self._encoder.entries()

    def _invoke(self, index: int, planned: _Planned) -> Invoke:
        block = planned.block
        program = Program(
            source=block.source,
            filename=block.filename,
            first_line=block.first_line,
            indent=block.indent,
            writes=block.writes,
        )
        after: set[int] = set()
        for name in block.reads:
            if name in self._shared:
                continue
            writers = {i for i, earlier in enumerate(self._planned[:index]) if name in earlier.block.writes}
            after |= writers
            if name not in planned.reads:
                continue
            try:
                value = self._encode(planned.reads[name], repr(name), block, name)
            except InvalidArgument:
                if writers:  # what an earlier invoke assigns to the name takes its place
                    continue
                raise
            program.reads.add(name=name, value=value)
        sampling = self._sampling(planned.sampling)
        return Invoke(prompt=planned.prompt, sampling=sampling, program=program, after=sorted(after))

    def _sampling(self, sampling: Mapping[str, object]) -> list[Binding]:
        return [
            Binding(name=name, value=self._encode(value, f"the sampling parameter {name!r}", None, ""))
            for name, value in sampling.items()
        ]

    def _encode(self, value: object, what: str, block: capture.Block | None, name: str) -> Value:
        try:
            return self._encoder.encode(value)
        except WireError as error:
            frames = []
            if block is not None:
                frames = [frame_at(node, block.filename) for node in _uses(block.body, name)][:1]
            where = f"{what}{error.where}" if name else what
            raise InvalidArgument(f"{where} cannot be sent with the block: {error}", frames=frames) from None

    def _put_blob(self, data: memoryview) -> str:
        if self.limits.max_upload_bytes and data.nbytes > self.limits.max_upload_bytes:
            raise WireError(
                f"a tensor of {data.nbytes >> 20} MiB; the server takes {self.limits.max_upload_bytes >> 20} MiB in one piece"
            )
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def _special(self, obj: Any) -> Value | None:
        """Return the value of what is known by reference or travels as source; None for plain data."""
        if obj is None or type(obj) in _PLAIN:
            return None
        if isinstance(obj, Envoy):
            if obj._tree.model != self.tree.model:
                raise WireError(f"it is a module of another model ({obj._tree.model}); a trace runs on one", obj)
            return Value(module=obj.path)
        if isinstance(obj, RemoteValue):
            return self._encoder.refer(obj, lambda: self._remote(obj))
        if isinstance(obj, capture.CapturedContext):
            if self.is_tracer(obj):
                return Value(tracer=True)
            raise WireError("the tracer of another trace: use this block's own, or read its values by name", obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        named = symbols.symbol_value(obj)
        if named is not None:
            return named
        if isinstance(obj, FunctionType):
            return self._function(obj)
        refusal = _refusal(obj)
        if refusal is None or self.limits.pickled:
            return None
        raise WireError(refusal, obj)

    def _remote(self, value: RemoteValue) -> Value:
        try:
            return value.to_value(self.session_id)
        except InvalidArgument as error:
            raise WireError(error.message, value) from None

    def _module(self, module: ModuleType) -> Value:
        value = symbols.module_value(module)
        if value is None:
            raise WireError(
                f"the module {module.__name__} is yours, so the server cannot import it; import the functions you need by "
                f"name, they travel as source: from {module.__name__} import …",
                module,
            )
        return value

    def _function(self, function: FunctionType) -> Value:
        source = capture.function_source(function)
        if source is None:
            raise WireError(
                f"the function {function.__qualname__} has no source that can be sent; define it with def or lambda in the "
                "notebook, or inside the block",
                function,
            )

        def build() -> Value:
            reads = []
            for name, value in source.bindings.items():
                try:
                    reads.append(Binding(name=name, value=self._encoder.encode(value)))
                except WireError as error:
                    raise WireError(f"{source.name} uses {name!r}{error.where}: {error}", error.subject) from None
            return Value(
                function=Function(
                    name=source.name,
                    source=source.source,
                    filename=source.filename,
                    first_line=source.first_line,
                    indent=source.indent,
                    reads=reads,
                )
            )

        return self._encoder.refer(function, build)

    def _check_function(self, function: FunctionType) -> None:
        """Check the locations that a function of the user's names directly."""
        if symbols.symbol_value(function) is not None:
            return
        source = capture.function_source(function)
        if source is None:
            return
        if source.source.lstrip().startswith(
            "lambda"
        ):  # its text may be no expression on its own; the worker checks it
            return
        body = parse_block(source.source, source.filename, source.first_line, source.indent).body
        check_locations(body, source.filename, source.bindings, frozenset())

    def _pickled(self, obj: object) -> Value:
        import cloudpickle

        try:
            return self._encoder.refer(obj, lambda: Value(pickled=cloudpickle.dumps(obj)))
        except Exception as error:
            raise WireError(f"an object of type {type(obj).__name__} that cannot be pickled: {error}", obj) from error


_PLAIN = frozenset({bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice, range})


def _refusal(obj: object) -> str | None:
    """Say why an object other than plain data cannot travel and what to write instead; None if the wire decides."""
    name = getattr(obj, "__qualname__", type(obj).__qualname__)
    if isinstance(obj, MethodType) or (callable(obj) and getattr(obj, "__self__", None) is not None):
        return f"the method {name} is bound to an object; call it on the object inside the block, or send a function"
    if isinstance(obj, type):
        return f"the class {name} is defined in the notebook; define it inside the block"
    if type(obj).__module__.startswith(("interpose.client", "interpose.session")):
        return "a connection stays in the notebook; use only the model and the tracer in a block"
    if hasattr(obj, "state_dict") and hasattr(obj, "forward"):
        return f"a torch module ({name}) cannot travel; send its weights as tensors and compute with them in the block"
    if hasattr(obj, "__next__"):
        return f"a {name} is consumed as it is read; send a list of its items"
    if not symbols.is_installed(type(obj).__module__):
        return (
            f"an object of the class {name}, which is defined in the notebook; send its parts (numbers, tensors, dicts)"
        )
    return None


def _lookup(scope: capture.Scope, name: str) -> object:
    try:
        return scope.lookup(name)
    except KeyError:
        return _UNBOUND


def _uses(body: Sequence[ast.AST], name: str) -> Iterable[ast.AST]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return sorted(named, key=lambda node: (node.lineno, node.col_offset))
