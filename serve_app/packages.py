"""What blocks can import on the server: its packages, or what a sandbox has of them."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

from executor.sandbox.imports import INSTALLED
from interpose.v1.service_pb2 import ListPackagesReply, Package

_MODULES = 50  # of one package that are listed


@functools.cache
def packages(sandboxed: bool) -> ListPackagesReply:
    """Return the packages that a tenant's blocks can import.

    Args:
        sandboxed: whether the blocks run in sandboxes, which can load no file.
    """
    loaded = {name.partition(".")[0] for name in INSTALLED.split()}
    modules: dict[str, list[str]] = {}
    for module, names in importlib.metadata.packages_distributions().items():
        if module.isidentifier() and (not sandboxed or module in loaded):
            for name in names:
                modules.setdefault(name, []).append(module)
    reply = ListPackagesReply(python_version=platform.python_version(), sandboxed=sandboxed)
    for name in sorted(modules, key=str.lower):
        listed = sorted(set(modules[name]))[:_MODULES]
        reply.packages.append(Package(name=name, version=importlib.metadata.version(name), modules=listed))
    return reply
