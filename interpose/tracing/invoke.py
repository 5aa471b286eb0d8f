"""An invoke: one prompt of a trace, and its block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from interpose import capture
from interpose.contract.accounting import Accounting
from interpose.contract.errors import InvalidArgument
from interpose.contract.result import Result
from interpose.contract.shown import OF_BLOCKS, shown
from interpose.program.check import TRACER_WORDS, frame_at
from interpose.results.outcome import Outcome
from interpose.tracing.captured import CapturedBlock
from interpose.tracing.in_block import InBlock
from interpose.v1.trace_pb2 import Prompt


class Gathering(Protocol):
    """The part of a tracer that an invoke uses.

    The names are private because the public names of a tracer belong to the notebook.
    """

    @property
    def _running(self) -> bool:
        """Whether the outer block runs; only then prompts are added."""

    def _add(
        self, block: capture.Block, scope: capture.Scope, prompt: Prompt | None, sampling: Mapping[str, object]
    ) -> int:
        """Add a prompt and its block; return the prompt's number."""

    def _result(self, number: int) -> Result | list[Result]:
        """Return the engine's output for a prompt; with several sequences, a list of them."""

    def _finished(self) -> Outcome:
        """Return the outcome of the trace; raise InvalidArgument before its end."""


class Invoker(InBlock, CapturedBlock):
    """One prompt of a trace and its block; made by `tracer.invoke`."""

    def __init__(self, tracer: Gathering, prompt: Prompt | None, sampling: Mapping[str, object]) -> None:
        self.tracer = tracer
        self._prompt = prompt
        self._sampling = sampling
        self._index: int | None = None

    @property
    def result(self) -> Result | Any:  # no type checker knows whether there is one sequence
        """The engine's output for this prompt, after the trace; a list of the sequences with `n`."""
        if self._index is None:
            raise InvalidArgument("this prompt has no block yet: write `with tracer.invoke(prompt) as one:`")
        if self._prompt is None:
            raise InvalidArgument(
                "an invoke without a prompt generates nothing; each prompt has its result: `with tracer.invoke(prompt) as one`"
            )
        return self.tracer._result(self._index)

    @property
    def accounting(self) -> Accounting:
        """The locations the block read and changed, and the precision, after the trace."""
        if self._index is None:
            raise InvalidArgument("this prompt has no block yet: write `with tracer.invoke(prompt) as one:`")
        return self.tracer._finished().accounting.get(self._index, Accounting())

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Add the captured block to the trace; the block runs after the end of the outer block."""
        if not self.tracer._running:
            raise InvalidArgument(
                "this block belongs to a trace that has already been sent",
                frames=[frame_at(block.body[0], block.filename)],
            )
        self._index = self.tracer._add(block, scope, self._prompt, self._sampling)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name in TRACER_WORDS:
                self._outside(name)
            raise AttributeError(f"an invoke has no attribute {name!r}", name=name, obj=self)

    def _outside(self, name: str) -> NoReturn:
        raise InvalidArgument(f"tracer.{name} belongs inside a block with a prompt, which runs in the model")

    def __dir__(self) -> list[str]:
        return shown(self, {*OF_BLOCKS, "tracer"})
