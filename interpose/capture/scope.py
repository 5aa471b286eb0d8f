"""Reads and assigns the names of a running frame, as the frame's own code would.

A function's variables live in slots of the frame and in cells. CPython 3.13 writes through to them (PEP 667); before,
the frame's dict is a copy that `PyFrame_LocalsToFast` writes back.
"""

from __future__ import annotations

import ctypes
import dis
import inspect
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from interpose.capture.recent import Recent

_MODULE = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})


class Scope:
    """The caller's names, as long as its frame runs."""

    def __init__(self, frame: FrameType):
        self.frame = frame
        self.globals: dict[str, Any] = frame.f_globals

    def lookup(self, name: str) -> object:
        """Returns the value of `name` in the frame: of its locals, its closure, or its module.

        Builtins are not looked at. Raises KeyError where the name is unbound; so it is for a variable of the function that
        has no value yet, whatever the module calls by that name.
        """
        frame = self.frame
        if _is_function(frame.f_code):
            return frame.f_locals[name] if self.is_local(name) else frame.f_globals[name]
        if frame.f_locals is not frame.f_globals and name not in _names(frame.f_code).module:
            if name in frame.f_locals:
                return frame.f_locals[name]
            back = frame.f_back
            if name in frame.f_code.co_freevars and back is not None and frame.f_code in back.f_code.co_consts:
                return Scope(back).lookup(name)  # a class body, run while the function around it waits
        return frame.f_globals[name]

    def assign(self, values: dict[str, object]) -> None:
        """Assigns names as statements in the frame would.

        They go to the frame's variables, its cells, or its module.
        """
        frame = self.frame
        function = _is_function(frame.f_code)
        module = _names(frame.f_code).module
        slots: dict[str, object] = {}
        for name, value in values.items():
            if name in module or (function and not self.is_local(name)):
                frame.f_globals[name] = value
            else:
                slots[name] = value
        if slots:
            frame.f_locals.update(slots)
            if function and sys.version_info < (3, 13):
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def is_local(self, name: str) -> bool:
        """Returns whether `name` is a variable of a function, not of the module.

        The function is the frame's own, or one around it.
        """
        frame = self.frame
        code = frame.f_code
        if frame.f_locals is frame.f_globals or name in _names(code).module:
            return False
        if _is_function(code):
            return name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars
        return name in frame.f_locals or name in code.co_freevars or name in _names(code).stored


@dataclass(frozen=True)
class _Names:
    module: frozenset[str]  # names the code expressly takes from its module or gives to it
    stored: frozenset[str]  # names that code outside of functions, such as a class body, binds in its own namespace


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _names(code: CodeType) -> _Names:
    names = _known.get(code)
    if names is None:
        found = [(instruction.opname, instruction.argval) for instruction in dis.get_instructions(code)]
        module = frozenset(name for operation, name in found if operation in _MODULE)
        stored = frozenset(name for operation, name in found if operation == "STORE_NAME")
        names = _known.put(code, _Names(module, stored))
    return names


_known: Recent[_Names] = Recent(1024)
