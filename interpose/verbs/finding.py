"""What an experiment found: named arrays, a short text of them, and a picture."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

MOST = 48  # characters of a text that a short text shows


class Finding:
    """The base of the results of all experiments, which are frozen dataclasses."""

    PICTURE: ClassVar[str]  # the function of `interpose.plots` that draws it

    def plot(self, path: Any = None, **options: Any) -> Any:
        """Draw the result; return a figure of matplotlib.

        Args:
            path: a file to write: .png, .svg or .pdf; None: none is written.
            options: of the function in `interpose.plots`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return getattr(importlib.import_module("interpose.plots"), self.PICTURE)(self, path, **options)

    def __repr__(self) -> str:
        parts = (f"{field.name}={_short(getattr(self, field.name))}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(parts)})"


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= MOST else text[: MOST - 1] + "…"
