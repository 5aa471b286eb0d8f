"""State of the process that a block may change and that is the block's only while it runs.

A block runs in the worker's process, on the thread of the forward pass. A change would reach the engine and the
blocks of others: the default dtype, the precision of matrix products, modes of torch, signal handlers, the environment. The
tables below say how each is read and put back. Changes in `TURN` are the block's own: they are put back after every turn, and
made again when the block goes on. Changes in `END` are put back when the block has ended; reading these takes longer.

Most changes are put back silently. A mode that is left open, or a signal that is handled or held back otherwise, fails the block
(`fails`): its author would take it for something that lasts, and it could stop others.

Size: the tables, and a function for each line of them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions make an enumeration of all that they return
import contextlib
import gc
import locale
import operator
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils import _device

_DEVICE: Any = torch._GLOBAL_DEVICE_CONTEXT
_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
_cast: Callable[[str], bool] = torch.is_autocast_enabled
_precision_of: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_tracer, _profiler, _handler = sys.gettrace, sys.getprofile, _signal.getsignal
_TERM, _INT, _NO_AUTOCAST = int(signal.SIGTERM), int(signal.SIGINT), (False, False)
_TINY, _ONE = numpy.float32(1e-40), numpy.float32(1.0)
# What ends a process, and what vLLM and Ray may handle. SIGALRM is the budget's.
_SIGNALS = [
    number
    for number in range(1, signal.NSIG)
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM) and number < signal.SIGRTMIN
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of state.

    Attributes:
        name: what messages call it.
        read: returns it.
        write: makes it what `read` returned.
        fails: whether a block fails that leaves it changed.
        same: whether it is compared by identity, as for objects that a block may have made.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    fails: bool = False
    same: bool = False


def _modes() -> tuple[Any, ...]:
    count = _mode_count()
    return tuple([torch._C._get_function_stack_at(i) for i in range(count)]) if count else ()


def _set_modes(modes: tuple[Any, ...]) -> None:
    while _mode_count():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
    # A default device is such a mode too, and torch remembers it in two more places.
    devices = [mode for mode in modes if isinstance(mode, _device.DeviceContext)]
    _device.CURRENT_DEVICE = devices[-1].device if devices else None
    if not any(mode is getattr(_DEVICE, "device_context", None) for mode in devices):
        _DEVICE.device_context = None


def _set_dispatch_modes(depth: int) -> None:
    while torch._C._len_torch_dispatch_stack() > depth:
        torch._C._pop_torch_dispatch_stack(None)


def _autocast() -> tuple[bool, bool]:
    return _cast("cpu"), _cast("cuda")


def _set_autocast(state: tuple[bool, bool]) -> None:
    torch.set_autocast_enabled("cpu", state[0])
    torch.set_autocast_enabled("cuda", state[1])
    torch.clear_autocast_cache()


def _precision() -> tuple[str, str, str, str]:
    """The precision of float32 products; torch.set_float32_matmul_precision changes the first."""
    of = _precision_of
    return of("cuda", "matmul"), of("mkldnn", "matmul"), of("cuda", "conv"), of("generic", "all")


def _set_precision(state: tuple[str, str, str, str]) -> None:
    # The old way of saying it too, which torch compares with the new one.
    torch._C._set_float32_matmul_precision({"tf32": "high"}.get(state[0], "highest"))
    torch._C._set_fp32_precision_setter("generic", "all", state[3])
    for backend, kind, value in (
        ("cuda", "matmul", state[0]),
        ("mkldnn", "matmul", state[1]),
        ("cuda", "conv", state[2]),
    ):
        torch._C._set_fp32_precision_setter(backend, kind, value)


def _numerics() -> tuple[Any, ...]:
    get = torch._C
    return (
        get._get_deterministic_algorithms(),
        get._get_deterministic_algorithms_warn_only(),
        get._get_deterministic_fill_uninitialized_memory(),
        get._get_cudnn_enabled(),
        get._get_cudnn_deterministic(),
        get._get_cudnn_benchmark(),
        get._get_mkldnn_enabled(),
        get._get_cublas_allow_fp16_reduced_precision_reduction(),
        get._get_cublas_allow_bf16_reduced_precision_reduction(),
    )


def _set_numerics(state: tuple[Any, ...]) -> None:
    put: Any = torch._C
    put._set_deterministic_algorithms(state[0], warn_only=state[1])
    put._set_deterministic_fill_uninitialized_memory(state[2])
    put._set_cudnn_enabled(state[3])
    put._set_cudnn_deterministic(state[4])
    put._set_cudnn_benchmark(state[5])
    put._set_mkldnn_enabled(state[6])
    put._set_cublas_allow_fp16_reduced_precision_reduction(*state[7])
    put._set_cublas_allow_bf16_reduced_precision_reduction(*state[8])


def _mask() -> Any:
    return _signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _set_mask(mask: Any) -> None:
    _signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _endings() -> tuple[Any, ...]:
    return _handler(_TERM), _handler(_INT)


def _set_endings(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
        _set_handler(number, handler)


def _set_handler(number: int, handler: Any) -> None:
    if handler is not None:  # one that was not set from Python cannot be put back from it
        _signal.signal(number, handler)


def _handlers() -> tuple[Any, ...]:
    return tuple(map(_handler, _SIGNALS))


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if _signal.getsignal(number) is not handler:
            _set_handler(number, handler)


def _timers() -> tuple[float, float]:
    return _signal.getitimer(signal.ITIMER_VIRTUAL)[1], _signal.getitimer(signal.ITIMER_PROF)[1]


def _set_timers(intervals: tuple[float, float]) -> None:
    for timer, interval in zip((signal.ITIMER_VIRTUAL, signal.ITIMER_PROF), intervals, strict=True):
        _signal.setitimer(timer, interval, interval)


def _streams() -> tuple[Any, ...]:
    return sys.stdout, sys.stderr, sys.stdin, sys.excepthook, sys.unraisablehook, sys.displayhook


def _set_streams(streams: tuple[Any, ...]) -> None:
    sys.stdout, sys.stderr, sys.stdin, sys.excepthook, sys.unraisablehook, sys.displayhook = streams


def _set_observers(functions: tuple[Any, Any]) -> None:
    sys.settrace(functions[0])
    sys.setprofile(functions[1])


def _environment() -> dict[Any, Any]:
    return dict(os.environ._data)  # type: ignore[attr-defined]


def _set_environment(before: dict[Any, Any]) -> None:
    now: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    for name in [name for name in now if name not in before]:
        del os.environb[name]
    for name, value in before.items():
        if now.get(name) != value:
            os.environb[name] = value


_UMASK = os.umask(0o077)
os.umask(_UMASK)


def _umask() -> int:
    """Return the mask of the permissions of new files.

    Reading it sets it, and the mask in between holds for other threads' files.
    """
    return os.umask(_UMASK)


def _collector() -> tuple[Any, ...]:
    return gc.get_threshold(), gc.get_debug()


def _set_collector(state: tuple[Any, ...]) -> None:
    gc.set_threshold(*state[0])
    gc.set_debug(state[1])


def _set_callbacks(callbacks: tuple[Any, ...]) -> None:
    gc.callbacks[:] = callbacks


def _set_locale(name: str) -> None:
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, name)


def _flushes() -> bool:
    """Whether numbers below the smallest normal one are taken for zero."""
    return bool(_TINY * _ONE == 0.0)


def _set_warnings(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


# Read before and after every turn.
_CHEAP = (
    Entry("a torch function mode or default device", _modes, _set_modes, fails=True, same=True),
    Entry("a trace or profile function", lambda: (sys.gettrace(), sys.getprofile()), _set_observers, True, same=True),
    Entry("a standard stream or hook of the interpreter", _streams, _set_streams, same=True),
    Entry("the handler of SIGTERM or SIGINT", _endings, _set_endings, fails=True, same=True),
    Entry("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Entry("a torch dispatch mode", torch._C._len_torch_dispatch_stack, _set_dispatch_modes, fails=True),
    Entry("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Entry("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Entry("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Entry("what the garbage collector does", _collector, _set_collector),
)
# The engine itself never changes these while it serves. So they are read once when the block begins, and after every turn.
_STEADY = (
    Entry("autocast", _autocast, _set_autocast, fails=True),
    Entry("the precision of matrix products", _precision, _set_precision),
    Entry("how torch computes", _numerics, _set_numerics),
    Entry("the mask of signals", _mask, _set_mask, fails=True),
)
TURN = _CHEAP + _STEADY
_read_cheap = [entry.read for entry in _CHEAP]
END = (
    Entry("the environment", _environment, _set_environment),
    Entry("the working directory", os.getcwd, os.chdir),
    Entry("the file mode mask", _umask, os.umask),
    Entry("the garbage collector's callbacks", lambda: tuple(gc.callbacks), _set_callbacks, same=True),
    Entry("the locale", lambda: locale.setlocale(locale.LC_ALL), _set_locale),
    Entry("the filters of warnings", lambda: list(warnings.filters), _set_warnings),
    Entry("numpy's error handling", numpy.geterr, lambda state: numpy.seterr(**state)),
    Entry("flushing of denormal numbers", _flushes, torch.set_flush_denormal),
    Entry("the handler of a signal", _handlers, _set_handlers, fails=True, same=True),
    Entry("a timer", _timers, _set_timers, fails=True),
    Entry("the processors to run on", lambda: os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus)),
)

_OBJECTS_AT_END = [index for index, entry in enumerate(END) if entry.same]

State = tuple[Any, ...]
_plain = tuple(entry.read for entry in _CHEAP[4:])


def read(entries: tuple[Entry, ...]) -> State:
    """Return the state as it is."""
    return tuple([entry.read() for entry in entries])


def differing(entries: tuple[Entry, ...], one: State, other: State) -> list[int]:
    """Return the places of what differs between two states."""
    return [
        index
        for index, (entry, a, b) in enumerate(zip(entries, one, other, strict=True))
        if a is not b and not (_identical(a, b) if entry.same else a == b)
    ]


def now() -> State:
    """Return the state of `TURN` as it is: `read(TURN)`, in a quarter of the time."""
    dtype, dispatch, threads, recursion, switch, collector = _plain
    return (
        _modes(),
        (_tracer(), _profiler()),
        (sys.stdout, sys.stderr, sys.stdin, sys.excepthook, sys.unraisablehook, sys.displayhook),
        (_handler(_TERM), _handler(_INT)),
        dtype(),
        dispatch(),
        threads(),
        recursion(),
        switch(),
        collector(),
        _autocast() if _any_autocast() else _NO_AUTOCAST,
        _precision(),
        _numerics(),
        _mask(),
    )


def _unchanged(one: State, other: State) -> bool:
    """Whether nothing of `TURN` differs, faster than `differing` and on the safe side.

    The answer may be no for states that do not differ. Objects that a block may have made are compared by identity first, so
    their code does not run where the tuples are compared.
    """
    observers, streams, handlers = one[1], one[2], one[3]
    observers_then, streams_then, handlers_then = other[1], other[2], other[3]
    return (
        one[0] is other[0]
        and observers[0] is observers_then[0]
        and observers[1] is observers_then[1]
        and handlers[0] is handlers_then[0]
        and handlers[1] is handlers_then[1]
        and all(map(operator.is_, streams, streams_then))
        and one == other
    )


def _unchanged_at_end(one: State, other: State) -> bool:
    """Whether nothing of `END` differs, as of `_unchanged`."""
    return all(_identical(one[index], other[index]) for index in _OBJECTS_AT_END) and one == other


def _identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects.

    Objects of a block are compared by identity, so their code does not run.
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


def complaint(left: list[str]) -> str:
    """Return the message of a block that fails because it left state changed.

    `left` is the result of `OwnState.leave`.
    """
    return (
        f"the block left {' and '.join(left)} changed in the engine's process; everybody's blocks run there, so it was put back; "
        "open modes with a `with` statement that ends before the next location, and leave signals and timers alone"
    )


class OwnState:
    """The process state that one block has changed, which holds only while the block runs."""

    def __init__(self) -> None:
        self._outside: State = ()
        self._mine: dict[int, Any] = {}
        self._steady: State = ()
        self._at_start: State | None = None

    def enter(self, outside: State = ()) -> None:
        """The block runs: make its changes again.

        Args:
            outside: the state of `TURN` now, where it is known.
        """
        if self._at_start is None:
            self._steady, self._at_start = read(_STEADY), read(END)
        self._outside = outside or (*[read() for read in _read_cheap], *self._steady)
        for index, value in self._mine.items():
            TURN[index].write(value)

    @property
    def held(self) -> bool:
        """Whether the block has changed state that holds in its turns alone."""
        return bool(self._mine)

    def leave(self, ended: bool) -> list[str]:
        """The block has parked or ended: put everything back.

        Args:
            ended: whether it is over.

        Returns:
            The names of changed state that fails the block.
        """
        after = now()
        left: list[str] = []
        if _unchanged(after, self._outside):
            self._mine = {}
        else:
            changed = differing(TURN, after, self._outside)
            self._mine = {index: after[index] for index in changed if not TURN[index].fails}
            left = _put_back(TURN, changed, self._outside)
        if ended and self._at_start is not None:
            at_end = read(END)
            if not _unchanged_at_end(at_end, self._at_start):
                slow = differing(END, at_end, self._at_start)
                left += _put_back(END, slow, self._at_start)
            self._at_start = None
        return left


def _put_back(entries: tuple[Entry, ...], indices: list[int], state: State) -> list[str]:
    for index in indices:
        entries[index].write(state[index])
    return [entries[index].name for index in indices if entries[index].fails]
