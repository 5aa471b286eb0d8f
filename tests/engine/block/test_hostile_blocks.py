"""A few hostile lines fail their own block within its budget, and nothing of them reaches the engine or a neighbour."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from executor.block import process_state
from executor.block.binding import BindingFailed, Watch
from executor.block.budget import NOBODY
from interpose.v1 import trace_pb2 as pb
from tests.engine.bare import BlockRun, Worker

STEP = 0.6
# One step's budget, and a second on a machine that may be busy with others; blocks that nothing ends would be here for ever.
SOON = 20.0


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(STEP)
    yield made
    made.close()


def state() -> tuple[process_state.State, process_state.State]:
    """The state of the process, without what pytest says in its environment of how far a test is."""
    turn, (environment, *others) = process_state.read(process_state.TURN), process_state.read(process_state.END)
    environment.pop(b"PYTEST_CURRENT_TEST", None)
    return turn, (environment, *others)


@pytest.fixture(autouse=True)
def _process_as_before(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After any block, the process is as it was, and the next block runs."""
    monkeypatch.setattr(
        sys, "unraisablehook", lambda raised: None
    )  # pytest's is Python, which the timer interrupts too

    before = state()
    handler, collects = signal.getsignal(signal.SIGALRM), gc.isenabled()
    yield

    after = state()
    assert not process_state.differing(process_state.TURN, before[0], after[0])
    assert not process_state.differing(process_state.END, before[1], after[1])
    assert (signal.getsignal(signal.SIGALRM), gc.isenabled()) == (handler, collects)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    [after_all] = worker.run("x = [1 + 1]")
    assert after_all.failure is None, after_all.failure


def failed(ended: BlockRun, code: int, words: str) -> None:
    assert ended.failure is not None, ended
    assert (ended.failure.code, words in ended.failure.message) == (code, True), ended.failure
    assert ended.seconds < SOON


DYING = "class A:\n    def __del__(self):\n        while True: pass\n"


@pytest.mark.parametrize(
    "source",
    [
        DYING + "globals()['kept'] = A()",
        DYING + "kept = A()\nfor s in tracer.iter[:]: pass",
        DYING + "a = A()\na.me = a",
        DYING + "a = A()\na.me = a\ndel a\nfor s in tracer.iter[:]: pass",
        DYING + "kept = [A() for _ in range(200)]",
        DYING + "a = A()\ndel a",
        "def g():\n    try:\n        yield\n    finally:\n        while True: pass\nkept = g()\nnext(kept)",
        "import weakref\nclass A: pass\ndef loop(r):\n    while True: pass\na = A()\nw = weakref.ref(a, loop)\nb = [a]\ndel a, b",
        "f = type('A', (), {'__d' + 'el__': lambda self: [0 for _ in iter(int, 1)]})()",
    ],
)
def test_objects_die_inside_the_budget_of_their_block(worker: Worker, source: str) -> None:
    [ended] = worker.run(source)
    failed(ended, pb.ERROR_CODE_DEADLINE_EXCEEDED, "longer than")


def test_objects_that_another_block_lets_go_of(worker: Worker) -> None:
    """The second block binds a shared name anew; what the first one bound to it dies."""
    first, second = worker.run(DYING + "acc = A()", "for s in tracer.iter[:]: acc = s", shared=("acc",))
    ends = [one for one in (first, second) if one.failure is not None]
    assert ends
    for one in ends:
        failed(one, pb.ERROR_CODE_DEADLINE_EXCEEDED, "longer than")


def test_objects_of_one_block_do_not_die_in_anothers(worker: Worker) -> None:
    """A cycle that the collector ends, of a kind that no text shows, made in a turn of a block that goes on."""
    hidden = (
        "f = type('A', (), {'__d' + 'el__': lambda self: [0 for _ in iter(int, 1)]})()\nf.me = f\ndel f\n"
        "for s in tracer.iter[:]: pass"
    )
    allocating = "kept = []\nfor s in tracer.iter[:]:\n    kept.append([[] for _ in range(2000)])\nn = [len(kept)]"
    [bad, good] = worker.run(hidden, allocating + "\nn.save()", steps=3)
    assert good.failure is None, good.failure
    assert good.saved["n"] == [3]
    assert max(bad.seconds, good.seconds) < SOON


SUBCLASS = """
import torch
class T(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        while armed[0]: pass
        return super().__torch_function__(func, types, args, kwargs or {})
armed = [False]
t = torch.ones(3).as_subclass(T)
"""


@pytest.mark.parametrize("stream", [False, True])
def test_saves_are_encoded_inside_the_budget(worker: Worker, stream: bool) -> None:
    [ended] = worker.run(SUBCLASS + "saved = [t].save()\narmed[0] = True\nfor s in tracer.iter[:]: pass", stream=stream)
    if not stream:
        failed(ended, pb.ERROR_CODE_DEADLINE_EXCEEDED, "encoded, the block ran longer than")
    assert ended.seconds < SOON


def test_what_a_saved_object_raises_fails_its_block(worker: Worker) -> None:
    raising = SUBCLASS.replace("while armed[0]: pass", "if armed[0]: raise KeyError('mine')")
    [ended] = worker.run(raising + "saved = [t].save()\narmed[0] = True")
    failed(ended, pb.ERROR_CODE_INVALID_ARGUMENT, "'saved' cannot be saved: KeyError: 'mine'")


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import torch\ntorch.set_default_device('meta')", pb.ERROR_CODE_INTERVENTION, "default device"),
        (
            "import torch\ntorch.set_default_device('meta')\nfor s in tracer.iter[:]: pass",
            pb.ERROR_CODE_INVALID_ARGUMENT,
            "torch mode",
        ),
        (
            "from torch.overrides import TorchFunctionMode\nTorchFunctionMode().__enter__()",
            pb.ERROR_CODE_INTERVENTION,
            "torch function mode",
        ),
        (
            "from torch.utils._python_dispatch import TorchDispatchMode\nTorchDispatchMode().__enter__()",
            pb.ERROR_CODE_INTERVENTION,
            "torch dispatch mode",
        ),
        (
            "from greenlet import getcurrent\ngetcurrent().parent.throw(ValueError('mine'))",
            pb.ERROR_CODE_INTERVENTION,
            "another way than by asking",
        ),
        ("from greenlet import getcurrent\ngetcurrent().parent.switch(7)", pb.ERROR_CODE_INTERVENTION, "another way"),
        (
            "from greenlet import getcurrent\nwhile True:\n    try:\n        getcurrent().parent.switch()\n    except: pass",
            pb.ERROR_CODE_INTERVENTION,
            "another way",
        ),
        (
            "from greenlet import greenlet\ndef loop():\n    while True: pass\ngreenlet(loop).switch()",
            pb.ERROR_CODE_DEADLINE_EXCEEDED,
            "longer than",
        ),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", pb.ERROR_CODE_INTERVENTION, "SIGTERM"),
        ("import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)", pb.ERROR_CODE_INTERVENTION, "a signal"),
        (
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])",
            pb.ERROR_CODE_INTERVENTION,
            "mask of signals",
        ),
        ("import signal\nsignal.setitimer(signal.ITIMER_PROF, 900, 900)", pb.ERROR_CODE_INTERVENTION, "a timer"),
        ("import sys\nsys.settrace(lambda *a: None)", pb.ERROR_CODE_INTERVENTION, "trace or profile"),
    ],
)
def test_what_could_stop_others_fails_the_block(worker: Worker, source: str, code: int, words: str) -> None:
    [ended] = worker.run(source)
    failed(ended, code, words)


@pytest.mark.parametrize(
    "change",
    [
        "torch.set_default_dtype(torch.float64)",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.use_deterministic_algorithms(True)",
        "torch.set_num_threads(1 + (torch.get_num_threads() == 1))",
        "torch.set_flush_denormal(True)",
        "sys.setrecursionlimit(123456)",
        "sys.setswitchinterval(1.0)",
        "sys.stdout = None",
        "os.environ['SOMETHING'] = 'else'",
        "os.environ.pop('PATH')",
        "os.chdir('/')",
        "os.umask(0o123)",
        "warnings.simplefilter('error')",
        "numpy.seterr(all='raise')",
        "gc.enable(); gc.set_threshold(1)",
        "gc.callbacks.append(print)",
        "locale.setlocale(locale.LC_ALL, 'C.UTF-8')",
    ],
)
def test_process_state_is_put_back(worker: Worker, change: str) -> None:
    """Silently: what a block sets for itself holds while it runs."""
    [ended] = worker.run(f"import gc, locale, numpy, os, sys, torch, warnings\n{change}\nfor s in tracer.iter[:]: pass")
    assert ended.failure is None, ended.failure


def test_what_a_block_sets_is_its_own_from_turn_to_turn(worker: Worker) -> None:
    source = (
        "import torch\ntorch.set_default_dtype(torch.float64)\nkept = []\n"
        "for s in tracer.iter[:]: kept.append(str(torch.zeros(1).dtype))\nkept.save()"
    )
    other = "import torch\nkept = []\nfor s in tracer.iter[:]: kept.append(str(torch.zeros(1).dtype))\nkept.save()"
    mine, others = worker.run(source, other)
    assert (mine.failure, others.failure) == (None, None)
    assert mine.saved["kept"] == ["torch.float64"] * 2
    assert others.saved["kept"] == ["torch.float32"] * 2
    assert torch.get_default_dtype() is torch.float32


def swallowing() -> None:
    with contextlib.suppress(BaseException):
        while True:
            pass


def test_a_block_that_swallows_what_ends_it_is_over(worker: Worker) -> None:
    source = "for s in tracer.iter[:]:\n    try:\n        while True: pass\n    finally:\n        continue"
    [ended] = worker.run(source, steps=3)
    failed(ended, pb.ERROR_CODE_DEADLINE_EXCEEDED, "longer than")


def test_a_block_that_waits_again_when_it_is_to_end(worker: Worker) -> None:
    source = "try:\n    1 / 0\nfinally:\n    for s in tracer.iter[:]: pass"
    [ended] = worker.run(source)
    failed(ended, pb.ERROR_CODE_INTERVENTION, "ZeroDivisionError")


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda: torch.set_default_device("meta"), "default device"),
        (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "SIGTERM"),
        (lambda: torch.set_default_dtype(torch.float64), ""),
        (lambda: os.environ.update(SOMETHING="else"), ""),
        (swallowing, "longer than"),
    ],
)
def test_code_that_runs_before_the_block_leaves_nothing(worker: Worker, do: Any, words: str) -> None:
    """The bodies of classes, defaults and decorators of what a trace ships."""
    watch = Watch(worker.budget, {}, lambda: None, NOBODY)
    if not words:
        watch.run(do)
        return
    with pytest.raises(BindingFailed) as raised:
        watch.run(do)
    assert words in raised.value.failure.message


def test_nothing_stays_in_the_environment() -> None:
    assert "SOMETHING" not in os.environ
    assert sys.stdout is not None
