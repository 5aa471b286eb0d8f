"""Builds the `Trace` message of captured blocks: sources, and the values of names.

A value that cannot be sent is refused here, with the notebook's line and the code to write instead. The values are encoded
when the trace is sent, once per trace. So all its invokes see the same state of an object.
"""

from __future__ import annotations

import hashlib
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from interpose import capture
from interpose.contract.errors import InterposeWarning, InvalidArgument
from interpose.modules.tree import Node
from interpose.program.check import check_locations, frame_at, refused
from interpose.program.check_code import check_code
from interpose.program.gang import Planned, form_gang, uses, writers
from interpose.program.libraries import Libraries
from interpose.program.session_variables import SessionVariables, inside
from interpose.program.shipping import Shipper
from interpose.rpc.remote import RemoteValue
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Invoke, Program, Prompt, Trace
from interpose.v1.value_pb2 import Binding, Value
from interpose.wire.encoder import Encoder, WireError

_UNBOUND = object()


@dataclass
class TraceBuilder:
    """Gathers the invokes of one trace and encodes them with one table of objects.

    Size: what the trace is made for, and what of it is encoded so far.

    Args:
        model: the served model's name.
        tree: the module tree of the model.
        limits: the limits of the server.
        is_tracer: says whether an object is this trace's tracer.
        sampling: the trace's own sampling parameters.
        session_id: the session of the trace; "": the session is not open yet; None: a standing edit, which outlives sessions
            and uses no values of a session.
        variables: the session variables; None: the trace has no session variables.
        libraries: what the server has of the notebook's libraries; None: all that is installed here.

    Attributes:
        id: the trace's id.
        blobs: the bytes of large values, by digest; valid while the builder exists.
    """

    model: str
    tree: Node
    limits: Limits
    is_tracer: Callable[[object], bool]
    sampling: Mapping[str, object] = field(default_factory=dict)
    session_id: str | None = None
    variables: SessionVariables | None = None
    libraries: Libraries | None = None

    def __post_init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.blobs: dict[str, memoryview] = {}
        self._planned: list[Planned] = []
        self._scopes: list[
            capture.Scope
        ] = []  # one for each invoke; dropped when the trace is built, as they hold frames
        self._shared: dict[str, object] = {}
        self._libraries = self.libraries or Libraries()
        self._shipper = shipper = Shipper(self.tree, self.limits, self.is_tracer, self.session_id, self._libraries)
        self._encoder = shipper.encoder = Encoder(
            inline_bytes=self.limits.inline_bytes or 1 << 14,
            put_blob=self._put_blob,
            special=shipper.special,
            fallback=self._pickled if self.limits.pickled else None,
            gradients=True,
        )

    def add_invoke(
        self,
        block: capture.Block,
        scope: capture.Scope,
        prompt: Prompt | None,
        sampling: Mapping[str, object],
        group: int | None = None,
    ) -> int:
        """Add an invoke and check its locations; return its index.

        Args:
            block: the block of the invoke.
            scope: the scope of the block.
            prompt: the prompt; None: the block sees the rows of all prompts of the trace.
            sampling: the prompt's own sampling parameters.
            group: the same number for all sequences of a prompt, which do not see each other's names.

        Raises:
            UnknownLocation: the block names a module that does not exist.
            InvalidArgument: the block is larger than the server's limit, or the trace has too many invokes.
        """
        if self.limits.max_invokes and len(self._planned) >= self.limits.max_invokes:
            raise InvalidArgument(
                f"a trace may have {self.limits.max_invokes} invokes; start another trace for the rest"
            )
        refusal = self._shipper.sources.refusal("the block", block.source, block.body)
        if refusal:
            raise InvalidArgument(refusal)
        unknown = self._libraries.refuse_imports("the block", block.body)
        if unknown is not None:
            raise InvalidArgument(unknown[0], frames=[frame_at(unknown[1], block.filename)])
        reads = {}
        for name in block.reads:
            value = _lookup(scope, name)
            if value is not _UNBOUND:
                reads[name] = value
        tracers = frozenset(name for name, value in reads.items() if self.is_tracer(value))
        check_locations(block.body, block.filename, reads, tracers)
        for value in list(reads.values()):
            check_code(value)
        self._planned.append(Planned(block, reads, prompt, sampling, group))
        self._scopes.append(scope)
        return len(self._planned) - 1

    def share(self, name: str, value: object) -> None:
        """Share the object of an outer block's name between all invokes."""
        self._shared[name] = value

    def build(self) -> Trace:
        """Encode all blocks and values, and return the trace.

        Raises:
            InvalidArgument: a value cannot be sent, or the trace is larger than the server's limit.
        """
        trace = Trace(id=self.id, model=self.model)
        kept = self._reserved()
        for name, value in self._shared.items():
            trace.shared.add(name=name, value=self._encode(value, *self._shared_entry(name)))
        trace.sampling.extend(self._sampling(self.sampling))
        for index, planned in enumerate(self._planned):
            trace.invokes.append(self._invoke(index, planned))
        form_gang(trace, self._planned, self._encoder.objects, self._shared)
        if self.variables is not None:
            self._bring(trace, self.variables, kept)
        try:
            blocks = [planned.block for planned in self._planned]
            capture.refuse_shared(self._shipper.pieces, zip(blocks, self._scopes, strict=True))
        except capture.CaptureError as error:
            raise refused(error) from None
        finally:
            self._warn()
            self._scopes.clear()
        trace.scope.CopyFrom(self._encoder.objects)
        size = trace.ByteSize()
        if self.limits.max_message_bytes and size > self.limits.max_message_bytes:
            raise InvalidArgument(
                f"the trace has {size >> 20} MiB without its tensors, the server takes {self.limits.max_message_bytes >> 20} "
                "MiB; use fewer invokes, or tensors instead of long lists"
            )
        return trace

    def samplings(self) -> list[Mapping[str, object]]:
        """Return each prompt's own sampling parameters."""
        return [planned.sampling for planned in self._planned if planned.prompt is not None]

    def captured(self) -> dict[int, object]:
        """Return the caller's objects by their index in the trace's scope."""
        return self._encoder.entries()

    def _warn(self) -> None:
        """Say what the user should know of the libraries, at the first block."""
        block, scope = self._planned[0].block, self._scopes[0]
        registry = scope.globals.setdefault("__warningregistry__", {})
        for note in self._shipper.notes:
            warnings.warn_explicit(note, InterposeWarning, block.filename, block.first_line, registry=registry)

    def _shared_entry(self, name: str) -> tuple[str, capture.Block | None, str]:
        return f"the shared variable {name!r}", self._planned[0].block if self._planned else None, name

    def _reserved(self) -> dict[str, object]:
        """Reserve entries for the session variables; return them by their first names in the trace.

        Their contents are encoded last. Contents that no other value refers to need not be sent.
        """
        variables = self.variables
        if variables is None:
            return {}
        for planned in self._planned:
            found = {name: value for name, value in planned.reads.items() if value in variables}
            self._shared.update({name: value for name, value in found.items() if name not in self._shared})
        for planned in self._planned:
            for name, value in planned.reads.items():
                if self._shared.get(name, value) is not value and (
                    value in variables or self._shared[name] in variables
                ):
                    raise InvalidArgument(
                        f"{name!r} is something that the session's traces share, and another object in another prompt of this "
                        "trace: give each a name of its own",
                        frames=[frame_at(node, planned.block.filename) for node in uses(planned.block.body, name)][:1],
                    )
        kept: dict[str, object] = {}
        for name, value in self._shared.items():
            if variables.takes(value) and all(value is not other for other in kept.values()):
                kept[name] = value
                self._encoder.reserve(value)
        return kept

    def _bring(self, trace: Trace, variables: SessionVariables, kept: Mapping[str, object]) -> None:
        """Add the session variables to the trace, with contents that the server does not have."""
        left = dict(kept)
        uses = {name: variables.use(value, self._encoder.reserve(value)) for name, value in kept.items()}
        for value in self._encoder.entries().values():  # also variables that only functions and objects hold
            if value in variables and all(value is not other for other in left.values()):
                name = f"__interpose_session_{len(left)}__"
                left[name] = value
                trace.shared.add(name=name, value=self._encoder.encode(value))
                uses[name] = variables.use(value, self._encoder.reserve(value))
                uses[name].canonical = False  # it is in the table already
        # If a variable and another value of the trace hold the same object, that object must stay the same in the block.
        while name := next(
            (name for name, value in left.items() if not uses[name].canonical or self._aliased(value)), ""
        ):
            uses[name].canonical = False
            self._fill(name, left.pop(name))
        trace.variables.extend(uses.values())

    def _aliased(self, value: object) -> bool:
        return any(self._encoder.index_of(item) is not None for item in inside(value))

    def _fill(self, name: str, value: object) -> None:
        def contents() -> Value:
            if isinstance(value, RemoteValue):
                self._encoder.objects.values[self._encoder.reserve(value)].CopyFrom(
                    value.to_value(self.session_id or "")
                )
            else:
                self._encoder.fill(value)
            return Value()

        self._wired(contents, *self._shared_entry(name))

    def _invoke(self, index: int, planned: Planned) -> Invoke:
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
            before = writers(self._planned, index, name)
            if any(self._planned[i].group is not None for i in before):
                raise InvalidArgument(
                    f"{name!r} has a value for each of the n sequences of an earlier prompt; use it after the trace, or give "
                    "each sequence a `with tracer.invoke(prompt):` of its own",
                    frames=[frame_at(node, block.filename) for node in uses(block.body, name)][:1],
                )
            after |= before
            if name not in planned.reads:
                continue
            try:
                value = self._encode(planned.reads[name], repr(name), block, name)
            except InvalidArgument:
                if before:  # the block gets the value that an earlier invoke assigns
                    continue
                raise
            program.reads.add(name=name, value=value)
        own = dict(planned.sampling)
        lora = str(own.pop("lora", ""))
        sampling = self._sampling(own)
        joint = planned.prompt is None
        return Invoke(
            prompt=planned.prompt, sampling=sampling, program=program, after=sorted(after), joint=joint, lora=lora
        )

    def _sampling(self, sampling: Mapping[str, object]) -> list[Binding]:
        return [
            Binding(name=name, value=self._encode(value, f"the sampling parameter {name!r}", None, ""))
            for name, value in sampling.items()
        ]

    def _encode(self, value: object, what: str, block: capture.Block | None, name: str) -> Value:
        def encoded() -> Value:
            return self._encoder.encode(value) if block is None else self._shipper.read(name, value, block.body)

        return self._wired(encoded, what, block, name)

    def _wired(self, encode: Callable[[], Value], what: str, block: capture.Block | None, name: str) -> Value:
        """Call `encode`; refuse a value that cannot be sent, with the lines that use it.

        Raises:
            InvalidArgument: the value cannot be sent.
        """
        try:
            return encode()
        except WireError as error:
            frames = []
            if block is not None:
                frames = [frame_at(node, block.filename) for node in uses(block.body, name)][:1]
            where = f"{what}{error.where}" if name else what
            hint = self._libraries.hint(error.subject) if error.subject is not None else ""
            raise InvalidArgument(f"{where} cannot be sent with the block: {error}{hint}", frames=frames) from None

    def _put_blob(self, data: memoryview) -> str:
        if self.limits.max_upload_bytes and data.nbytes > self.limits.max_upload_bytes:
            raise WireError(
                f"a tensor of {data.nbytes >> 20} MiB; the server takes {self.limits.max_upload_bytes >> 20} MiB in one piece"
            )
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def _pickled(self, obj: object) -> Value:
        import cloudpickle

        try:
            return self._encoder.refer(obj, lambda: Value(pickled=cloudpickle.dumps(obj)))
        except Exception as error:
            raise WireError(f"an object of type {type(obj).__name__} that cannot be pickled: {error}", obj) from error


def _lookup(scope: capture.Scope, name: str) -> object:
    try:
        return scope.lookup(name)
    except KeyError:
        return _UNBOUND
