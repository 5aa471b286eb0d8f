"""Lines of the audit log: which programs ran, of which tenant, with which key.

A program is named by a digest of its source texts. The same blocks, functions and classes have the same digest in every trace,
whatever values they were sent with.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2
from interpose.wire.walk import parts
from serve_app.ingress.requests import Submitted, method_of

# Bytes of a message that is looked through in a thread.
LONG_MESSAGE = 256 * 1024


async def trace_line(submitted: Submitted, session_id: str) -> dict[str, Any]:
    """Return the line of a trace that is about to run."""
    trace = submitted.trace
    programs = [invoke.program for invoke in trace.invokes]
    if len(submitted.message.trace) > LONG_MESSAGE:
        program = await asyncio.to_thread(digest, trace.scope.values, *programs)
    else:
        program = digest(trace.scope.values, *programs)
    return {
        "action": "trace",
        "tenant": submitted.tenant.name,
        "key": submitted.caller.key,
        "model": submitted.served.settings.name,
        "session": session_id,
        "trace": trace.id,
        "method": method_of(trace, submitted.message.job),
        "program": program,
        "edits": list(trace.edits),
        "invokes": len(trace.invokes),
        "bytes": len(submitted.message.trace),
    }


def edit_line(edit: pb.Edit, tenant: str, key: str, model: str) -> dict[str, Any]:
    """Return the line of a standing edit that is about to be stored."""
    return {
        "action": "edit",
        "tenant": tenant,
        "key": key,
        "model": model,
        "edit": edit.name,
        "program": digest(edit.scope.values, edit.program),
        "bytes": edit.ByteSize(),
    }


def digest(values: Iterable[value_pb2.Value], *programs: pb.Program) -> str:
    """Return the digest of source texts: "sha256:" and 64 hex digits.

    The texts are those of the programs, and of the functions and classes in the values.
    """
    found = hashlib.sha256()
    for program in programs:
        _add(found, program.source)
    for source in sorted(set(_sources(values, programs))):
        _add(found, source)
    return f"sha256:{found.hexdigest()}"


def _add(found: Any, source: str) -> None:
    data = source.encode()
    found.update(len(data).to_bytes(8, "little") + data)


def _sources(values: Iterable[value_pb2.Value], programs: Iterable[pb.Program]) -> Iterator[str]:
    todo = [*values, *(binding.value for program in programs for binding in program.reads)]
    while todo:
        value = todo.pop()
        todo.extend(parts(value))
        kind = value.WhichOneof("kind")
        if kind in ("function", "class_source"):
            yield getattr(value, kind).source
