"""What a block tries from inside its sandbox: nothing of the machine is within reach, and nobody else is touched."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from executor.sandbox import pool
from executor.sandbox.pool import Pool
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.sandbox.parts import Worker, plain

_CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    result = libc.syscall(*numbers)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""

# Each raises OSError where the kernel refuses it.
ATTEMPTS = {
    "open a file": "open('/etc/passwd')",
    "open a file of the service": "open('/proc/self/environ')",
    "list a folder": "os.listdir('/')",
    "stat": "os.stat('/')",
    "readlink": "os.readlink('/proc/self/exe')",
    "memory of the parent": "open(f'/proc/{os.getppid()}/mem')",
    "own memory through /proc": "open('/proc/self/mem')",
    "write a file": "open('/tmp/interpose-escape', 'w')",
    "make a folder": "os.mkdir('/tmp/interpose-escape')",
    "change the folder": "os.chdir('/')",
    "a socket": "socket.socket()",
    "a unix socket": "socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "socket.socketpair()",
    "a raw socket": "call(41, 17, 3, 0)",
    "fork": "os.fork()",
    "vfork": "call(58)",
    "clone": "call(56, 0, 0, 0, 0, 0)",
    "clone3": "call(435, 0, 0)",
    "exec": "os.execv('/bin/true', ['true'])",
    "execveat": "call(322, -100, b'/bin/true', 0, 0, 0)",
    "kill the parent": "os.kill(os.getppid(), 0)",
    "kill everybody": "os.kill(-1, 9)",
    "tgkill": "call(234, os.getppid(), os.getppid(), 9)",
    "signal through a pidfd": "call(424, 0, 9, 0, 0)",
    "open a pidfd": "os.pidfd_open(os.getppid())",
    "take a descriptor": "call(438, 0, 0, 0)",
    "ptrace": "call(101, 16, os.getppid(), 0, 0)",
    "read another process's memory": "call(310, os.getppid(), 0, 0, 0, 0, 0)",
    "write another process's memory": "call(311, os.getppid(), 0, 0, 0, 0, 0)",
    "limits of the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_AS)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_NPROC, (10, 10))",
    "priority of the parent": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "the processors of the parent": "os.sched_setaffinity(os.getppid(), {0})",
    "shared memory by name": "call(257, -100, b'/dev/shm/x', 0, 0)",
    "System V shared memory": "call(29, 1, 4096, 0o1000)",
    "attach shared memory": "call(30, 0, 0, 0)",
    "message queues": "call(240, b'/x', 0, 0, 0)",
    "an anonymous file": "os.memfd_create('x')",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(120))",
    "keyrings": "call(248, b'user', b'x', b'y', 1, -3)",
    "keyctl": "call(250, 0, -3, 1)",
    "bpf": "call(321, 0, 0, 0)",
    "userfaultfd": "call(323, 0)",
    "perf": "call(298, 0, 0, -1, -1, 0)",
    "unshare": "call(272, 0x10000000)",
    "setns": "call(308, 0, 0)",
    "mount": "call(165, 0, 0, 0, 0, 0)",
    "chroot": "os.chroot('/')",
    "become root": "os.setuid(0)",
    "set groups": "os.setgroups([])",
    "prctl": "call(157, 4, 1, 0, 0, 0)",
    "a filter of its own": "call(317, 1, 0, 0)",
    "modules of the kernel": "call(313, 0, 0, 0)",
    "the kernel's log": "call(103, 3, 0, 0)",
    "reboot": "call(169, 0, 0, 0, 0)",
    "the clock": "call(227, 0, 0)",
    "inotify": "call(294, 0)",
    "an epoll": "call(291, 0)",
    "an eventfd": "call(290, 0, 0)",
    "a pipe": "os.pipe()",
    "duplicate a descriptor": "os.dup(3)",
    "send a descriptor": "call(46, 3, 0, 0)",
    "the names of devices": "os.ttyname(0)",
    "a thread": "threading.Thread(target=print).start()",
}


@pytest.fixture(scope="module")
def outcomes(processes: Pool) -> dict[str, str]:
    """Return how each attempt ended: the error's type, or what came of it."""
    lines = ["import os, resource, socket, threading, interpose", *_CALL.splitlines(), "ended = {}"]
    for name, attempt in ATTEMPTS.items():
        lines += ["try:", f"    ended[{name!r}] = 'did it: ' + repr({attempt})"]
        lines += ["except (OSError, RuntimeError, ValueError) as error:", f"    ended[{name!r}] = type(error).__name__"]
    ran = Worker(processes).run("\n".join([*lines, "interpose.save(ended)"]))
    assert ran.failure is None, ran.failure
    found: dict[str, str] = ran.saved["ended"]
    return found


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_kernel_refuses(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name].startswith("did it")


def test_nothing_of_the_service_is_in_the_process(worker: Worker) -> None:
    ran = worker.run("""
        import errno, os, sys
        environment = dict(os.environ)
        modules = [name for name in sys.modules if name.split(".")[0] in ("ray", "serve_app", "actors")]
        descriptors = []
        for number in range(1024):
            try:
                os.lseek(number, 0, 1)
            except OSError as error:
                if error.errno != errno.EBADF:
                    descriptors.append(number)
            else:
                descriptors.append(number)
        kept = [environment, modules, len(descriptors), os.getuid()].save()
    """)
    assert ran.failure is None, ran.failure
    environment, modules, descriptors, user = ran.saved["kept"]
    assert (environment, modules, descriptors) == ({}, [], 1)
    assert user != 0 and (os.geteuid() != 0 or user != os.geteuid())


def test_the_process_of_a_trace_serves_no_other(worker: Worker) -> None:
    source = (
        "import builtins, os\nseen = hasattr(builtins, 'mark')\nbuiltins.mark = 1\nkept = [seen, os.getpid()].save()"
    )
    first, second = (worker.run(source).saved["kept"] for _ in range(2))
    assert (first[0], second[0]) == (False, False) and first[1] != second[1]
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{first[1]}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{first[1]}")


HOSTILE = {
    "a loop": "while True:\n    pass",
    "a loop that catches": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "a long call in C": "sum(range(10**12))",
    "a power": "x = 10 ** (10 ** 9)",
    "a hash": "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "the timer disarmed": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True:\n    pass",
    "the signal ignored": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass",
    "a __del__ that loops": "class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a",
    "a __del__ that is left behind": "class A:\n    def __del__(self):\n        while True: pass\nglobals()['kept'] = A()",
    "a tensor subclass that loops": (
        "import torch\nclass T(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, *a, **k):\n"
        "        while True: pass\nkept = torch.ones(3).as_subclass(T).save()"
    ),
    "a repr that loops": "class A:\n    def __str__(self):\n        while True: pass\nraise ValueError(A())",
    "an exit": "import os\nos._exit(0)",
    "a segmentation fault": "import ctypes\nctypes.string_at(0)",
    "an abort": "import ctypes\nctypes.CDLL(None).abort()",
    "memory without an end": "kept = []\nwhile True:\n    kept.append(bytearray(1 << 24))",
    "a large tensor": "import torch\nx = torch.ones(1 << 40)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "the engine's greenlet": "import greenlet\ngreenlet.getcurrent().parent.throw(ValueError('x'))",
    "the default device": "import torch\ntorch.set_default_device('meta')\nx = model.layers[0].output",
    "the channel closed": (
        "import os\nfor number in range(64):\n    try: os.close(number)\n    except OSError: pass\n"
        "x = model.layers[0].output"
    ),
    "garbage in the channel": (
        "import os\nfor number in range(64):\n    try: os.write(number, b'x' * 100000)\n    except OSError: pass\n"
        "x = model.layers[0].output"
    ),
    "a flood in the channel": (
        "import os, struct\nhead = struct.pack('<IBI', 1, 17, 2) + b'N'\nfor number in range(64):\n    try:\n"
        "        while True: os.write(number, head * 1000)\n    except OSError: pass"
    ),
    "prints without an end": "while True:\n    print('x' * 1000000)",
    "saves too much": "import torch\nkept = torch.zeros(1 << 23).save()",
    "the process's own objects": (
        "import gc\nfor one in gc.get_objects():\n    if type(one).__name__ == 'Child': one._do.clear()"
    ),
}
# Attempts that may end well: what was left behind goes with the process.
HARMLESS = {"a __del__ that is left behind", "prints without an end", "the process's own objects"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_block_fails_alone(worker: Worker, name: str) -> None:
    ran = worker.run(HOSTILE[name])
    if name not in HARMLESS:
        assert ran.failure is not None
    if ran.failure is not None:
        assert ran.failure.code in (
            pb.ERROR_CODE_INTERVENTION,
            pb.ERROR_CODE_DEADLINE_EXCEEDED,
            pb.ERROR_CODE_QUOTA_EXCEEDED,
            pb.ERROR_CODE_INVALID_ARGUMENT,
        )
    assert [rows.tolist() for rows in ran.beside] == [rows.tolist() for rows in plain()]
    worker.budget.step_seconds = 60.0  # another process may have to begin, on cores that have much to do
    after = worker.run("h = model.layers[1].output[0].save()")
    assert after.failure is None and after.saved["h"].tolist() == after.outputs[0].tolist()


def test_a_process_that_ended_while_it_waited_is_given_to_no_trace(worker: Worker, processes: Pool) -> None:
    first = processes.take()
    processes._waiting.appendleft(first)
    os.kill(first.number, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while first.waits and time.monotonic() < deadline:
        time.sleep(0.01)
    ran = worker.run("h = model.layers[1].output[0].save()")
    assert ran.failure is None and not first.open


def test_processes_that_ended_while_they_waited_are_made_anew(processes: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.0)
    settled(processes)
    killed = list(processes._waiting)
    for process in killed:
        os.kill(process.number, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(process.waits for process in killed) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.ready and processes.news() == 0
    settled(processes)
    processes.news()
    assert processes.ready
    assert not {one.number for one in killed} & {one.number for one in processes._waiting}


def test_a_scan_takes_no_process_that_was_promised_to_a_request(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(processes)
    processes._told = -1
    told = processes.news()
    assert told == len(processes._waiting) - 1 and processes.ready
    monkeypatch.setattr(processes, "_ask", lambda: None)  # no process comes while this looks
    taken = [processes.take(promised=False)]
    assert not processes.ready, "what is left is promised"
    taken += [processes.take() for _ in range(told)]
    assert not processes.ready and not processes._waiting
    for process in taken:
        process.end()


def settled(processes: Pool) -> None:
    """Wait until as many processes are ready as are to wait."""
    deadline = time.monotonic() + 60
    while len(processes._waiting) < processes._ready and time.monotonic() < deadline:
        processes.news(0.1)
    assert len(processes._waiting) == processes._ready


def test_a_killed_zygote_is_started_again(processes: Pool) -> None:
    worker = Worker(processes)
    zygote = processes._zygote
    assert zygote is not None
    zygote.kill()
    zygote.wait()
    codes = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ran = worker.run_once("h = model.layers[1].output[0].save()")
        if ran.failure is None:
            break
        codes.append(ran.failure.code)
        time.sleep(0.2)
    assert ran.failure is None and set(codes) <= {pb.ERROR_CODE_UNAVAILABLE}


def test_increments_of_a_killed_process_are_numbered(processes: Pool) -> None:
    """The last increment comes from the worker."""
    worker = Worker(processes, step_seconds=30.0)
    source = """
import time
kept = [].save()
for step in tracer.iter[:]:
    kept.append(model.layers[1].output[0][-1])
    if step == 2:
        time.sleep(20)
"""
    assert worker.run("h = model.layers[1].output[0].save()").failure is None  # a zygote runs
    timer = threading.Timer(1.5, lambda: os.kill(processes._given[-1].number, signal.SIGKILL))
    timer.start()
    ran = worker.run_once(source, 4, stream=True)
    timer.join()
    assert ran.failure is not None
    assert len(ran.increments) > 1
    assert [one.sequence for one in ran.increments] == list(range(len(ran.increments)))


@pytest.mark.parametrize("killed", ["zygote", "process"])
def test_a_block_whose_process_is_killed_fails_alone(processes: Pool, killed: str) -> None:
    """With its zygote it is to be submitted again; without, it may have brought that about itself."""
    worker = Worker(processes, step_seconds=30.0)
    assert worker.run("h = model.layers[1].output[0].save()").failure is None  # a zygote runs
    zygote = processes._zygote
    assert zygote is not None
    kill = zygote.kill if killed == "zygote" else lambda: os.kill(processes._given[-1].number, signal.SIGKILL)
    timer = threading.Timer(1.0, kill)
    timer.start()
    ran = worker.run_once("import time\ntime.sleep(20)\nh = model.layers[1].output[0].save()")
    timer.join()
    assert ran.failure is not None
    code = pb.ERROR_CODE_UNAVAILABLE if killed == "zygote" else pb.ERROR_CODE_INTERVENTION
    assert ran.failure.code == code, ran.failure
    assert [rows.tolist() for rows in ran.beside] == [rows.tolist() for rows in plain()]
    deadline = time.monotonic() + 120
    while (after := worker.run("h = model.layers[1].output[0].save()")).failure is not None:
        assert time.monotonic() < deadline and after.failure.code == pb.ERROR_CODE_UNAVAILABLE
        time.sleep(0.2)
    assert after.saved["h"].tolist() == after.outputs[0].tolist()
