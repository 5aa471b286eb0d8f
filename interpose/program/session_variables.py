"""Session variables on the client's side; the server has the current copy.

A list, dict, set or tensor that the outer block of a trace saved is a session variable: the blocks of later traces change the
same object. As long as the notebook has not changed the object, only its id travels, and the next trace starts with the
server's copy.
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
    """A session variable: its object here, its version, and the digest of its contents then."""

    id: str
    obj: object
    version: int
    looked: str | None


class SessionVariables:
    """The session variables of one session, by identity; safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def __contains__(self, obj: object) -> bool:
        return id(obj) in self._known

    @staticmethod
    def takes(obj: object) -> bool:
        """Whether an object can be a session variable: a mutable container or a tensor."""
        return (
            type(obj) in (list, dict, set)
            or type(obj) is np.ndarray
            or isinstance(obj, RemoteValue)
            or arrays.is_tensor(obj)
        )

    def use(self, obj: object, entry: int) -> SessionVariable:
        """Return the message for an object that a trace uses, and note a new object.

        Args:
            obj: the object.
            entry: the object's index in the trace's scope.
        """
        with self._lock:
            known = self._known.get(id(obj))
            if known is None:
                known = self._known[id(obj)] = _Known(uuid.uuid4().hex, obj, 0, None)
            unchanged = known.looked is not None and known.looked == _look(obj)
            return SessionVariable(id=known.id, entry=entry, version=known.version, canonical=unchanged)

    def learn(self, variable: SessionVariable, obj: object) -> None:
        """Note the object and the version of a variable that has arrived."""
        with self._lock:
            for old in [key for key, known in self._known.items() if known.id == variable.id]:
                del self._known[old]
            self._known[id(obj)] = _Known(variable.id, obj, variable.version, _look(obj))

    def is_old(self, variable: SessionVariable) -> bool:
        """Whether a later version of a variable has arrived already."""
        with self._lock:
            return any(known.id == variable.id and known.version > variable.version for known in self._known.values())


def inside(obj: object) -> Iterator[object]:
    """Iterate over the contents of a container at any depth, without the container itself."""
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
    """Return a digest of an object's contents, None if the contents are not plain data."""
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
