"""The zygote: a process that forks sandboxed processes.

It has Python, torch and the block's API loaded. It has nothing of the service: an empty environment, a session of its own, and
one descriptor, its line to the worker. When the line closes it ends, and with it all that it has forked. No code of a tenant's
runs here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import mmap
import os
import pickle
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from executor.model.meta_tensors import Fakes
from executor.model.tree import ModuleTree
from executor.sandbox import kernel
from executor.sandbox.channel import REGION_BYTES, ChildEnd, Kind, Shared
from executor.sandbox.child import Child
from executor.sandbox.imports import INSTALLED, LIBRARY, shut_imports
from executor.sandbox.skeleton import Skeleton
from executor.sandbox.warm import Warm

LENGTH = struct.Struct("<Q")
FORK, FORKED = b"f", b"+"
_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4  # of the memory: no further seals, no shrinking, no growing


@dataclass(frozen=True)
class Setup:
    """What a zygote is told when it starts.

    Attributes:
        skeleton: the model's modules.
        widths: of the model's values: the hidden size, and the size of a head.
        memory_bytes: what a block may let its process grow in one step.
        max_saved_bytes: what a trace may save.
    """

    skeleton: Skeleton
    widths: tuple[int, int]
    memory_bytes: int
    max_saved_bytes: int


def serve(line: socket.socket) -> None:
    """Serve a worker until its line closes.

    Args:
        line: to the worker.

    Raises:
        EOFError: the worker is gone.
        RuntimeError: there are threads, with which it cannot fork.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave nothing behind
    os.chdir("/")
    _load()
    os.environ.clear()  # libraries have read it
    be_single()
    setup = _told(line)
    tree = setup.skeleton.tree()
    warm = Warm()
    _rehearse(warm, tree, setup)
    gc.collect()
    gc.freeze()  # so that the pages stay those of all children
    number = 0
    while line.recv(1) == FORK:
        number += 1
        _fork(line, number, setup, tree, warm)


def _load() -> None:
    """Load what blocks may import, and have torch find out about the processor."""
    for name in (*LIBRARY.split(), *INSTALLED.split()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        value = torch.randn(64, 64).to(dtype)
        torch.nn.functional.linear(value, value).softmax(-1).topk(4)
        (value @ value).sum().item()
        torch.layer_norm(value, (64,))
    with torch.enable_grad():
        torch.ones(2, requires_grad=True).sum().backward()
    repr(torch.randn(3, 3))
    torch.linalg.svd(torch.randn(8, 8))
    torch.fft.fft(torch.randn(8))
    fakes = Fakes()  # of scans
    hidden = fakes.like(torch.randn(4, 8))
    for value in (
        hidden @ hidden.T,
        hidden.softmax(-1).topk(2).values,
        torch.layer_norm(hidden, (8,)),
        hidden[-1].norm(),
    ):
        (value.float() * 2 + 1).sum()


def _rehearse(warm: Warm, tree: ModuleTree, setup: Setup) -> None:
    """Run a trace here once, so that what it finds out about the code is there in all processes."""
    memory = os.memfd_create("interpose-rehearsal")
    try:
        os.ftruncate(memory, 2 * REGION_BYTES)
        warm.run(ChildEnd(-1, Shared(memory)), tree, setup.widths)
    finally:
        os.close(memory)


def be_single() -> None:
    """End idle threads of libraries where they allow it, and check that one thread is left.

    After a fork other threads would not be there, and the locks that they hold would. Libraries that are made for forks end
    their idle threads before one (`pthread_atfork`), as OpenBLAS does, so that a first fork may be what it takes.

    Raises:
        RuntimeError: there are other threads; it names them.
    """
    if len(_threads()) == 1:
        return
    process = os.fork()
    if not process:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # it has ended, and left nothing behind
        os.waitpid(process, 0)
    if len(names := _threads()) > 1:
        raise RuntimeError(f"the process that forks sandboxes has {len(names)} threads: {', '.join(sorted(names))}")


def _threads() -> list[str]:
    """Return the names of this process's threads, as the kernel and Python have them."""
    python = {str(thread.native_id): f" ({thread.name})" for thread in threading.enumerate()}
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip() + python.get(task, ""))
    return names


def _fork(line: socket.socket, number: int, setup: Setup, tree: ModuleTree, warm: Warm) -> None:
    """Fork a sandboxed process, and give the worker the ends of what leads to it."""
    be_single()
    theirs, mine = socket.socketpair()
    memory = os.memfd_create("interpose-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, 2 * REGION_BYTES)
        fcntl.fcntl(memory, _ADD_SEALS, _SEALS)
        process = os.fork()
        if not process:
            _become_child(mine, memory, number, setup, tree, warm)
        handle = os.pidfd_open(process)
        try:
            socket.send_fds(line, [FORKED + LENGTH.pack(process)], [theirs.fileno(), memory, handle])
        finally:
            os.close(handle)
    finally:
        theirs.close()
        mine.close()
        os.close(memory)


def _become_child(mine: socket.socket, memory: int, number: int, setup: Setup, tree: ModuleTree, warm: Warm) -> None:
    """Give everything up, and serve the worker; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        shared = Shared(memory)
        end = ChildEnd(mine.fileno(), shared)
        os.closerange(0, mine.fileno())
        os.closerange(mine.fileno() + 1, 1 << 16)
        shut_imports()
        room = _address_bytes() + 2 * setup.memory_bytes + setup.max_saved_bytes
        try:
            kernel.give_up(number, room)
        except Exception as error:
            end.send(Kind.ANSWER, {"unable": f"{type(error).__name__}: {error}"})
        else:
            warm.run(end, tree, setup.widths)
            end.send(Kind.ANSWER, {"unable": None})
            Child(end, tree, setup.widths).run()
    finally:
        os._exit(0)


def _address_bytes() -> int:
    """Return the size of this process's address space."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


def _told(line: socket.socket) -> Setup:
    """Return what the worker says of the model.

    Raises:
        EOFError: the worker is gone.
    """
    told, descriptors, _, _ = socket.recv_fds(line, LENGTH.size, 1)
    if len(told) != LENGTH.size or len(descriptors) != 1:
        raise EOFError
    with os.fdopen(descriptors[0], "rb") as memory:
        setup: Setup = pickle.loads(os.pread(memory.fileno(), LENGTH.unpack(told)[0], 0))
    return setup
