"""A `with` block that is captured instead of run; what cannot be captured is refused with the library's own error."""

from __future__ import annotations

from typing import Any

from interpose import capture
from interpose.check import refused


class CapturedBlock(capture.CapturedContext):
    """A captured block whose syntax errors are the library's own."""

    def __enter__(self) -> Any:
        try:
            return super().__enter__()
        except capture.CaptureError as error:
            raise refused(error) from None

    def __aenter__(self) -> Any:
        try:
            return super().__aenter__()
        except capture.CaptureError as error:
            raise refused(error) from None
