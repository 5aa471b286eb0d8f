"""A streamed trace: its generated tokens and saved values, output by output, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from interpose.contract.errors import Cancelled
from interpose.contract.result import Logprob
from interpose.modules.tree import Node
from interpose.results.assembly import Assembly, blobs_of
from interpose.results.outcome import Delivered, NotebookResolver, Outcome, take_event, values_of
from interpose.rpc.call import Running
from interpose.rpc.session import Session
from interpose.rpc.threads import in_thread
from interpose.v1.trace_pb2 import Event, Increment, Output


@dataclass(frozen=True)
class StreamOutput:
    """One output of a streamed trace.

    Attributes:
        invoke: index of the prompt in the trace.
        sequence: index of the sequence among the prompt's `n` sequences.
        text: the text generated so far.
        token_ids: the ids generated so far.
        new_text, new_token_ids: the part of them that is new in this output.
        finished: whether this is the last output of the sequence.
        finish_reason: "stop", "length", "tracer_stop", "error" or "abort" in the last output, "" before.
        logprobs: log probabilities of the tokens so far, as in `Result.logprobs`.
        saves: the values that the block has saved so far, by name. Each output has a dict of its own. A list or a dict in it
            is the same object in all outputs, and grows as it does in the block.
    """

    invoke: int
    sequence: int
    text: str
    token_ids: list[int] = field(repr=False)
    new_text: str
    new_token_ids: list[int]
    finished: bool
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None = field(repr=False)
    saves: Mapping[str, object] = field(repr=False)


class StreamedTrace:
    """A running trace whose outputs are read one by one, by one reader at a time.

    Args:
        running: the accepted trace.
        session: fetches the large values.
        outcome: the trace's outcome, filled in while the outputs are read.
        captured: the caller's own objects by their index in the trace's scope.
        tree: the served module tree.
        groups: the invokes of each prompt, one for each sequence of the prompt.
        deliver: is called at the end of the trace with all saved values; raises the first failure.
    """

    def __init__(
        self,
        running: Running,
        session: Session,
        outcome: Outcome,
        captured: Mapping[int, object],
        tree: Node,
        groups: Sequence[Sequence[int]],
        deliver: Callable[[list[Delivered]], None],
    ) -> None:
        self._running = running
        self._session = session
        self._outcome = outcome
        self._captured = captured
        self._tree = tree
        self._numbers = {one: (number, i) for number, group in enumerate(groups) for i, one in enumerate(group)}
        self._deliver = deliver
        self._assemblies: dict[int, Assembly] = {}
        self._over = False
        self._left = False

    def next(self) -> StreamOutput | None:
        """Wait for the next output; return None after the last output.

        The caller's names are assigned before None is returned.

        Raises:
            InterposeError: the trace or one of its blocks failed. The error comes after the last output.
            Cancelled: the stream was closed before its end.
        """
        while self._more():
            try:
                event = self._running.next()
                if event is None:
                    self._finish(self._values())
                else:
                    self._fetch(event)
                    if (output := self._take(event)) is not None:
                        return output
            except BaseException:
                self.close()
                raise
        return None

    async def next_async(self) -> StreamOutput | None:
        """Do the same as `next`, on an event loop."""
        while self._more():
            try:
                event = await self._running.next_async()
                if event is None:
                    self._finish(await in_thread(self._values))
                else:
                    if any(blobs_of(event.increment)):
                        await in_thread(self._fetch, event)
                    if (output := self._take(event)) is not None:
                        return output
            except BaseException:
                self.close(wait=False)
                raise
        return None

    def close(self, wait: bool = True) -> None:
        """Stop reading; a trace that has not ended is cancelled. Idempotent."""
        if not self._over:
            self._over = self._left = True
            self._deliver = _nothing
            self._running.close(wait)

    def _more(self) -> bool:
        if self._left:
            raise Cancelled("this stream has been left, and its trace was cancelled; run the trace again")
        return not self._over

    def _fetch(self, event: Event) -> None:
        blobs = list(blobs_of(event.increment))
        if blobs:
            self._assembly(event.increment).buffers.update(self._session.fetch(self._outcome.session_id, blobs))

    def _take(self, event: Event) -> StreamOutput | None:
        kind = event.WhichOneof("kind")
        if kind == "increment":
            self._assembly(event.increment).add(event.increment)
        else:
            take_event(self._outcome, event)
        return self._output(event.output) if kind == "output" else None

    def _assembly(self, increment: Increment) -> Assembly:
        if increment.invoke not in self._assemblies:
            self._assemblies[increment.invoke] = Assembly(self._captured, NotebookResolver(lambda: self._tree))
        return self._assemblies[increment.invoke]

    def _output(self, output: Output) -> StreamOutput:
        prompt, sequence = self._numbers.get(output.invoke, (output.invoke, 0))
        result = self._outcome.results[output.invoke]
        assembly = self._assemblies.get(output.invoke)
        return StreamOutput(
            invoke=prompt,
            sequence=sequence,
            text=result.text,
            token_ids=list(result.token_ids),
            new_text=output.text,
            new_token_ids=list(output.token_ids),
            finished=output.finished,
            finish_reason=output.finish_reason,
            logprobs=None if result.logprobs is None else list(result.logprobs),
            saves=dict(assembly.names) if assembly is not None else {},
        )

    def _values(self) -> list[Delivered]:
        return list(values_of(self._outcome, self._session, lambda: self._tree))

    def _finish(self, values: list[Delivered]) -> None:
        self._over = True
        self._running.close()
        deliver, self._deliver = self._deliver, _nothing  # drops the reference to the caller's frame
        failed = {failure.invoke for failure in self._outcome.failures}
        streamed = [(invoke, self._assemblies[invoke].names) for invoke in sorted(self._assemblies.keys() - failed)]
        deliver([*((invoke, names, {}) for invoke, names in streamed), *values])

    def __del__(self) -> None:
        # The garbage collector runs in any thread, also on an event loop, so this must not wait.
        self._running.close(wait=False)


def _nothing(values: list[Delivered]) -> None:
    """Deliver nothing: the values have been delivered already."""


class OutputStream:
    """The outputs of a streamed trace, for a loop: `for out in tracer.stream():`.

    `async for` works too. A loop that ends early (break, an exception) cancels the trace when the last reference to the
    stream is gone. `close` cancels the trace at once. After the last output, the names that the block saved are assigned, as
    after a trace without streaming.
    """

    def __init__(self, trace: StreamedTrace) -> None:
        self._trace = trace

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> StreamOutput:
        output = self._trace.next()
        if output is None:
            raise StopIteration
        return output

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> StreamOutput:
        output = await self._trace.next_async()
        if output is None:
            raise StopAsyncIteration
        return output

    def close(self) -> None:
        """Cancel the trace if it has not ended."""
        self._trace.close()

    async def aclose(self) -> None:
        """Do the same as `close`, awaited."""
        await in_thread(self._trace.close)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._trace.close(wait=False)
