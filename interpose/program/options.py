"""The options of a trace: waiting, streaming, fetching, edits, adapter, and scan."""

from __future__ import annotations

from dataclasses import dataclass

from interpose.contract.errors import InvalidArgument


@dataclass(frozen=True)
class TraceOptions:
    """The options of one trace, checked.

    Attributes:
        stream: whether `tracer.stream()` gives the outputs while the trace runs.
        blocking: whether the end of the block waits for the trace; else the trace is a job.
        fetch: whether saved tensors are fetched; None: fetched, except in a session that keeps values on the server.
        edits: names of the trace's standing edits.
        lora: name of the LoRA adapter of the trace's requests; "": no adapter.
        scan: whether the block runs on shapes alone, and the engine generates nothing.

    Raises:
        InvalidArgument: an option is of the wrong type, or two of them exclude each other.
    """

    stream: bool = False
    blocking: bool = True
    fetch: bool | None = None
    edits: tuple[str, ...] = ()
    lora: str = ""
    scan: bool = False

    def __post_init__(self) -> None:
        for name in ("stream", "blocking", "fetch"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "fetch" and value is None):
                raise InvalidArgument(f"{name} is True or False, not {value!r}")
        if self.stream and not self.blocking:
            raise InvalidArgument(
                "stream=True and blocking=False exclude each other: a job is followed by its own methods"
            )
        if self.stream and self.fetch is False:
            raise InvalidArgument(
                "stream=True and fetch=False exclude each other: a stream brings values as they are saved"
            )
