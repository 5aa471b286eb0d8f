"""Turns the saved values of a trace into events, and their large tensors into blobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from executor.core.errors import Refusal
from executor.core.text import clip
from executor.saves.encoder import SaveEncoder, Stacks
from executor.saves.trace import SavingTrace
from interpose.v1 import trace_pb2 as pb
from interpose.wire.encoder import WireError


@dataclass(frozen=True)
class Limits:
    """Bounds on saves.

    Attributes:
        inline_bytes: the size in bytes above which a tensor becomes a blob.
        max_saved_bytes: the bytes that one trace may save.
    """

    inline_bytes: int
    max_saved_bytes: int


def collect(
    scope: SavingTrace,
    invoke: int,
    names: Mapping[str, Any],
    containers: Mapping[int, Any],
    limits: Limits,
    put_blob: Callable[[str, memoryview], object],
) -> list[pb.Event]:
    """Encode what one invoke saved, or what a whole trace shared.

    Code of the saved objects may run.

    Args:
        scope: the trace.
        invoke: the invoke's index, or -1 for the shared values.
        names: the names and their values. Of an invoke's names, only those with saved values in them are sent.
        containers: captured containers that changed, by index in the trace's scope.
        limits: bounds on saves.
        put_blob: takes a blob's id and its bytes.

    Returns:
        One Saves event (none if there is nothing to send), or one Failed event.
    """
    blobs = 0

    def put(data: memoryview, fresh: bool) -> str:
        nonlocal blobs
        blob_id = f"{scope.id}/{invoke if invoke >= 0 else 'shared'}/{blobs}"
        blobs += 1
        # Another invoke of the trace may still change a value of the block's own; the copy keeps the present bytes.
        put_blob(blob_id, data if fresh or scope.expected == 1 else memoryview(bytes(data)))
        return blob_id

    # Nothing is inline in a trace whose client leaves its tensors on the server.
    inline_bytes = -1 if scope.remote else limits.inline_bytes
    left = limits.max_saved_bytes - scope.saved_bytes
    # What a session keeps goes into later traces, where small tensors travel inside the message.
    kind = Stacks.NONE if not scope.stacks else Stacks.INLINE if invoke < 0 and scope.of_session else Stacks.ANY
    event = pb.Event()
    event.saves.invoke = invoke
    encoder: SaveEncoder | None = None
    what = ""
    try:
        sent = {name: value for name, value in names.items() if invoke < 0 or scope.registry.reaches(value)}
        if not sent and not containers:
            return []
        encoder = SaveEncoder(scope.registry, inline_bytes, put, left, scope.earlier, kind, event.saves.objects)
        encoder.stack([*sent.values(), *containers.values()])
        for name, value in sent.items():
            what = name
            event.saves.names.add(name=name).value.CopyFrom(encoder.encode(value))
        for index, value in containers.items():
            what = "a captured container"
            event.saves.updates.add(index=index).value.CopyFrom(encoder.contents(value))
    except Exception as error:  # The error may come from the encoder, or from the saved object's own code.
        return [not_saved(what, error, scope.id, invoke)]
    finally:
        if encoder is not None:
            encoder.close()
    scope.saved_bytes += encoder.bytes
    return [event]


def not_saved(what: str, error: Exception, trace_id: str, invoke: int) -> pb.Event:
    """Return the event of an invoke with a value that cannot be saved.

    Args:
        what: the value's name.
        error: why it cannot.
        trace_id, invoke: the invoke.
    """
    code = error.code if isinstance(error, Refusal) else pb.ERROR_CODE_INVALID_ARGUMENT
    said = "" if isinstance(error, WireError | Refusal) else f"{type(error).__name__}: "
    message = clip(f"{what!r} cannot be saved: {said}{error}")
    return pb.Event(failed=pb.Failure(code=code, message=message, trace_id=trace_id, invoke=invoke))
