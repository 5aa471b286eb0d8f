"""Takes a ``with`` block out of the running program.

A block gives its source instead of its effects, and the names that it exchanges. Nothing here knows what becomes of a block.
Only the standard library is imported, as the worker compiles blocks with it too.
"""

from interpose.capture.analysis import block_reads_writes
from interpose.capture.block import Block
from interpose.capture.classes import ClassSource, class_source
from interpose.capture.errors import CaptureError
from interpose.capture.functions import FunctionSource, function_source
from interpose.capture.outer import run_outer
from interpose.capture.remake import compile_class, compile_function, default_name
from interpose.capture.rewrite import GUARD, SAVE, compile_block
from interpose.capture.scope import Scope
from interpose.capture.skip import CapturedContext
from interpose.capture.uses import attributes_used
from interpose.capture.variables import Piece, piece, refuse_shared

__all__ = [
    "GUARD",
    "SAVE",
    "Block",
    "CaptureError",
    "CapturedContext",
    "ClassSource",
    "FunctionSource",
    "Piece",
    "Scope",
    "attributes_used",
    "block_reads_writes",
    "class_source",
    "compile_block",
    "compile_class",
    "compile_function",
    "default_name",
    "function_source",
    "piece",
    "refuse_shared",
    "run_outer",
]
