"""How a block's turn ended, as a number that the ranks compare."""

from __future__ import annotations

import zlib

from executor.block.state import BlockState
from executor.model.bits import digest


def fingerprint(state: BlockState) -> int:
    """Return a number that two ranks share only if the block's turn ended the same way on both.

    The number covers the values to which the block applies a module, so reading them may wait for the device.
    """
    waits, ending = state.waits, state.ending
    waiting = waits.location
    failed = ending.failure.exception_type if ending.failure is not None else ""
    call = ""
    if waits.call is not None:
        given = [int(digest(value)) for value in waits.call.tensors]
        call = f"{waits.call.fingerprint()}{given}"
    kind, skips = (waiting.kind if waiting else ""), state.record.skips.fingerprint()
    recorded = [recorder.way for recorder in state.record.recorders]
    return zlib.crc32(f"{ending.ended}|{waiting}|{kind}|{call}|{skips}|{recorded}|{failed}".encode())
