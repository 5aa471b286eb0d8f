"""What blocks leave behind is collected within their budget; the worker's own objects go in the time that they need."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from executor.block.budget import Budget
from executor.block.garbage import Garbage

SLOW_SECONDS = 1.0


class Slow:
    """An object of a cycle, which takes time to go.

    Args:
        gone: gets an element when it has gone.
    """

    def __init__(self, gone: list[bool]) -> None:
        self._gone = gone
        self._self = self

    def __del__(self) -> None:
        until = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < until:
            time.sleep(0.01)
        self._gone.append(True)


@pytest.fixture(autouse=True)
def little() -> Iterator[None]:
    """What there is before is left out, as in a worker."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("here", [False, True])
def test_only_what_blocks_may_have_left_is_bounded(here: bool, caplog: pytest.LogCaptureFixture) -> None:
    garbage, gone = Garbage(Budget(0.15, 1 << 30)), list[bool]()
    garbage.begin(here)
    garbage.begin(here=False)
    Slow(gone)
    garbage.end()
    assert gone == ([] if here else [True])
    assert ("longer than a block may" in caplog.text) is here


def test_the_end_of_all_traces_is_the_end_of_what_blocks_may_have_left() -> None:
    garbage, gone = Garbage(Budget(0.15, 1 << 30)), list[bool]()
    garbage.begin(here=True)
    garbage.end()
    garbage.begin(here=False)
    Slow(gone)
    garbage.end()
    assert gone == [True]
