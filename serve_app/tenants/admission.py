"""Checks everything that a client sends, before anything of it is stored or run.

Each check refuses with a `ServiceFailure`. Its message says what is wrong, what the limit is, and what to do instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from interpose.contract.errors import ServiceFailure, failure
from interpose.contract.version import PROTOCOL
from interpose.v1 import model_pb2, service_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire import gang as together
from interpose.wire import views as indexing
from interpose.wire.prompts import too_long
from interpose.wire.walk import parts
from serve_app.settings import Limits, ModelSettings, Settings, Tenant

OLDEST_PROTOCOL = 1
MAX_VALUES = 1_000_000
MAX_NAMES = 10_000
MAX_CHAT_MESSAGES = 1000
MAX_EDITS = 16  # standing edits that one trace names
MAX_VARIABLES = 256  # session variables that one trace uses
MAX_SESSIONS = 16  # sessions whose saved values one trace uses
MAX_LINE = 10_000_000  # the last line of a file where a program may begin; compilers count lines in 32 bits
MAX_COLUMN = 10_000
MAX_FILENAME = 4096
_MAX_COMPARED = 100  # characters of an unknown name that are compared with known names

_TRACE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_EDIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHARED = ("list", "dict", "set", "tensor", "remote")

# Ids of blobs of earlier traces, by the id of the session that holds them; "" is the trace's own session.
Remotes = dict[str, tuple[str, ...]]

M = TypeVar("M", bound=Message)

Source = pb.Program | value_pb2.Function | value_pb2.Class


def parse(kind: type[M], data: bytes, limit: int) -> M:
    """Parse a serialized message of at most `limit` bytes.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, the data is too long or is not a message of this kind.
    """
    if len(data) > limit:
        raise refuse(
            f"the message has {len(data)} bytes, the limit is {limit}: send fewer values, and large tensors as uploads"
        )
    try:
        return kind.FromString(data)
    except DecodeError:
        raise refuse(f"the request is not a valid {kind.DESCRIPTOR.full_name} message") from None


def check_protocol(protocol: int) -> None:
    """Refuse a client of an unsupported protocol version, and say which side to upgrade."""
    if OLDEST_PROTOCOL <= protocol <= PROTOCOL:
        return
    side = "server" if protocol > PROTOCOL else "client"
    spoken = f"the client speaks protocol {protocol}, the server {OLDEST_PROTOCOL} to {PROTOCOL}"
    message = f"{spoken}: upgrade interpose on the {side}"
    raise ServiceFailure(failure(pb.ERROR_CODE_VERSION, message))


def model_for(settings: Settings, name: str) -> ModelSettings:
    """Return the settings of the model with this name.

    Raises:
        ServiceFailure: NOT_FOUND, no such model is served; with the names that are near.
    """
    model = settings.model_named(name)
    if model is not None:
        return model
    names = [model.name for model in settings.models]
    served = f"served here: {', '.join(names)}"
    message = f"there is no model {name[:80]!r}; {served}" if name else f"say which model; {served}"
    near = difflib.get_close_matches(name[:_MAX_COMPARED], names)
    raise ServiceFailure(failure(pb.ERROR_CODE_NOT_FOUND, message, suggestions=near))


def check_kind(model: ModelSettings, tenant: Tenant) -> None:
    """Refuse a tenant whose traces a model does not run.

    Raises:
        ServiceFailure: PERMISSION_DENIED.
    """
    kind = "sandboxed" if tenant.trust == "none" else "trusted"
    if model.accepts not in ("all", kind):
        whose = "with trust none" if model.accepts == "sandboxed" else "with trust code or full"
        message = (
            f"the model {model.name!r} runs traces of tenants {whose} only; ask the operator which model is for you"
        )
        raise ServiceFailure(failure(pb.ERROR_CODE_PERMISSION_DENIED, message))


def check_upload(request: service_pb2.UploadRequest, limits: Limits) -> None:
    """Refuse a chunk that cannot belong to an upload within the limits."""
    if not _DIGEST.fullmatch(request.digest):
        raise refuse(f"an upload's digest is 'sha256:' and 64 lower-case hex digits, not {request.digest[:80]!r}")
    if request.size > limits.max_upload_bytes:
        raise refuse(f"the upload has {request.size} bytes; the limit is {limits.max_upload_bytes}")
    if len(request.data) > limits.chunk_bytes:
        raise refuse(f"the chunk has {len(request.data)} bytes; the limit is {limits.chunk_bytes}")
    if request.offset + len(request.data) > request.size:
        raise refuse(f"a chunk of {len(request.data)} bytes at {request.offset} does not fit into {request.size} bytes")


def check_trace(
    trace: pb.Trace, model: ModelSettings, tenant: Tenant, description: model_pb2.ModelDescription
) -> Remotes:
    """Refuse a trace that cannot run.

    Counts, sizes, names and references of the trace are within bounds afterwards.

    Returns:
        The blobs of earlier traces that the trace uses.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, or PERMISSION_DENIED for pickled values from a tenant that is not trusted.
    """
    check_kind(model, tenant)
    limits = model.limits
    if not _TRACE_ID.fullmatch(trace.id):
        raise refuse("a trace's id has up to 100 letters, digits, '.', '_', ':' and '-'")
    if not trace.invokes:
        raise refuse("the trace has no invoke: nothing would run", trace.id)
    if len(trace.invokes) > limits.max_invokes:
        raise refuse(f"the trace has {len(trace.invokes)} invokes; the limit is {limits.max_invokes}", trace.id)
    if len(trace.edits) > MAX_EDITS or len(set(trace.edits)) < len(trace.edits):
        raise refuse(f"a trace names up to {MAX_EDITS} edits, each once; this one names {len(trace.edits)}", trace.id)
    if trace.HasField("openai"):
        raise refuse("requests of the OpenAI-compatible endpoint come over HTTP", trace.id)
    if trace.applied:
        raise refuse("a trace names edits; it does not bring their programs", trace.id)
    parameters = frozenset(description.sampling_parameters)
    for index, lora in enumerate((trace.lora, *(invoke.lora for invoke in trace.invokes)), -1):
        _check_lora(lora, description.adapters, trace.id, index)
    _check_sampling(trace.sampling, parameters, trace.id, -1)
    for index, invoke in enumerate(trace.invokes):
        if not invoke.joint:
            _check_prompt(invoke.prompt, description, trace.id, index)
        _check_program(invoke.program, limits, trace.id, index)
        _check_sampling(invoke.sampling, parameters, trace.id, index)
        if any(other >= index for other in invoke.after):
            raise refuse("an invoke can only wait for earlier invokes", trace.id, index)
    reason = together.refusal(trace)
    if reason:
        raise refuse(reason, trace.id)
    if len(trace.exchanged) > MAX_NAMES or not all(name.isidentifier() for name in trace.exchanged):
        raise refuse(f"a trace exchanges up to {MAX_NAMES} names", trace.id)
    _check_variables(trace)
    values: list[value_pb2.Value] = [*trace.scope.values]
    for bindings in (trace.shared, trace.sampling, *(invoke.sampling for invoke in trace.invokes)):
        values.extend(binding.value for binding in bindings)
    for invoke in trace.invokes:
        values.extend(binding.value for binding in invoke.program.reads)
    sources: dict[tuple[str, str, int], int] = {}
    for invoke in trace.invokes:
        _count_source(invoke.program, sources)
    remotes = _check_values(values, limits, tenant.trust == "full" and limits.pickled, trace.id, sources)
    total = sum(sources.values())
    if total > limits.max_trace_program_bytes:
        raise refuse(
            f"the trace's blocks, functions and classes have {total} bytes of source; the limit is "
            f"{limits.max_trace_program_bytes}: trace fewer different blocks at a time, or keep large constants in variables",
            trace.id,
        )
    return remotes


def check_edit(edit: pb.Edit, model: ModelSettings, tenant: Tenant) -> None:
    """Refuse an edit that cannot be stored or cannot run.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, or PERMISSION_DENIED for pickled values from a tenant that is not trusted.
    """
    check_kind(model, tenant)
    if not _EDIT_NAME.fullmatch(edit.name):
        raise refuse(
            f"an edit's name has up to 100 letters, digits, '.', '_' and '-'; {edit.name[:80]!r} is not such a name"
        )
    _check_program(edit.program, model.limits, "", -1)
    values = [*edit.scope.values, *(binding.value for binding in edit.program.reads)]
    sources: dict[tuple[str, str, int], int] = {}
    _count_source(edit.program, sources)
    remotes = _check_values(values, model.limits, tenant.trust == "full" and model.limits.pickled, "", sources)
    if sum(sources.values()) > model.limits.max_trace_program_bytes:
        raise refuse(
            f"the edit's block, functions and classes have {sum(sources.values())} bytes of source; the limit is "
            f"{model.limits.max_trace_program_bytes}: keep large constants in variables"
        )
    if remotes:
        raise refuse(
            "an edit outlives its session, so it cannot refer to saved values: fetch the values, and send them with the edit"
        )
    for value in values:
        if value.tensor.WhichOneof("payload") == "blob":
            raise refuse("an edit must contain its tensors: uploads end with their session")


def check_view(view: value_pb2.TensorView, trace_id: str = "") -> None:
    """Refuse indices that do not fit a value of the view's shape."""
    try:
        indexing.check(view)
    except IndexError as error:
        raise refuse(str(error), trace_id) from None


def selected(data: np.ndarray, view: value_pb2.TensorView) -> np.ndarray:  # [bytes], uint8
    """Return the part of a value's bytes that a view selects.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, the view does not fit the value.
    """
    try:
        return indexing.apply(data, view)
    except IndexError as error:
        raise refuse(str(error)) from None


def refuse(message: str, trace_id: str = "", invoke: int = -1) -> ServiceFailure:
    """Return an INVALID_ARGUMENT failure to raise."""
    return ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message, trace_id=trace_id, invoke=invoke))


def _check_prompt(prompt: pb.Prompt, description: model_pb2.ModelDescription, trace_id: str, invoke: int) -> None:
    kind = prompt.WhichOneof("kind")
    if kind is None:
        raise refuse("an invoke without a prompt", trace_id, invoke)
    if kind == "token_ids":
        length = len(prompt.token_ids.ids)
        if length == 0:
            raise refuse("the prompt has no tokens", trace_id, invoke)
        message = too_long(length, description.max_model_len, description.max_prompt_tokens)
        if message:
            raise refuse(message, trace_id, invoke)
        if max(prompt.token_ids.ids) >= description.vocab_size:
            message = f"token id {max(prompt.token_ids.ids)} is not in the vocabulary of {description.vocab_size}"
            raise refuse(message, trace_id, invoke)
    elif kind == "chat":
        count = len(prompt.chat.messages)
        if not 0 < count <= MAX_CHAT_MESSAGES:
            raise refuse(f"a chat of {count} messages; from 1 to {MAX_CHAT_MESSAGES} are taken", trace_id, invoke)


def _check_lora(name: str, adapters: Collection[str], trace_id: str, invoke: int) -> None:
    if name and name not in adapters:
        near = difflib.get_close_matches(name[:_MAX_COMPARED], adapters, n=3)
        what = f"there is no LoRA adapter {name[:80]!r}; it has {', '.join(adapters) or 'none'}"
        fact = failure(pb.ERROR_CODE_INVALID_ARGUMENT, what, trace_id=trace_id, invoke=invoke, suggestions=near)
        raise ServiceFailure(fact)


def _check_variables(trace: pb.Trace) -> None:
    """Refuse session variables that the traces of a session cannot share."""
    variables = trace.variables
    if len(variables) > MAX_VARIABLES:
        raise refuse(f"a trace shares up to {MAX_VARIABLES} objects of its session, not {len(variables)}", trace.id)
    for field in ("id", "entry"):
        if len({getattr(variable, field) for variable in variables}) < len(variables):
            raise refuse(f"two session variables have one {field}", trace.id)
    for variable in variables:
        if not _TRACE_ID.fullmatch(variable.id):
            raise refuse("a variable's id has up to 100 letters, digits, '.', '_', ':' and '-'", trace.id)
        kind = trace.scope.values[variable.entry].WhichOneof("kind") if variable.entry < len(trace.scope.values) else ""
        if kind not in (("none",) if variable.canonical else _SHARED):
            raise refuse(
                f"a variable of the session cannot be the entry {variable.entry} of the trace's scope", trace.id
            )


def _check_source(source: Source, what: str, limits: Limits, trace_id: str, invoke: int = -1) -> None:
    """Refuse a source text that is too long, or whose line or column no file can have."""
    size = len(source.source.encode())
    if size > limits.max_program_bytes:
        raise refuse(
            f"{what} has {size} bytes of source; the limit is {limits.max_program_bytes}: keep large constants in variables "
            "outside of it",
            trace_id,
            invoke,
        )
    if source.first_line > MAX_LINE or source.indent > MAX_COLUMN or len(source.filename) > MAX_FILENAME:
        raise refuse(
            f"{what} is said to begin in line {source.first_line}, column {source.indent} of a file with a name of "
            f"{len(source.filename)} characters; the limits are {MAX_LINE}, {MAX_COLUMN} and {MAX_FILENAME}",
            trace_id,
            invoke,
        )


def _check_program(program: pb.Program, limits: Limits, trace_id: str, invoke: int) -> None:
    _check_source(program, "the block", limits, trace_id, invoke)
    names = [*(binding.name for binding in program.reads), *program.writes]
    if len(names) > MAX_NAMES:
        raise refuse(f"the block uses {len(names)} names; the limit is {MAX_NAMES}", trace_id, invoke)
    for name in names:
        if not name.isidentifier():
            raise refuse(f"{name[:80]!r} is not a name", trace_id, invoke)


def _check_sampling(
    sampling: Iterable[value_pb2.Binding], parameters: Collection[str], trace_id: str, invoke: int
) -> None:
    for binding in sampling:
        if binding.name in parameters:
            continue
        near = difflib.get_close_matches(binding.name[:_MAX_COMPARED], parameters, n=3)
        raise ServiceFailure(
            failure(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"unknown sampling parameter {binding.name[:80]!r}",
                trace_id=trace_id,
                invoke=invoke,
                suggestions=near,
            )
        )


def _count_source(source: Source, sources: dict[tuple[str, str, int], int]) -> None:
    """Note the size of a source text that the engine compiles.

    The engine compiles the same text at the same place in a file only once.
    """
    sources[source.source, source.filename, source.first_line] = len(source.source.encode())


def _check_values(
    todo: list[value_pb2.Value],
    limits: Limits,
    pickled: bool,
    trace_id: str,
    sources: dict[tuple[str, str, int], int],
) -> Remotes:
    """Count the values of a trace and find the values that need a trusted tenant.

    The meaning of a value is checked where the value is decoded.

    Args:
        sources: takes the sizes of the source texts of functions and classes (`_count_source`).

    Returns:
        The blobs of earlier traces that the values refer to.
    """
    todo = list(todo)
    remotes: dict[str, set[str]] = {}
    count = 0
    while todo:
        value = todo.pop()
        count += 1
        if count + len(todo) > MAX_VALUES:
            raise refuse(
                f"the trace carries more than {MAX_VALUES} values: send long lists of numbers as a tensor", trace_id
            )
        todo.extend(parts(value))
        kind = value.WhichOneof("kind")
        if kind in ("function", "class_source"):
            source: value_pb2.Function | value_pb2.Class = getattr(value, kind)
            _check_source(source, repr(source.name[:80]), limits, trace_id)
            _count_source(source, sources)
        elif kind == "remote":
            check_view(value.remote.view, trace_id)
            remotes.setdefault(value.remote.session_id, set()).add(value.remote.blob_id)
            if len(remotes) > MAX_SESSIONS:
                raise refuse(f"the trace uses saved values of more than {MAX_SESSIONS} sessions: fetch some", trace_id)
        elif kind in ("stack", "stacked"):
            raise refuse("the trace carries a stack of tensors, which only a server sends: send the tensors", trace_id)
        elif kind == "pickled" and not pickled:
            message = "this tenant may not send pickled values: use tensors, numbers, strings, containers and functions"
            raise ServiceFailure(failure(pb.ERROR_CODE_PERMISSION_DENIED, message, trace_id=trace_id))
    return {session: tuple(sorted(ids)) for session, ids in remotes.items()}
