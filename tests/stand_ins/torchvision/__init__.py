"""Stands in for torchvision where it cannot be imported: every module and name of it is there, and computes nothing.

vLLM's code of Qwen3.5 and of the Qwen-VL models imports torchvision's names for images. Text uses none of them. Processes find
this package by `tests.stand_ins.use`.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

__version__ = "0.28.0"


class _Names(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _Finder())
