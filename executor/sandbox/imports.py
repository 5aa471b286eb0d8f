"""What a sandboxed process can import: what it has loaded, for it can read no file."""

from __future__ import annotations

import io
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec


class _Nowhere(io.TextIOBase):
    """A text stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


class _Loaded:
    """Says why a module that is not loaded cannot be imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        raise ModuleNotFoundError(
            f"{name} is not loaded in the sandbox, where no file can be read; a sandboxed block has Python's standard library, "
            "numpy and torch",
            name=name,
        )


def shut_imports() -> None:
    """Let imports find what is loaded already, and say so for all else. Output goes nowhere."""
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, _Loaded]
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        setattr(sys, name, _Nowhere())
