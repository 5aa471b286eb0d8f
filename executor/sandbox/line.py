"""Questions to the process of a sandboxed trace: in time, and for all ranks once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor.core.errors import Refusal
from executor.parallel.agreement import Ranks
from executor.sandbox.channel import Kind
from executor.sandbox.errors import made_of, told_of
from executor.sandbox.notices import Notices
from executor.sandbox.process import Lost, Process

GRACE_SECONDS = 0.8  # beyond a block's own time, until its process is ended
_MOST_NOTICES = 1_000_000  # in one turn; the time ends a busy process before
_BYTES_PER_SECOND = 100 << 20  # of saved values, at least
_OF_ALL_RANKS = frozenset(
    (
        *(Kind.OPEN, Kind.START, Kind.SERVE, Kind.RESUME, Kind.THROW, Kind.SETTLE, Kind.RECORD, Kind.LEAVE),
        *(Kind.PLAN, Kind.LAND),
    )
)
Routed = Callable[[Any], dict[str, Any]]
Increment = Callable[[Any, int], None]


@dataclass
class Question:
    """A question that was sent.

    Attributes:
        kind, told: as of `Line.ask`.
        failed: why it could not be sent.
    """

    kind: Kind
    told: dict[str, Any]
    failed: Exception | None = None


def no_router(told: Any) -> dict[str, Any]:
    """Refuse to ask a router, where no block has a turn."""
    raise Lost("it asked for a router outside of a turn")


class Line:
    """The way to the process of one trace.

    Args:
        process: the process; None where another rank has it.
        ranks: the ranks that run the trace.
        notices: takes what the process says beside its answers.
        step_seconds: wall time that a block may take in one step.

    Attributes:
        open: whether the process can still be asked.
        here: whether this rank has the process.
    """

    def __init__(self, process: Process | None, ranks: Ranks, notices: Notices, step_seconds: float) -> None:
        self.open = True
        self.here = process is not None
        self._process = process
        self._ranks = ranks
        self._notices = notices
        self._step_seconds = step_seconds

    def end(self, lost: bool = False) -> None:
        """End the process. Idempotent.

        Args:
            lost: whether it is ended because a question to it did not end well.
        """
        self.open = False
        if self._process is not None:
            self._process.end(lost)
        self._notices.clear()

    def ask(
        self, kind: Kind, told: dict[str, Any], used: float, routed: Routed, increment: Increment
    ) -> dict[str, Any]:
        """Ask the process something; return its answer, and take what it says before.

        All ranks ask what changes a block, and get the answer of the one process.

        Args:
            kind: the question.
            told: what goes with it.
            used: seconds that the block has used in this step already.
            routed: answers which experts a router chooses.
            increment: takes a serialized event of a streamed trace, and the invoke.

        Raises:
            Refusal: what goes with the question is too large.
            Lost: the process is gone, took too long, or said what it cannot say. It is to be ended then.
        """
        return self.answer(self.post(kind, told, used), used, routed, increment)

    def post(self, kind: Kind, told: dict[str, Any], used: float) -> Question:
        """Send the process a question, and do not wait for the answer.

        Until the answer has come nothing else is asked. An error is raised where the answer is asked for.

        Args:
            kind, told, used: as of `ask`.
        """
        question = Question(kind, told)
        if self._process is not None:
            try:
                self._process.send(kind, told, self._until(used))
            except Exception as error:
                question.failed = error
        return question

    def answer(self, question: Question, used: float, routed: Routed, increment: Increment) -> dict[str, Any]:
        """Return the answer to a question; the arguments and errors are those of `ask`.

        The process's time runs from here on: before, the worker may have waited for another process.
        """
        if not self._ranks.several or question.kind not in _OF_ALL_RANKS:
            return self._answer(question, used, routed, increment)
        outcome: tuple[Any, ...] | None = None
        if self.here:
            try:
                outcome = "answer", self._answer(question, used, routed, increment)
            except Lost as error:
                outcome = "lost", str(error), error.overdue, error.orphaned
            except Refusal as error:
                outcome = "refused", told_of(error)
        outcome = self._ranks.share(outcome)
        if outcome[0] == "lost":
            raise Lost(*outcome[1:])
        if outcome[0] == "refused":
            raise made_of(outcome[1])
        answer: dict[str, Any] = outcome[1]
        return answer

    def _until(self, used: float) -> float:
        """Return when a question must be over, of a block that has used so many seconds."""
        return time.monotonic() + max(0.0, self._step_seconds - used) + GRACE_SECONDS

    def _answer(self, question: Question, used: float, routed: Routed, increment: Increment) -> dict[str, Any]:
        if self._process is None:
            return {}
        if question.failed is not None:
            raise question.failed
        kind, until = question.kind, self._until(used)
        for _ in range(_MOST_NOTICES):
            came, value = self._process.receive(until)
            if came is Kind.ANSWER:
                if not isinstance(value, dict):
                    raise Lost("its answer is none")
                return value
            now = time.monotonic()
            if now > until:  # the process says something all the time
                raise Lost("it took too long", overdue=True)
            if came is Kind.LOG:
                self._notices.log(value)
            elif came is Kind.PIECE:
                self._notices.piece(value)
                until += len(value[2]) / _BYTES_PER_SECOND
                self._process.go(None, until)
            elif came is Kind.BLOB and kind is Kind.OPEN:
                part = self._notices.upload(value)
                until += time.monotonic() - now + len(part["data"]) / _BYTES_PER_SECOND
                self._process.go(part, until)
            elif came is Kind.CHOOSE:
                self._process.go(routed(value), until)
            elif came is Kind.INCREMENT and kind is Kind.STREAM:
                increment(value, question.told["invoke"])
            else:
                raise Lost(f"it sent {came.name}")
        raise Lost("it sent too many notices")
