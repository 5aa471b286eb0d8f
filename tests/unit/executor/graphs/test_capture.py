"""A capture leaves the process as it found it, whatever goes wrong; CUDA is a list of what was called."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from executor.graphs.capture import CaptureFailed, capture


class Calls:
    """What a capture does with CUDA, in order."""

    def __init__(self, end: Exception | None = None) -> None:
        self.did: list[str] = []
        self._free = [1000, 600]
        self._end = end

    def free(self) -> int:
        return self._free.pop(0)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        self.did.append("stream")
        try:
            yield
        finally:
            self.did.append("back")

    def wait(self) -> None:
        self.did.append("wait")

    def begin(self) -> str:
        self.did.append("begin")
        return "graph"

    def end(self, graph: str) -> None:
        assert graph == "graph"
        self.did.append("end")
        if self._end is not None:
            raise self._end

    def prepare(self, *errors: Exception | None) -> Callable[[], Callable[[], None]]:
        """Return a preparation whose forwards raise the errors, one after the other."""
        left = list(errors)

        def prepare() -> Callable[[], None]:
            self.did.append("inputs")
            return forward

        def forward() -> None:
            assert not gc.isenabled()
            self.did.append("forward")
            error = left.pop(0) if left else None
            if error is not None:
                raise error

        return prepare


CAPTURE = ["inputs", "wait", "begin", "forward", "end", "back"]


@pytest.mark.parametrize("warm", [False, True])
def test_a_capture(warm: bool) -> None:
    calls = Calls()
    made = capture(calls, calls.prepare(), warm)
    assert (made.graph, made.size) == ("graph", 400)
    assert calls.did == ["stream", *(["inputs", "forward"] if warm else []), *CAPTURE]
    assert gc.isenabled()


def test_memory_that_others_gave_back_meanwhile_makes_no_negative_size() -> None:
    calls = Calls()
    calls._free = [600, 1000]
    assert capture(calls, calls.prepare(), False).size == 0


@pytest.mark.parametrize("end", [None, RuntimeError("the capture is invalid")])
@pytest.mark.parametrize(
    ("error", "out_of_memory"), [(torch.OutOfMemoryError("none"), True), (RuntimeError("not in a capture"), False)]
)
def test_a_forward_that_fails_fails_the_capture_alone(
    error: Exception, out_of_memory: bool, end: Exception | None
) -> None:
    calls = Calls(end)
    with pytest.raises(CaptureFailed) as caught:
        capture(calls, calls.prepare(error), False)
    assert caught.value.out_of_memory is out_of_memory and str(error) == str(caught.value)
    assert calls.did == ["stream", *CAPTURE]
    assert gc.isenabled()


def test_no_memory_before_the_capture() -> None:
    calls = Calls()
    with pytest.raises(CaptureFailed):
        capture(calls, calls.prepare(torch.OutOfMemoryError("none")), True)
    assert calls.did == ["stream", "inputs", "forward", "back"]


def test_an_error_of_our_own_is_not_hidden() -> None:
    calls = Calls()
    with pytest.raises(ZeroDivisionError):
        capture(calls, calls.prepare(ZeroDivisionError()), False)
    assert calls.did == ["stream", *CAPTURE] and gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    calls = Calls()
    gc.disable()
    try:
        capture(calls, calls.prepare(), False)
        assert not gc.isenabled()
    finally:
        gc.enable()
