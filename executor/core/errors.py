"""Exceptions that steer a block from outside; its own handlers never see them.

They derive from BaseException, and the rewritten `except` clauses of a block re-raise them (see
`interpose.capture.rewrite`), so `except:` in a block cannot swallow a stop, a timeout or a cancellation.
"""

from __future__ import annotations

from interpose.v1 import trace_pb2 as pb


class Control(BaseException):
    """Base of everything that ends or steers a block from outside."""


class Stop(Control):
    """`tracer.stop()`: the block ends here, its request too; what was saved so far comes back."""


class Cancel(Control):
    """The request was cancelled; nothing comes back."""


class BudgetExceeded(Control):
    """The block used more wall time or memory in one step than it may.

    Attributes:
        code: DEADLINE_EXCEEDED for time, QUOTA_EXCEEDED for memory.
        message: what was exceeded, by how much, and what to do.
    """

    def __init__(self, code: pb.ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Refusal(Exception):
    """The block asked for something that cannot be given; raised at the block's own line.

    Attributes:
        code: an `ErrorCode` of the protocol.
        message: what happened, why, and what to write instead.
        location: the location it is about, or "".
        suggestions: near misses.
    """

    def __init__(
        self, code: pb.ErrorCode, message: str, *, location: str = "", suggestions: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.location = location
        self.suggestions = suggestions
