"""Makes a notebook show the client: called when the client is first connected."""

from __future__ import annotations

import sys

from interpose.notebook import tracebacks


def install() -> None:
    """Add tab completion to a running IPython, and shorten tracebacks. Idempotent."""
    tracebacks.install()
    if "IPython" in sys.modules:
        from interpose.notebook import completion

        completion.install()
