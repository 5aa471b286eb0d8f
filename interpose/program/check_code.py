"""Checks the locations in the code of functions, methods and classes that a block uses."""

from __future__ import annotations

from types import FunctionType, MethodType

from interpose import capture
from interpose.capture.rewrite import parse_block
from interpose.modules.envoy import Envoy
from interpose.program.check import check_locations
from interpose.wire import symbols


def check_code(value: object) -> None:
    """Check the locations in the code of a user's function, method or class."""
    if symbols.symbol_value(value) is not None or isinstance(value, Envoy | capture.CapturedContext):
        return
    if isinstance(value, FunctionType):
        _check_function(value)
        return
    owner = value.__self__ if isinstance(value, MethodType) else value
    cls = owner if isinstance(owner, type) else type(owner)
    source = None if symbols.is_installed(cls.__module__) else capture.class_source(cls)
    if source is not None:
        check_locations([source.node], source.filename, {**source.needs, **source.reads}, frozenset())


def _check_function(function: FunctionType) -> None:
    source = capture.function_source(function)
    if source is None:
        return
    if source.source.lstrip().startswith("lambda"):  # its text may not parse alone; the worker checks it
        return
    body = parse_block(source.source, source.filename, source.first_line, source.indent).body
    check_locations(body, source.filename, source.bindings, frozenset())
