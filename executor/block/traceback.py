"""Failures of blocks as facts with the user's own source lines, never with frames of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from executor.core.errors import BudgetExceeded, Refusal
from executor.core.text import clip
from interpose.contract.idioms import GRADIENTS
from interpose.v1 import trace_pb2 as pb

MAX_FRAMES = 50

_OF_GRADIENTS = (
    "does not require grad and does not have a grad_fn",
    "to not have been used in the graph",
    "Inference tensors cannot be saved for backward",
    "Setting requires_grad=True on inference tensor",
)

SourceLine = Callable[[str, int], str | None]


def frames_of(tb: TracebackType | None, sources: Mapping[str, Mapping[int, str]]) -> list[pb.Frame]:
    """Return the frames of a traceback that lie in the user's own sources, outermost first.

    Args:
        tb: the exception's traceback.
        sources: source lines by file name and line number; frames elsewhere are left out.
    """
    return _own(traceback.StackSummary.extract(traceback.walk_tb(tb), lookup_lines=False), sources)


def frames_here(sources: Mapping[str, Mapping[int, str]]) -> list[pb.Frame]:
    """Return the user's own frames that called this, outermost first."""
    return _own(reversed(traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)), sources)


def _own(entries: Iterable[traceback.FrameSummary], sources: Mapping[str, Mapping[int, str]]) -> list[pb.Frame]:
    frames = []
    for entry in entries:
        lines = sources.get(entry.filename)
        if lines is None or entry.lineno is None:
            continue
        frame = pb.Frame(
            filename=entry.filename, line=entry.lineno, function=entry.name, text=lines.get(entry.lineno, "")
        )
        if entry.end_lineno is not None and entry.colno is not None and entry.end_colno is not None:
            frame.end_line, frame.column, frame.end_column = entry.end_lineno, entry.colno, entry.end_colno
        frames.append(frame)
    return frames[-MAX_FRAMES:]


def describe(error: BaseException, sources: Mapping[str, Mapping[int, str]], trace_id: str, invoke: int) -> pb.Failure:
    """Describe how a block ended by exception.

    Returns:
        A Failure with the user's frames; code, location and suggestions from a `Refusal`, the budget's code for a block over
        it, INTERVENTION for everything that the user's code raised.
    """
    failure = pb.Failure(trace_id=trace_id, invoke=invoke, frames=frames_of(error.__traceback__, sources))
    if isinstance(error, Refusal):
        failure.code = error.code
        failure.message = clip(error.message)
        failure.location = error.location
        failure.suggestions.extend(error.suggestions)
        return failure
    if isinstance(error, BudgetExceeded):
        failure.code = error.code
        failure.message = clip(error.message)
        return failure
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = str(error)
    except Exception:
        text = "<its message could not be made>"
    failure.code = pb.ERROR_CODE_INTERVENTION
    failure.exception_type = clip(name, 256)
    failure.exception_message = clip(text)
    failure.message = clip((f"{name}: {text}" if text else name) + _hint(error, text))
    return failure


def _hint(error: BaseException, text: str) -> str:
    """Return a hint for an error of Python or torch; "" if its own message says enough."""
    if type(error) is NameError and error.name:
        return (
            f". The block has the names that the notebook had when the trace was sent; what another trace's block assigned is "
            f"among them if it was saved there: {error.name} = ….save()"
        )
    if isinstance(error, RuntimeError) and any(words in text for words in _OF_GRADIENTS):
        return f". {GRADIENTS[0].upper()}{GRADIENTS[1:]}"
    return ""
