"""Exceptions that steer a block from outside; the block's own handlers never see them.

They derive from BaseException, and the rewritten `except` clauses of a block raise them again (see
`interpose.capture.rewrite`). So `except:` in a block cannot swallow a stop, a timeout or a cancellation.
"""

from __future__ import annotations

from interpose.v1 import trace_pb2 as pb


class Control(BaseException):
    """Base of every exception that ends or steers a block from outside."""


class Stop(Control):
    """`tracer.stop()`: the block and its request end here.

    The values that were saved before the stop come back.
    """


class Cancel(Control):
    """The request was cancelled; nothing comes back."""


class BudgetExceeded(Control):
    """The block used more wall time or memory in one step than its budget allows.

    Attributes:
        code: DEADLINE_EXCEEDED for time, QUOTA_EXCEEDED for memory.
        message: what was exceeded, by how much, and what to do.
    """

    def __init__(self, code: pb.ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Refusal(Exception):
    """The block asked for something that cannot be given.

    The exception is raised at the block's own line.

    Attributes:
        code: an `ErrorCode` of the protocol.
        message: what happened, why, and what to write instead.
        location: the location that the refusal is about, or "".
        suggestions: similar names.
    """

    def __init__(
        self, code: pb.ErrorCode, message: str, *, location: str = "", suggestions: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.location = location
        self.suggestions = suggestions
