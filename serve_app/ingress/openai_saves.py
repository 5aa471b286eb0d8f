"""Small saves of the OpenAI-compatible endpoint.

Names of locations become a block, and saved values become JSON.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2
from interpose.wire.decoder import Decoder
from interpose.wire.walk import blob_of, parts

MOST_SAVES = 64
# Bytes of all saved values of one request: they travel as text inside JSON.
SAVED_BYTES = 8 << 20
_MOST_EDITS = 16
_LOCATION = re.compile(r"[A-Za-z_]\w*(\[\d{1,6}\]|\.[A-Za-z_]\w*)*", re.ASCII)
_LONGEST = 200
_PATTERN = ".pattern"


@dataclass(frozen=True)
class Wanted:
    """What a request's field `interpose` asks for.

    Attributes:
        edits: names of the tenant's standing edits.
        saves: for each saved location its name, "last" or "all" rows, and "prompt" or "all" steps.
    """

    edits: tuple[str, ...] = ()
    saves: tuple[tuple[str, str, str], ...] = ()

    @property
    def traced(self) -> bool:
        """Whether a block runs in the request's forward passes."""
        return bool(self.edits or self.saves)

    @classmethod
    def of(cls, given: Any) -> Wanted:
        """Return what the field asks for.

        Raises:
            ServiceFailure: INVALID_ARGUMENT.
        """
        if given is None:
            return cls()
        if not isinstance(given, dict) or given.keys() - {"edits", "save"}:
            raise _refused('interpose is {"edits": [names], "save": [locations]}')
        edits, saves = given.get("edits") or [], given.get("save") or []
        if not isinstance(edits, list) or not all(isinstance(name, str) for name in edits) or len(edits) > _MOST_EDITS:
            raise _refused(f"interpose.edits is a list of up to {_MOST_EDITS} names of standing edits")
        if not isinstance(saves, list) or len(saves) > MOST_SAVES:
            raise _refused(f"interpose.save is a list of up to {MOST_SAVES} locations")
        return cls(tuple(edits), tuple(map(_save, saves)))

    def program(self) -> pb.Program:
        """Return the block that saves the values, in the order in which the request names them."""
        values = [f"model.{location}{_rows(location, rows)}" for location, rows, _ in self.saves]
        reads = {"model": value_pb2.Value(module="")}
        if any(steps == "all" for _, _, steps in self.saves):
            reads["tracer"] = value_pb2.Value(tracer=True)
            lines = [*(f"s{index} = [].save()" for index in range(len(values))), "for step in tracer.iter[:]:"]
            for index, (_, _, steps) in enumerate(self.saves):
                once = "" if steps == "all" else "if step == 0: "
                lines.append(f"    {once}s{index}.append({values[index]})")
        else:
            lines = [f"s{index} = {value}.save()" for index, value in enumerate(values)] or ["pass"]
        return pb.Program(
            source="\n".join(lines) + "\n",
            filename="<interpose.save>",
            first_line=1,
            reads=[value_pb2.Binding(name=name, value=value) for name, value in reads.items()] if values else (),
            writes=[*(f"s{index}" for index in range(len(values))), *(["step"] if "tracer" in reads else [])],
        )


def _save(given: Any) -> tuple[str, str, str]:
    one = {"location": given} if isinstance(given, str) else given
    if not isinstance(one, dict) or one.keys() - {"location", "rows", "steps"}:
        raise _refused('a save is a location, or {"location": …, "rows": "last" or "all", "steps": "prompt" or "all"}')
    location, rows, steps = one.get("location"), one.get("rows", "last"), one.get("steps", "prompt")
    if not isinstance(location, str) or len(location) > _LONGEST or not _LOCATION.fullmatch(location):
        raise _refused(f"a location is a name as in a block, e.g. blocks[3].resid_post, not {str(location)[:80]!r}")
    if rows not in ("last", "all") or steps not in ("prompt", "all"):
        raise _refused('of a save, rows is "last" or "all", and steps is "prompt" or "all"')
    return location, rows, steps


def _rows(location: str, rows: str) -> str:
    if rows == "all":
        return ""
    return "[:, -1:]" if location.endswith(_PATTERN) else "[-1:]"


async def saved_json(
    wanted: Wanted, saves: pb.Saves, fetch: Callable[[str], Awaitable[Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the saved values for a JSON answer: for each location one entry a step.

    Args:
        wanted: what the request asked for.
        saves: what its block saved.
        fetch: returns the bytes of a blob by its id.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, the values are too large for JSON.
    """
    blobs = {blob.id: blob for blob in _blobs(saves)}
    size = saves.ByteSize() + sum(blob.size for blob in blobs.values())
    if size > SAVED_BYTES:
        raise _refused(
            f"the saved values have {size} bytes; the limit of this endpoint is {SAVED_BYTES}: save last rows, or trace with the "
            "interpose client"
        )
    fetched = {blob_id: await fetch(blob_id) for blob_id in blobs}
    decoder = Decoder(saves.objects, get_blob=lambda blob: fetched[blob.id], library="numpy")
    values = {binding.name: decoder.decode(binding.value) for binding in saves.names}
    found: dict[str, list[dict[str, Any]]] = {}
    for index, (location, _, _) in enumerate(wanted.saves):
        value = values.get(f"s{index}")
        found[location] = [_array(one) for one in (value if isinstance(value, list) else [value])]
    return found


def with_saves(body: bytes, saves: dict[str, Any]) -> bytes:
    """Return a JSON answer with the saved values in its field `interpose`."""
    answer = json.loads(body)
    answer["interpose"] = {"saves": saves}
    return json.dumps(answer).encode()


def chunk_of(saves: dict[str, Any]) -> bytes:
    """Return the saved values as an event of a streamed answer, which has no choice."""
    chunk = {"id": "interpose", "object": "chat.completion.chunk", "created": 0, "model": "", "choices": []}
    return b"data: " + json.dumps({**chunk, "interpose": {"saves": saves}}).encode() + b"\n\n"


def _array(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    data = np.ascontiguousarray(array).tobytes()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": base64.b64encode(data).decode()}


def _blobs(saves: pb.Saves) -> Iterator[value_pb2.Blob]:
    todo = [*saves.objects.values, *(binding.value for binding in saves.names)]
    while todo:
        value = todo.pop()
        todo.extend(parts(value))
        blob = blob_of(value)
        if blob is not None:
            yield blob


def _refused(message: str) -> ServiceFailure:
    return ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message))
