"""The versions of the protocol, of this package, and of Python."""

from __future__ import annotations

import platform
from importlib import metadata

PROTOCOL = 1


def _package_version() -> str:
    try:
        return metadata.version("interpose")
    except metadata.PackageNotFoundError:  # the code runs from a checkout that is not installed
        return "0+unknown"


VERSION = _package_version()
PYTHON_VERSION = platform.python_version()
