"""What a sandboxed process gives up, by the means of the Linux kernel.

Every layer stands alone. The process has its own user id where the worker may give one, no capabilities, and no way to new
privileges. Landlock takes all paths, all network and all signals to other processes. A seccomp filter lets the system calls pass
that Python and torch need to compute, and no other. Resource limits bound the address space, and forbid new processes and files.
An ordinary user without capabilities can do all of this but the first.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same numbers on all architectures
_NOBODY = 65534
_FIRST_UID = 2_000_000_000  # of the user ids that nothing else has; each process has its own

# The system calls that pass, by name, with their numbers on x86_64 and aarch64; None where there is none.
_PASS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "umask": (95, 166),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "ppoll": (271, 73),
    "getrandom": (318, 278),
    "getcpu": (309, 168),
    "membarrier": (324, 283),
    "rseq": (334, 293),
}
_PRLIMIT = (302, 261)  # passes for the process itself
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # the second gives EPERM
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter sees


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class Unable(OSError):
    """The kernel did not take something away from the process."""


def missing() -> list[str]:
    """Return what this machine lacks for a sandbox; [] if there is all."""
    lacks = []
    if platform.machine() not in _MACHINES:
        lacks.append(f"a list of system calls for {platform.machine()}")
    if _libc.prctl(21, 0, 0, 0, 0) < 0:  # PR_GET_SECCOMP
        lacks.append("seccomp")
    if landlock_version() < 1:
        lacks.append("Landlock (a kernel from 5.13 on that was started with it)")
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("interpose-probe", os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError):
        lacks.append("pidfds or sealed memory")
    return lacks


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 or less: it has none."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def give_up(number: int, address_bytes: int) -> None:
    """Take everything from this process that a block does not need. There is no way back.

    Args:
        number: of the process; its user id follows from it where the process may change that.
        address_bytes: the largest address space that the process may have.

    Raises:
        Unable: something could not be taken away.
    """
    parent = os.getppid()
    if os.geteuid() == 0:
        _change_user(number)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _prctl(_SET_DUMPABLE, 0)  # nobody else of the same user reads its memory
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)  # after the change of the user, which clears it
    if os.getppid() != parent:
        raise Unable("the parent is gone")
    _restrict_paths()
    for what in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(what, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # the descriptors that are open stay
    _filter_calls()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise Unable(ctypes.get_errno(), f"prctl({option})")


def _change_user(number: int) -> None:
    os.setgroups([])
    for user in (_FIRST_UID + number, _NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a container without that user id
            continue
        return
    raise Unable("no user id but root's can be had")


def _restrict_paths() -> None:
    version = landlock_version()
    if version < 1:
        raise Unable("the kernel has no Landlock")
    files = 13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16
    rules = _Ruleset((1 << files) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    made = _libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    if made < 0:
        raise Unable(ctypes.get_errno(), "Landlock's rules could not be made")
    try:
        if _libc.syscall(_RESTRICT_SELF, made, ctypes.c_uint32(0)) != 0:
            raise Unable(ctypes.get_errno(), "Landlock's rules were not taken")
    finally:
        os.close(made)


def _filter_calls() -> None:
    known = _MACHINES.get(platform.machine())
    if known is None:
        raise Unable(f"no list of system calls for {platform.machine()}")
    code = call_filter(*known)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    if _libc.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) != 0:
        raise Unable(ctypes.get_errno(), "the filter of system calls was not taken")


def call_filter(column: int, machine: int) -> bytes:
    """Return the BPF program that lets the known system calls pass.

    Args:
        column: of the numbers in the list.
        machine: the kernel's number of the architecture; a call of another one ends the process.
    """
    numbers = [number for pair in _PASS.values() if (number := pair[column]) is not None]
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, machine, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    after = len(numbers) + 6  # lines from the first comparison to the return that allows
    for index, number in enumerate(numbers):
        lines.append(_line(_EQUAL, number, after - index - 1, 0))
    lines += [
        _line(_EQUAL, _PRLIMIT[column], 0, 4),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_EQUAL, 0, 0, 2),
        _line(_LOAD, _FIRST_ARGUMENT + 4),
        _line(_EQUAL, 0, 1, 0),
        _line(_RETURN, _REFUSE),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)
