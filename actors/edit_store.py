"""The tenants' standing edits, bounded in number and size, visible to their own tenant only."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class _Kept:
    data: bytes  # a serialized Edit
    source: str
    since: float


class EditStore:
    """Holds serialized edits by tenant, model and name.

    Args:
        max_edits: edits that one tenant may have, over all models.
        max_bytes: bytes that one tenant's edits may have together.
    """

    def __init__(self, max_edits: int, max_bytes: int) -> None:
        self._max_edits = max_edits
        self._max_bytes = max_bytes
        self._edits: dict[str, dict[tuple[str, str], _Kept]] = {}

    def bound(self, max_edits: int, max_bytes: int) -> None:
        """Set the limits from now on; stored edits stay."""
        self._max_edits, self._max_bytes = max_edits, max_bytes

    def put(self, tenant: str, model: str, edit: pb.Edit) -> None:
        """Store an edit; an edit of the same name is replaced.

        Raises:
            ServiceFailure: QUOTA_EXCEEDED, the tenant would have too many edits or too many bytes of edits.
        """
        own = self._edits.get(tenant, {})
        others = [kept for key, kept in own.items() if key != (model, edit.name)]
        data = edit.SerializeToString()
        held = sum(len(kept.data) for kept in others)
        if len(others) >= self._max_edits:
            what = f"{tenant} has {len(others)} edits, the most a tenant may have"
        elif held + len(data) > self._max_bytes:
            what = (
                f"the edit has {len(data)} bytes, {tenant}'s others have {held}, and a tenant's may have {self._max_bytes} "
                "together"
            )
        else:
            self._edits.setdefault(tenant, {})[model, edit.name] = _Kept(data, edit.program.source, time.monotonic())
            return
        raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, f"{what}: .clear() edits that are not needed"))

    def get(self, tenant: str, model: str, names: list[str]) -> tuple[bytes, ...]:
        """Return a tenant's edits of these names, serialized, in the order of the names.

        Raises:
            ServiceFailure: NOT_FOUND, an edit does not exist; with the names that are near.
        """
        own = self._edits.get(tenant, {})
        for name in names:
            if (model, name) not in own:
                known = [key[1] for key in own if key[0] == model]
                has = f"there are {', '.join(sorted(known))}" if known else "there are none"
                raise ServiceFailure(
                    failure(
                        pb.ERROR_CODE_NOT_FOUND,
                        f"there is no edit {name[:80]!r} of {model}; {has}",
                        suggestions=difflib.get_close_matches(name, known, n=3),
                    )
                )
        return tuple(own[model, name].data for name in names)

    def list(self, tenant: str, model: str) -> service_pb2.ListEditsReply:
        """Return a tenant's edits of a model, oldest first."""
        now = time.monotonic()
        reply = service_pb2.ListEditsReply(max_edits=self._max_edits, max_bytes=self._max_bytes)
        for (of, name), kept in self._edits.get(tenant, {}).items():
            if of == model:
                reply.edits.add(name=name, bytes=len(kept.data), age_seconds=now - kept.since, source=kept.source)
        return reply

    def clear(self, tenant: str, model: str, name: str) -> int:
        """Drop one edit, or all edits of a model for the name ""; return how many were dropped."""
        own = self._edits.get(tenant, {})
        gone = [key for key in own if key[0] == model and name in ("", key[1])]
        for key in gone:
            del own[key]
        if not own:
            self._edits.pop(tenant, None)
        return len(gone)
