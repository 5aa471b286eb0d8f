"""The names that the code of every block finds: Python's own names, some with a new meaning."""

from __future__ import annotations

import builtins
import sys
from typing import Any

from executor.block.barrier import Barrier
from executor.block.fiber import current
from executor.core.errors import Control
from interpose.capture import rewrite
from interpose.contract.saving import call_save


def print_to_notebook(
    *values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
) -> None:
    """What `print` is in a block: the text goes to the notebook while the trace runs."""
    if file is not None:
        print(*values, sep=sep, end=end, file=file, flush=flush)
    else:
        current().log((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))


def save(value: Any) -> Any:
    """What `value.save()` is in a block."""
    return call_save(value, current().save)


def new_namespace() -> dict[str, Any]:
    """Return the names that every block and function of a trace finds."""
    names = dict(vars(builtins))
    names["print"] = print_to_notebook
    return {"__builtins__": names, "__name__": "__main__", rewrite.GUARD: guard, rewrite.SAVE: save}


def wait(barrier: Barrier) -> None:
    """What `barrier()` is in a block."""
    current().await_barrier(barrier)


def guard() -> None:
    """Re-raise a control exception that a block's own handler has just caught."""
    error = sys.exc_info()[1]
    if isinstance(error, Control):
        raise error
