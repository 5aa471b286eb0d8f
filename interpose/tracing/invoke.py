"""One of the prompts of a trace, and the block that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, Protocol

from interpose import capture
from interpose.contract.accounting import Accounting
from interpose.contract.errors import InvalidArgument
from interpose.contract.result import Result
from interpose.program.check import TRACER_WORDS, frame_at
from interpose.results.outcome import Outcome
from interpose.tracing.captured import CapturedBlock
from interpose.v1.trace_pb2 import Prompt


class Gathering(Protocol):
    """What one of a trace's prompts needs of the trace's tracer.

    The names are private, as a tracer's public ones are the notebook's.
    """

    @property
    def _running(self) -> bool:
        """Whether the outer block runs, which adds the prompts."""

    def _add(
        self, block: capture.Block, scope: capture.Scope, prompt: Prompt | None, sampling: Mapping[str, object]
    ) -> int:
        """Add a prompt and its block; return the prompt's number."""

    def _result(self, number: int) -> Result | list[Result]:
        """Return what the engine generated for a prompt, one result for each of its sequences if it has several."""

    def _finished(self) -> Outcome:
        """Return what the trace gave; InvalidArgument before its end."""


class Invoker(CapturedBlock):
    """One prompt of a trace and its block; made by `tracer.invoke`."""

    def __init__(self, tracer: Gathering, prompt: Prompt | None, sampling: Mapping[str, object]) -> None:
        self.tracer = tracer
        self._prompt = prompt
        self._sampling = sampling
        self._index: int | None = None

    @property
    def result(self) -> Result | list[Result]:
        """After the trace, what the engine generated for this prompt; with `n`, one result for each sequence."""
        if self._index is None:
            raise InvalidArgument("this prompt has no block yet: write `with tracer.invoke(prompt) as one:`")
        if self._prompt is None:
            raise InvalidArgument(
                "an invoke without a prompt generates nothing; each prompt has its result: `with tracer.invoke(prompt) as one`"
            )
        return self.tracer._result(self._index)

    @property
    def accounting(self) -> Accounting:
        """After the trace, where this prompt's block was served and where it wrote, and in what precision."""
        if self._index is None:
            raise InvalidArgument("this prompt has no block yet: write `with tracer.invoke(prompt) as one:`")
        return self.tracer._finished().accounting.get(self._index, Accounting())

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Add the captured block to the trace; it runs when the outer block has ended."""
        if not self.tracer._running:
            raise InvalidArgument(
                "this block belongs to a trace that has already been sent",
                frames=[frame_at(block.body[0], block.filename)],
            )
        self._index = self.tracer._add(block, scope, self._prompt, self._sampling)

    def __getattr__(self, name: str) -> NoReturn:
        if name in TRACER_WORDS:
            raise InvalidArgument(f"tracer.{name} belongs inside a block with a prompt, which runs in the model")
        raise AttributeError(f"an invoke has no attribute {name!r}")
