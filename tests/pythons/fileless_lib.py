"""What code without a file imports to show what was captured of it: run by each installed interpreter."""

from __future__ import annotations

from interpose.capture import CapturedContext, CaptureError, class_source, function_source


class Trace(CapturedContext):
    """Prints its block's source, or why there is none."""

    def __enter__(self):
        try:
            return super().__enter__()
        except CaptureError as error:
            print("refused", error.line, error)
            raise

    def run_block(self, block, scope):
        print("captured", repr(block.source), block.first_line, {name: scope.lookup(name) for name in block.reads})


def sources(*things: object) -> None:
    """Print the sources of functions and classes."""
    for thing in things:
        found = class_source(thing) if isinstance(thing, type) else function_source(thing)
        print("source", None if found is None else repr(found.source))
