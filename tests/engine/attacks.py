"""Measure how long a few hostile lines keep a worker from everybody else: `python -m tests.engine.attacks --step-seconds 10`.

Each block runs in an interleaver without a model. The time is the longest single call in which the worker was busy with the
block; between two calls the steps of others run. What Python drops of a `__del__` goes to stderr.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from interpose.v1 import trace_pb2 as pb
from tests.engine.bare import Worker

_DYING = "class A:\n    def __del__(self):\n        while True: pass\n"
_ENCODED = """
import torch
class T(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        while armed: pass
        return super().__torch_function__(function, types, args, kwargs or {})
armed = []
saved = [torch.ones(3).as_subclass(T)].save()
armed.append(1)
"""
_GREENLET = "from greenlet import getcurrent\n"
ATTACKS = {
    "`while True: pass`": "while True: pass",
    "the same in `except:`, again and again": "while True:\n    try:\n        while True: pass\n    except: pass",
    "the same in a `__del__`": _DYING + "a = A()",
    "the same in a `__del__` of a hundred objects": _DYING + "kept = [A() for _ in range(100)]",
    "the same in a `__del__` of a cycle": _DYING + "a = A()\na.me = a",
    "the same in a saved object's own code": _ENCODED,
    "the same in a greenlet of the block's": "import greenlet\ndef loop():\n    while True: pass\n"
    "greenlet.greenlet(loop).switch()",
    "`time.sleep(3600)`": "import time\ntime.sleep(3600)",
    "`torch.set_default_device('meta')`": "import torch\ntorch.set_default_device('meta')",
    "a torch function mode left open": "from torch.overrides import TorchFunctionMode\nTorchFunctionMode().__enter__()",
    "`getcurrent().parent.throw(…)`": _GREENLET + "getcurrent().parent.throw(ValueError('mine'))",
    "`getcurrent().parent.switch()` for ever": _GREENLET
    + "while True:\n    try:\n        getcurrent().parent.switch()\n    except: pass",
}


def rows(step_seconds: float, say: Callable[[str], object]) -> None:
    """Run the attacks one by one; give the lines of a table to `say`."""
    worker = Worker(step_seconds)
    say("| block | ends with | s |\n| --- | --- | --- |")
    for name, source in ATTACKS.items():
        [ended] = worker.run(source)
        code = "nothing" if ended.failure is None else pb.ErrorCode.Name(ended.failure.code)
        [after] = worker.run("x = [1 + 1]")
        assert after.failure is None, after.failure
        say(f"| {name} | {code.removeprefix('ERROR_CODE_')} | {ended.seconds:.2f} |")
    worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, default=10.0, help="what a block may take in one step")
    rows(parser.parse_args().step_seconds, print)


if __name__ == "__main__":
    main()
