"""The `with` blocks of a trace: a block with one prompt, or an outer block with invokes.

A tracer captures the block instead of running it. At the end of the block, the tracer sends the trace and reads its events.
Then it assigns the saved values to the names of the notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from interpose import capture
from interpose.contract.accounting import Accounting
from interpose.contract.errors import InvalidArgument, from_failure
from interpose.contract.idioms import OF_TRACERS
from interpose.contract.result import Result
from interpose.contract.sampling import expected_tokens, sequences
from interpose.contract.saving import call_save, saving_with
from interpose.contract.shown import OF_BLOCKS, shown
from interpose.program.barrier import Barrier
from interpose.program.builder import TraceBuilder
from interpose.program.check import OUTER, frame_at, refused
from interpose.program.options import TraceOptions
from interpose.program.shared import OuterSaves
from interpose.results.delivery import Delivery
from interpose.results.job import Job
from interpose.results.outcome import Delivered, Outcome, follow, follow_async, new_outcome, values_of
from interpose.results.stream import OutputStream, StreamedTrace
from interpose.rpc.call import Running
from interpose.rpc.session import Session
from interpose.rpc.threads import in_thread, warn_if_on_a_loop
from interpose.tracing.captured import CapturedBlock
from interpose.tracing.connection import TracedModel
from interpose.tracing.in_block import IN_BLOCK, InBlock
from interpose.tracing.invoke import Invoker
from interpose.v1.trace_pb2 import Prompt, Trace, Usage

_INVOKE = "write `with tracer.invoke(prompt):` and a block"


class Tracer(InBlock, CapturedBlock):
    """One trace; made by `model.trace`.

    The methods listed here are for the notebook: in the outer block of `with model.trace() as tracer:`, or after the block.
    A block with a prompt runs in the engine. There the tracer has `tracer.iter[a:b]` and `tracer.all()` (steps of the
    generation), `tracer.cache(…)` (record many modules), `tracer.stop()` (end the request), `tracer.log(…)`, and
    `tracer.result`, which waits for the end of the request.

    Args:
        model: the served model.
        prompt: the prompt of a trace with one prompt; None for an outer block.
        sampling: the engine's sampling parameters by their own names.
        options: the options of `model.trace`.

    Attributes:
        id: the trace's id; "" until the block has been captured.
    """

    def __init__(
        self,
        model: TracedModel,
        prompt: Prompt | None,
        sampling: Mapping[str, object],
        options: TraceOptions = TraceOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self._options = options
        self._streams = options.stream
        self._job: Job | None = None
        self._streamed: StreamedTrace | None = None
        self._model = model
        self._prompt = prompt
        self._sampling = sampling
        self._builder: TraceBuilder | None = None  # while the block is gathered and the trace runs
        self._blocks: list[tuple[capture.Block, capture.Scope]] = []  # of each invoke
        self._groups: list[list[int]] = []  # the invokes of each prompt, one for each of its sequences
        self._barriers = 0  # made so far
        self.id = ""
        self._running = False
        self._outcome: Outcome | None = None

    @property
    def job(self) -> Any:
        """The trace as a `Job`, after the block of a trace with `blocking=False`.

        A client for asyncio gives an `AsyncJob`, whose methods are awaited.
        """
        if self._job is None:
            when = (
                "has not been sent yet"
                if not self._options.blocking
                else "is no job: model.trace(…, blocking=False) is"
            )
            raise InvalidArgument(f"the trace {when}")
        return self._model.job_handle(self._job)

    @property
    def usage(self) -> Usage:
        """The usage of the trace (tokens, bytes and seconds), after the block."""
        return self._finished().usage

    @property
    def result(self) -> Result | Any:  # no type checker knows whether there is one sequence
        """The engine's output for the prompt, after the block; a list of the sequences with `n`."""
        if self._prompt is None:
            raise InvalidArgument(
                "a trace with several prompts has a result for each: `with tracer.invoke(…) as one`, one.result"
            )
        return self._result(0)

    @property
    def accounting(self) -> Accounting:
        """The locations the block read and changed, and the precision, after the block."""
        if self._prompt is None:
            raise InvalidArgument(
                "a trace with several prompts has an account for each: `with tracer.invoke(…) as one`, one.accounting"
            )
        return self._finished().accounting.get(0, Accounting())

    def invoke(self, prompt: Any = None, **sampling: Any) -> Invoker:
        """Add a prompt with a block of its own: `with tracer.invoke(prompt):`.

        Without a prompt, the block reads and changes the rows of all prompts of the trace. At each location the rows lie one
        prompt after the other, in the order of the invokes: [tokens of all prompts, …], and [prompts, vocab] for the logits.
        All invokes of the trace then start in the same step, and take their turns at a location in the order of the source.
        In each step, the rows are the rows of the prompts that still generate. The block runs until the last prompt ends.
        It is no request and has no sampling parameters. `tracer.result` in it is the list of all results.

        Args:
            prompt: as for `model.trace`.
            sampling: sampling parameters of this prompt alone, and its `lora`. The parameters of the trace are the defaults.
                `lora=None` is the model without an adapter.
        """
        if self._prompt is not None:
            raise InvalidArgument(
                "this trace has its prompt already; write `with model.trace() as tracer:` and give the prompts to "
                "tracer.invoke(prompt)"
            )
        if not self._running:
            raise InvalidArgument("tracer.invoke(prompt) belongs inside the block of `with model.trace() as tracer:`")
        if prompt is None:
            if sampling:
                raise InvalidArgument(
                    "tracer.invoke() without a prompt generates nothing, so it takes no sampling parameters; give them to "
                    "model.trace(…) or to the invokes with a prompt"
                )
            if self._streams:
                raise InvalidArgument(
                    "tracer.invoke() without a prompt and stream=True exclude each other: its block is no request whose "
                    "outputs could bring what it saves; trace without stream=True"
                )
            return Invoker(self, None, {}).watched(_INVOKE)
        own = {"lora": self._options.lora} | self._model.check_sampling(sampling)
        return Invoker(self, self._model.encode_prompt(prompt), own).watched(_INVOKE)

    def barrier(self, n: int) -> Barrier:
        """Make a barrier for n invokes: `barrier = tracer.barrier(2)`, then `barrier()` in blocks.

        A block waits at `barrier()` until n blocks have come. Then all n go on in the same step, from the location of the last
        block. So the code above the barrier has run in every block before the code below it runs in any block. The blocks read
        the names that the other blocks assigned. So a block can put a value of another prompt into its own prompt at the same
        module. The invokes that use a barrier start in the same step. A barrier may be used several times.

        Args:
            n: the number of blocks that wait for each other.

        Raises:
            InvalidArgument: n is not a number of invokes, or this is not the outer block of a trace.
        """
        if self._prompt is not None or not self._running:
            raise InvalidArgument(OUTER["barrier"])
        most = self._model.limits.max_invokes
        if isinstance(n, bool) or not isinstance(n, int) or n < 1 or (most and n > most):
            up_to = f" from 1 to {most}" if most else ""
            raise InvalidArgument(f"tracer.barrier(n) takes the number of invokes that wait{up_to}, not {n!r}")
        self._barriers += 1
        return Barrier(self, self._barriers - 1, n)

    def stream(self) -> OutputStream:
        """Return the outputs as they come, after the block of a trace with `stream=True`.

        Write `for out in tracer.stream():` or `async for out in tracer.stream():`. An output has `out.text`, `out.token_ids`,
        `out.finished` and `out.saves`. A loop that ends early cancels the trace. At the end of the trace, the saved names are
        assigned. A stream has one reader at a time.

        Raises:
            InvalidArgument: the trace does not stream, or has not been sent.
        """
        if self._streamed is None:
            when = "after its block" if self._streams else "of a trace that streams: write model.trace(…, stream=True)"
            raise InvalidArgument(f"tracer.stream() gives the outputs {when}")
        return OutputStream(self._streamed)

    def log(self, *values: object) -> None:
        """Print the values; text of an invoke's block arrives in the notebook while it runs."""
        print(*values)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {OF_TRACERS[name]}" if name in OF_TRACERS else ""
            raise AttributeError(f"a tracer has no attribute {name!r}{hint}", name=name, obj=self)

    def _outside(self, name: str) -> NoReturn:
        raise InvalidArgument(f"tracer.{name} belongs inside a block with a prompt, which runs in the model")

    def __dir__(self) -> list[str]:
        hidden = set(OF_BLOCKS)
        hidden |= {"invoke", "barrier"} if self._prompt is not None else {*IN_BLOCK, "accounting"} - {"log"}
        hidden |= set() if self._streams else {"stream"}
        hidden |= set() if not self._options.blocking else {"job"}
        return shown(self, hidden)

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Send the captured block; an outer block runs here first and gives its invokes."""
        if self._model.awaited:
            warn_if_on_a_loop("`with model.trace(…)`", "`async with model.trace(…)`")
        with self._prepared(block, scope) as builder:
            self._run(builder, block, scope)

    async def run_block_async(self, block: capture.Block, scope: capture.Scope) -> None:
        """Do the same as `run_block`, for an `async with`."""
        with self._prepared(block, scope) as builder:
            await self._run_async(builder, block, scope)

    @contextmanager
    def _prepared(self, block: capture.Block, scope: capture.Scope) -> Iterator[TraceBuilder]:
        """Gather the trace's invokes, and hold their builder while the trace runs."""
        model = self._model
        defaults = {name: value for name, value in self._sampling.items() if name != "n"}
        names = model.session_names
        variables = names.variables if names is not None else None
        builder = TraceBuilder(
            model.name, model.tree, model.limits, self._is_own, defaults, model.session.id, variables, model.libraries
        )
        self._builder, self._blocks, self._outcome, self._streamed, self._job = builder, [], None, None, None
        self._groups = []
        self.id = builder.id
        try:
            if self._prompt is not None:
                self._add(block, scope, self._prompt, {})
            else:
                self._gather(builder, block, scope)
            if not builder.samplings():
                raise InvalidArgument(
                    "the trace has no prompt: write model.trace(prompt), or `with tracer.invoke(prompt):` inside the block",
                    frames=[frame_at(block.body[0], block.filename)],
                )
            yield builder
        finally:
            # The scopes hold frames that refer to this tracer. The builder holds all values that were sent.
            self._builder, self._blocks = None, []

    def _run(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> None:
        """Send the trace, wait for its end, and assign the saved values.

        Raises:
            InterposeError: the first failure of the trace, after the values are assigned.
        """
        trace, delivery = self._built(builder, block, scope)
        session = self._model.session
        if not self._options.blocking:
            self._job = self._as_job(session.start(trace, builder.blobs), session, delivery)
            return
        if self._streams:
            self._streamed = self._reader(session.begin(trace, builder.blobs), session, trace, delivery)
            return
        tokens = expected_tokens(self._sampling, builder.samplings())
        outcome = follow(session, trace, builder.blobs, self._model.progress, tokens)
        self._deliver(outcome, self._values(outcome, session), delivery)

    async def _run_async(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> None:
        """Do the same as `_run`, on an event loop."""
        trace, delivery = self._built(builder, block, scope)
        session = self._model.session
        if not self._options.blocking:
            self._job = self._as_job(await in_thread(session.start, trace, builder.blobs), session, delivery)
            return
        running = await in_thread(session.begin, trace, builder.blobs, dropped=lambda running: running.close(False))
        if self._streams:
            self._streamed = self._reader(running, session, trace, delivery)
            return
        tokens = expected_tokens(self._sampling, builder.samplings())
        outcome = await follow_async(running, trace, self._model.progress, tokens)
        self._deliver(outcome, await in_thread(lambda: list(self._values(outcome, session))), delivery)

    def _built(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> tuple[Trace, Delivery]:
        """Return the trace as a message, and the delivery of its values."""
        trace = builder.build()
        trace.stream = self._streams
        trace.scan = self._options.scan
        trace.remote = self._options.fetch is False
        trace.stacks = True
        trace.edits.extend(self._options.edits)
        trace.lora = self._options.lora if self._prompt is not None else ""  # else each prompt names its own
        captured, names = builder.captured(), self._model.session_names
        return trace, Delivery(block, scope, self._blocks, captured, names, self._groups, _first_names(trace))

    def _values(self, outcome: Outcome, session: Session) -> Iterator[Delivered]:
        return values_of(outcome, session, lambda: self._model.tree, fetch=self._fetches(session))

    def _fetches(self, session: Session) -> bool:
        """Whether saved tensors are fetched with the result."""
        return not session.kept if self._options.fetch is None else self._options.fetch

    def _as_job(self, session_id: str, session: Session, delivery: Delivery) -> Job:
        """Return the job that a trace has become."""
        assigner = _JobAssigner(lambda outcome: list(self._values(outcome, session)), delivery)
        return Job(session, session_id, self.id, self._model.tree_of, assigner, self._fetches(session))

    def _deliver(self, outcome: Outcome, values: Iterable[Delivered], delivery: Delivery) -> None:
        self._outcome = outcome
        values = list(values)
        delivery.deliver(values, variables=outcome.variables)
        if not outcome.failures and not self._streams and outcome.explanation is None:
            delivery.warn_of_unsaved({name for _, names, _ in values for name in names})
        if outcome.failures:
            failure = outcome.failures[0]
            numbers = (number for number, group in enumerate(self._groups) if failure.invoke in group)
            failure.invoke = next(numbers, failure.invoke)  # the user counts prompts, not their sequences
            raise from_failure(failure)

    def _reader(self, running: Running, session: Session, trace: Trace, delivery: Delivery) -> StreamedTrace:
        """Return the reader of a trace's outputs; after the last output it delivers the values."""
        outcome = new_outcome(trace)
        return StreamedTrace(
            running,
            session,
            outcome,
            delivery.captured,
            self._model.tree,
            self._groups,
            lambda values: self._deliver(outcome, values, delivery),
        )

    def _gather(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> None:
        """Run the outer block; its saved names become the trace's shared variables."""
        saves = OuterSaves()
        self._barriers = 0
        self._running = True
        try:
            with saving_with(saves.save):
                capture.run_outer(block, scope, lambda value: call_save(value, saves.save))
        except capture.CaptureError as error:
            raise refused(error) from None
        finally:
            self._running = False
        for name, value in saves.shared(block, scope).items():
            builder.share(name, value)

    def _add(
        self, block: capture.Block, scope: capture.Scope, prompt: Prompt | None, sampling: Mapping[str, object]
    ) -> int:
        assert self._builder is not None
        each = sequences(self._sampling, sampling) if prompt is not None else [{}]
        if len(each) > 1 and not self._options.blocking:
            raise InvalidArgument(
                f"a background job takes one sequence of each prompt, not n={len(each)}: give each a "
                "`with tracer.invoke(prompt):` of its own"
            )
        number = len(self._groups)
        group = [self._builder.add_invoke(block, scope, prompt, own, number if len(each) > 1 else None) for own in each]
        self._groups.append(group)
        self._blocks += [(block, scope)] * len(group)
        return number

    def _result(self, number: int) -> Result | list[Result]:
        """Return the engine's output for a prompt; with several sequences, a list of them."""
        outcome = self._finished()
        results = [outcome.results[invoke] for invoke in self._groups[number]]
        return results if len(results) > 1 else results[0]

    def _is_own(self, obj: object) -> bool:
        return obj is self or (isinstance(obj, Invoker) and obj.tracer is self)

    def _finished(self) -> Outcome:
        outcome = self._outcome if self._job is None else self._job.outcome
        if outcome is None:
            when = "when tracer.stream() has been read to its end" if self._streams else "after the block"
            when = when if self._job is None else "after tracer.job.wait()"
            raise InvalidArgument(f"the trace has not run yet: its results are there {when}")
        return outcome


@dataclass(frozen=True)
class _JobAssigner:
    """Delivers the saved values of a job when the user waits for the job."""

    values: Callable[[Outcome], list[Delivered]]
    delivery: Delivery

    def deliver(self, outcome: Outcome, values: list[Delivered]) -> None:
        self.delivery.deliver(values, detached=True, variables=outcome.variables)


def _first_names(trace: Trace) -> dict[int, str]:
    """Return the first shared name for each entry of the trace's scope that has a name."""
    shared = [binding for binding in trace.shared if binding.value.WhichOneof("kind") == "ref"]
    return {binding.value.ref: binding.name for binding in reversed(shared)}
