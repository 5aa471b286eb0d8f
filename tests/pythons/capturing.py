# ruff: noqa
"""Tracers that run what they capture here, for the programs that each installed interpreter runs."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

from interpose.capture import (
    GUARD,
    SAVE,
    statement,
    CapturedContext,
    CaptureError,
    compile_block,
    function_source,
    run_outer,
)


class Trace(CapturedContext):
    """Runs the block in a namespace of its own, as a worker does, and gives back what it saved."""

    def run_block(self, block, scope):
        self.block = block
        namespace = {GUARD: lambda: None}
        self.values = namespace
        for name in block.reads:
            try:
                namespace[name] = scope.lookup(name)
            except KeyError:
                pass
        saved = []
        namespace[SAVE] = lambda value: saved.append(id(value)) or value
        exec(compile_block(block.source, block.filename, block.first_line, block.indent), namespace)
        scope.assign({name: namespace[name] for name in block.writes if id(namespace.get(name)) in saved})


class Outer(CapturedContext):
    """Runs its block here; the blocks of its invokes run as above, and their names come back at the end."""

    def __init__(self):
        self.pending = []
        self.saved = []

    def run_block(self, block, scope):
        self.block = block
        run_outer(block, scope, lambda value: self.saved.append(value) or value)
        for values in self.pending:
            scope.assign(values)

    def invoke(self, prompt):
        return Invoke(self, prompt)


class Invoke(Trace):
    def __init__(self, outer, prompt):
        self.outer = outer
        self.prompt = prompt

    def run_block(self, block, scope):
        super().run_block(block, scope)
        self.outer.pending.append({name: self.values[name] for name in block.writes if name in self.values})
