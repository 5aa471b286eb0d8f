"""Lists whose items are the rows of few tensors, as the message that a trace sends.

No code of the trace's runs here: the lists themselves are never made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executor.core.errors import Refusal
from executor.saves.collect import not_saved
from executor.saves.encoder import SaveEncoder, Stacks
from executor.saves.registry import SaveRegistry
from executor.saves.rows import Rows
from interpose.v1 import trace_pb2 as pb
from interpose.wire.arrays import ArrayError


class Lists:
    """The lists that the only invoke of a trace gives back.

    Args:
        trace_id: the trace.
        inline_bytes: as of `executor.saves.collect.Limits`; -1: every tensor is in a blob.

    Attributes:
        blobs: the id and the bytes of each blob that `event` names.
    """

    def __init__(self, trace_id: str, inline_bytes: int) -> None:
        self.blobs: list[tuple[str, memoryview]] = []
        self._trace_id = trace_id
        self._inline_bytes = inline_bytes

    def event(self, lists: Iterable[tuple[str, Sequence[Rows]]], limit: int) -> pb.Event:
        """Return the event with the lists, or with why they cannot be sent, as `collect` does.

        Args:
            lists: the name and the items of each.
            limit: how many bytes the trace may save.
        """
        event = pb.Event()
        event.saves.invoke = 0
        encoder = SaveEncoder(
            SaveRegistry(), self._inline_bytes, self._put, limit, None, Stacks.ANY, event.saves.objects
        )
        what = ""
        try:
            for name, rows in lists:
                what = name
                event.saves.names.add(name=name).value.CopyFrom(encoder.listed(rows))
        except (Refusal, ArrayError) as error:
            return not_saved(what, error, self._trace_id, 0)
        finally:
            encoder.close()
        return event

    def _put(self, data: memoryview, fresh: bool) -> str:
        blob_id = f"{self._trace_id}/0/{len(self.blobs)}"
        self.blobs.append((blob_id, data))
        return blob_id
