"""What a sandboxed process can import: what it has loaded, for it can read no file."""

from __future__ import annotations

import io
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec

# What blocks import. What a sandboxed process has not loaded it cannot load.
LIBRARY = (
    "abc array ast base64 bisect binascii builtins calendar cmath codecs collections collections.abc colorsys contextlib copy "
    "csv dataclasses datetime decimal difflib enum fractions functools gc hashlib heapq hmac html inspect io itertools json "
    "keyword locale logging marshal math numbers operator pickle pprint queue random re reprlib secrets statistics string struct "
    "sys textwrap time timeit token tokenize traceback types typing unicodedata uuid warnings weakref zlib"
)
INSTALLED = (
    "numpy numpy.linalg numpy.fft numpy.random numpy.ma torch torch.nn torch.nn.functional torch.nn.init torch.nn.utils "
    "torch.linalg torch.fft torch.special torch.distributions torch.optim torch.autograd torch.func torch.utils._pytree "
    "torch.testing interpose einops"
)


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
