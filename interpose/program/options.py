"""How a trace runs, beside what runs: whether its block's end waits, whether its outputs are streamed, where tensors stay."""

from __future__ import annotations

from dataclasses import dataclass

from interpose.contract.errors import InvalidArgument


@dataclass(frozen=True)
class TraceOptions:
    """The options of one trace, checked.

    Attributes:
        stream: the outputs are read from `tracer.stream()` while the trace runs.
        blocking: the end of the block waits for the trace; else the trace is a background job.
        fetch: saved tensors come along; None: unless the session is one whose values stay on the server.
        edits: names of the standing edits that it runs with.
        lora: name of the LoRA adapter that its requests run with; "": none.
        scan: its block runs on shapes, and nothing is generated.

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
