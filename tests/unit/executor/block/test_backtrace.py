"""An error of torch in a block does not end the worker, whatever the engine's stack holds where the block began."""

from __future__ import annotations

import subprocess
import sys

# `qsort` gets more arguments than it takes. They lie on the stack where the engine's frames lay when the block began.
PROGRAM = """
import ctypes
import torch
from executor.block.fiber import Fiber

GARBAGE = [ctypes.c_uint64(0x4141414141414141)] * 900


def over_garbage(do):
    done = []

    def compare(a, b):
        if not done:
            done.append(do())
        return 0

    numbers = (ctypes.c_int * 2)(1, 2)
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(compare)
    ctypes.CDLL(None).qsort(numbers, ctypes.c_size_t(2), ctypes.c_size_t(4), callback, *GARBAGE)


def main(*_):
    fiber.park("a location")
    try:
        torch.ones(2).sum().backward()
    except RuntimeError as error:
        print(error)


fiber = Fiber(main, None, torch.device("cpu"))
fiber.switch()
over_garbage(fiber.switch)
"""


def test_a_backtrace_ends_inside_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    assert "does not require grad" in done.stdout
