"""What the traces of a session share, as the notebook knows it: the session on the server has the copy that counts.

A list, dict, set or tensor that the outer block of a trace saved stays shared for the rest of its session: blocks of later
traces that use it change the same one. As long as the notebook itself has not changed it, only its name travels, and the
next trace starts with what the server has.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from interpose.modules.envoy import Envoy
from interpose.rpc.remote import RemoteValue
from interpose.v1.trace_pb2 import SessionVariable
from interpose.v1.value_pb2 import Value
from interpose.wire import arrays
from interpose.wire.encoder import Encoder, WireError

_ALL_INLINE = 1 << 62


@dataclass
class _Known:
    """A variable: the object that it is here, its version on the server, and how the object looked then."""

    id: str
    obj: object
    version: int
    looked: str | None


class SessionVariables:
    """The objects that one session's traces share, by identity; safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def __contains__(self, obj: object) -> bool:
        return id(obj) in self._known

    @staticmethod
    def takes(obj: object) -> bool:
        """Whether traces can share an object: it has an identity and contents that change."""
        return (
            type(obj) in (list, dict, set)
            or type(obj) is np.ndarray
            or isinstance(obj, RemoteValue)
            or arrays.is_tensor(obj)
        )

    def use(self, obj: object, entry: int) -> SessionVariable:
        """Return an object as a trace names it, noting it if it is new.

        Args:
            entry: its index in the trace's scope.
        """
        with self._lock:
            known = self._known.get(id(obj))
            if known is None:
                known = self._known[id(obj)] = _Known(uuid.uuid4().hex, obj, 0, None)
            unchanged = known.looked is not None and known.looked == _look(obj)
            return SessionVariable(id=known.id, entry=entry, version=known.version, canonical=unchanged)

    def learn(self, variable: SessionVariable, obj: object) -> None:
        """Note what a variable is here now that a version of it has arrived."""
        with self._lock:
            for old in [key for key, known in self._known.items() if known.id == variable.id]:
                del self._known[old]
            self._known[id(obj)] = _Known(variable.id, obj, variable.version, _look(obj))

    def is_old(self, variable: SessionVariable) -> bool:
        """Whether a later version of a variable has arrived already."""
        with self._lock:
            return any(known.id == variable.id and known.version > variable.version for known in self._known.values())


def inside(obj: object) -> Iterator[object]:
    """Iterate over what a container holds at any depth, without the container itself."""
    seen = {id(obj)}
    todo = list(_items(obj))
    while todo:
        item = todo.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            todo.extend(_items(item))


def _items(obj: object) -> Iterable[object]:
    if isinstance(obj, Mapping):
        return [*obj.keys(), *obj.values()]
    return obj if isinstance(obj, list | tuple | set | frozenset) else ()


def _look(obj: object) -> str | None:
    """Return what tells an object's contents from any others, None for contents that are not plain data."""
    encoder = Encoder(inline_bytes=_ALL_INLINE, put_blob=lambda data: "", special=_special)
    try:
        top = encoder.encode(obj)
    except WireError:
        return None
    found = hashlib.sha256(top.SerializeToString(deterministic=True))
    found.update(encoder.objects.SerializeToString(deterministic=True))
    return found.hexdigest()


def _special(obj: object) -> Value | None:
    if isinstance(obj, RemoteValue):
        return obj.to_value("")
    return Value(module=obj.path) if isinstance(obj, Envoy) else None
