"""Measures how long a hostile block delays a neighbour: `python -m benchmarks.attacks`.

The service is a whole service. One tenant's short traces follow each other without a pause, while another tenant's block does
each of `ATTACKS`. The figure is the longest time in which none of the first tenant's traces ended; beside it stands how the
block ended. A trace that fails because the engine is away is run again. So the figure of an attack that costs a worker is the
time until the engine is back. The longest such time without an attack stands in the first row. The service compiles nothing,
as engines on a CPU do unless asked.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import interpose
from benchmarks.served import Service
from interpose.contract.errors import InterposeError, Unavailable

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
# Blocks that the budget ends, or that are refused at once.
BOUNDED = {
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
# Blocks that cost the worker its life, and the engine a restart.
UNBOUNDED = {
    "`sum(range(10**12))`": "total = sum(range(10**12))",
    "the timer switched off, then `while True: pass`": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
}
ATTACKS = BOUNDED | UNBOUNDED
KEYS = {"neighbour": "neighbours-own-key", "stranger": "strangers-own-key"}
PROMPT = "The Eiffel Tower is in"
QUIET_SECONDS = 5.0


class Neighbour:
    """Runs short traces one after another until it is closed.

    Args:
        address: address of the service.
    """

    def __init__(self, address: str) -> None:
        self._client = interpose.connect(address, api_key=KEYS["neighbour"], progress=False)
        self._closing = False
        self._ended = time.monotonic()
        self._longest = 0.0
        self.answered()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def answered(self) -> None:
        """Run one trace, in as many attempts as it takes."""
        while not self._closing:
            try:
                model = self._client.model("llama")
                with model.trace(PROMPT, max_tokens=1, temperature=0.0):
                    hidden = model.blocks[1].resid_post.save()
                assert hidden.shape[-1] > 0
                return
            except Unavailable:
                time.sleep(0.2)

    def _run(self) -> None:
        while not self._closing:
            self.answered()
            now = time.monotonic()
            self._longest, self._ended = max(self._longest, now - self._ended), now

    def begin(self) -> None:
        """Start the measurement of the longest time anew."""
        self._longest = 0.0

    def longest(self) -> float:
        """Return the longest time since `begin` in which no trace ended.

        Waits for two more traces to end.

        Raises:
            RuntimeError: a trace of the neighbour failed for another reason than an engine that is away.
        """
        for _ in range(2):
            ended = self._ended
            while self._ended == ended:
                if not self._thread.is_alive():
                    raise RuntimeError("a trace of the neighbour failed: a block of another tenant must not do that")
                time.sleep(0.02)
        return self._longest

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._client.close()


def traces(source: str, folder: str) -> Callable[[Any], None]:
    """Return a function that runs a trace of a model with this source as its block.

    The folder keeps the source until the trace has run.
    """
    text = f"def run(model):\n    with model.trace({PROMPT!r}, max_tokens=1):\n" + textwrap.indent(source, " " * 8)
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=folder, delete=False) as file:
        file.write(text + "\n")
    run: Callable[[Any], None] = runpy.run_path(file.name)["run"]
    return run


def rows(address: str, say: Callable[[str], object]) -> None:
    """Run the attacks one by one; give the lines of a table to `say`."""
    neighbour = Neighbour(address)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            interpose.connect(address, api_key=KEYS["stranger"], progress=False) as client,
        ):
            neighbour.begin()
            time.sleep(QUIET_SECONDS)
            say(f"| block | ends with | s |\n| --- | --- | --- |\n| none | | {neighbour.longest():.2f} |")
            for name, source in ATTACKS.items():
                run = traces(source, folder)
                neighbour.begin()
                try:
                    run(client.model("llama"))
                    ended = "nothing"
                except InterposeError as error:
                    ended = f"`{type(error).__name__}`"
                say(f"| {name} | {ended} | {neighbour.longest():.2f} |")
    finally:
        neighbour.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, default=10.0, help="what a block may take in one step")
    parser.add_argument(
        "--sandbox",
        choices=("on", "off"),
        default="off",
        help="on: the blocks run in sandboxes (default: in the workers)",
    )
    args = parser.parse_args()
    tenants = [{"name": name, "api_key": key} for name, key in KEYS.items()]
    service = Service(
        1,
        1,
        {"enforce_eager": True},
        limits={"step_seconds": args.step_seconds},
        tenants=tenants,
        model={"sandbox": args.sandbox},
    )
    try:
        rows(service.address(), print)
    finally:
        service.close()


if __name__ == "__main__":
    main()
