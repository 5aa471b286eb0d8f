"""What both of vLLM's model runners do with blocks.

They find out which steps have blocks, and report with a step's output which blocks ended.

A step without a live mediator is the engine's own: compiled, with CUDA graphs, and its output is copied while the next step
runs. A step with a live mediator runs uncompiled, because compiled code and graphs do not call modules' hooks: eager, or in
segments of captured graphs (`executor.graphs.segments`). Only that step runs so.

A plain step costs a few forwarded calls, whatever its size: each override of a runner's method looks at `tracing` or
`interleaves` and goes on in vLLM's method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from executor.core.ended import Ended
from executor.core.request import Batch, InvokeRequest, Span
from executor.graphs.loops import TableLoops
from executor.interleave.interleaver import Interleaver
from executor.model.tree import LOGITS
from executor.plugin.ahead import Over, may_run_ahead
from executor.plugin.kernels import EagerKernels
from executor.plugin.scheduler import EndedModelRunnerOutput
from executor.sandbox.pool import Pool

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object

# Seconds that a step without rows waits for a sandboxed process.
IDLE_SECONDS = 0.005


class EndedAsyncOutput(AsyncModelRunnerOutput):
    """A step's output on its way from the device, with the requests whose blocks ended.

    Args:
        output: the runner's own output.
        ended, spent, processes: as in `EndedModelRunnerOutput`.
    """

    def __init__(
        self, output: AsyncModelRunnerOutput, ended: dict[str, Ended], spent: dict[str, float], processes: int | None
    ) -> None:
        self._output = output
        self._told = (ended, spent, processes)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy, on the thread that the executor uses for it."""
        return _with_ended(self._output.get_output(), *self._told)


class InterleavingRunner(_Base):
    """Mixed in before a model runner.

    Attributes:
        interleaver: set by the worker when the model has loaded.
        kernels: the kernels of steps that run uncompiled; set with the interleaver.
        interleaves: whether there are mediators, or ends of blocks to report; it is set where a step begins.
        tracing: whether the running step has a live mediator.
        riding: the requests of the running step whose loops run in the tables.
        repeats: whether the running step is like the last one: the same requests with one row each, and no live mediator.
        sampled: the dtype of the sampled token ids.
        sandboxes: the sandboxed processes, where this rank has them.
    """

    interleaver: Interleaver | None = None
    kernels: EagerKernels
    interleaves: bool = False
    tracing: bool = False
    riding: Sequence[str] = ()
    repeats: bool = False
    _batch_keys: frozenset[str] = frozenset()
    _rode: bool = False
    _begun: bool = False
    sampled: torch.dtype = torch.int32
    sandboxes: Pool | None = None

    @cached_property
    def _over(self) -> Over:
        return Over()

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self.sandboxes is not None and not scheduler_output.total_num_scheduled_tokens:
            return self._execute_idle(scheduler_output, *args, **kwargs)
        if self.interleaves or scheduler_output.scheduled_new_reqs:
            return self._execute(scheduler_output, *args, **kwargs)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _execute_idle(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Run a step without rows, and say of sandboxed processes that came meanwhile."""
        run = self._execute if self.interleaves else super().execute_model
        output = run(scheduler_output, *args, **kwargs)
        if output is None or self.sandboxes is None:
            return output
        processes = self.sandboxes.news(IDLE_SECONDS)
        return output if processes is None else _with_ended(output, {}, {}, processes)

    def _execute(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Run a step that may have a live mediator."""
        interleaver = self.interleaver
        if interleaver is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        if not self._begun:
            self._begin(interleaver, scheduler_output)
        self._begun = False
        if not self.tracing and not self.riding:
            return super().execute_model(scheduler_output, *args, **kwargs)
        try:
            if not self.tracing:
                output = self._execute_riding(interleaver, scheduler_output, *args, **kwargs)
                self._rode = True
                return output
            if interleaver.announces:
                scheduled = scheduler_output.num_scheduled_tokens
                interleaver.announce(key for request_id in scheduled for key in self._waits(request_id))
            with self.kernels.used():
                return self._execute_traced(interleaver, scheduler_output, *args, **kwargs)
        except BaseException:
            self.tracing, self.riding, self.repeats = False, (), False
            raise
        finally:
            interleaver.end_forward()

    def begins_traced(self, scheduler_output: SchedulerOutput) -> bool:
        """Return whether a step has a live mediator, before `execute_model` runs the step.

        The new requests of the step are admitted.
        """
        self._begun = False
        interleaver = self.interleaver
        if interleaver is None or not scheduler_output.total_num_scheduled_tokens:
            return False
        self._begin(interleaver, scheduler_output)
        self._begun = True
        return self.tracing

    def end_traced(self) -> None:
        """End the step on a pipeline stage that does not sample.

        The last stage reports which blocks ended in the step.
        """
        self.tracing = False
        if self.interleaver is not None:
            self.interleaver.take_ended()

    def _begin(self, interleaver: Interleaver, scheduler_output: SchedulerOutput) -> None:
        """Admit a step's new requests, and find out whether the step has a live mediator."""
        if self._rode:
            self._rode = False
            self.repeats = self._repeats(interleaver, scheduler_output)
            if self.repeats:
                return
        if scheduler_output.scheduled_new_reqs:
            self._admit(interleaver, scheduler_output)
        if interleaver.chunks.prompts:
            interleaver.chunks.begin(_bounds(scheduler_output))
        self.tracing, self.riding = False, ()
        self.interleaves = bool(interleaver.mediators or interleaver.deferred or interleaver.ended)
        if interleaver.mediators or interleaver.deferred:
            for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                interleaver.preempted(request_id)
            self._over.forget(scheduler_output.finished_req_ids)
            if interleaver.loops is not None and interleaver.loops:
                scheduled = scheduler_output.num_scheduled_tokens
                interleaver.bring_back_due(one for one in scheduled if one not in self._over)
                self.riding = interleaver.loops.present(scheduled)
                # A step repeats no step with a prompt: its rows are others.
                alike = scheduler_output.total_num_scheduled_tokens == len(scheduled)
                self._batch_keys = frozenset(scheduled) if alike else frozenset()
            self.tracing = interleaver.chunks.collecting or any(map(self._waits, scheduler_output.num_scheduled_tokens))
            if not self.tracing:
                interleaver.let_pass()

    def _repeats(self, interleaver: Interleaver, scheduler_output: SchedulerOutput) -> bool:
        """Return whether a step is like the last one, which ran loops in the tables alone."""
        loops, scheduled = interleaver.loops, scheduler_output.num_scheduled_tokens
        return (
            loops is not None
            and bool(self.riding)
            and loops.repeats
            and not interleaver.lives
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.finished_req_ids
            and not scheduler_output.scheduled_cached_reqs.resumed_req_ids
            and scheduler_output.total_num_scheduled_tokens == len(scheduled)
            and scheduled.keys() == self._batch_keys
        )

    def _waits(self, request_id: str) -> Iterable[str]:
        """Return the keys of the blocks that wait for the next step of a request."""
        interleaver = self.interleaver
        assert interleaver is not None
        if request_id in self._over or interleaver.chunks.partial(request_id):
            return ()
        return interleaver.waits(request_id)

    def _execute_traced(
        self, interleaver: Interleaver, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step that has a live mediator."""
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _execute_riding(
        self, interleaver: Interleaver, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step without a live mediator, in which requests have loops in the tables."""
        with self.kernels.used():
            return super().execute_model(scheduler_output, *args, **kwargs)

    @property
    def _loops(self) -> TableLoops | None:
        """The loops in the tables, in a step that some of them ride."""
        return self.interleaver.loops if self.riding and self.interleaver is not None else None

    @property
    def _apart(self) -> bool:
        """Whether the step's loops run after the pass alone, and no block waits for the step."""
        loops = self._loops
        return not self.tracing and loops is not None and not loops.in_pass(self.riding)

    def _visit(self, path: str, value: torch.Tensor, traced: bool) -> torch.Tensor:  # [requests, ...]
        """Show the blocks and the loops of a step its logits or samples; return what to go on with.

        Args:
            path: `LOGITS` or `SAMPLES`.
            value: for each request of the batch.
            traced: whether the step has a live mediator.
        """
        interleaver, loops = self.interleaver, self._loops
        if traced:
            assert interleaver is not None
            value = interleaver.visit_logits(value) if path == LOGITS else interleaver.visit_samples(value)
        return value if loops is None else loops.visit(path, value)

    def _look_for_ends(self, request_ids: Iterable[str], token_ids: torch.Tensor) -> None:  # [requests, 1]
        """Find out whether requests end with this step whose loops come back in the next."""
        loops = self.interleaver.loops if self.interleaver is not None else None
        if self.riding and loops is not None and not loops.repeats:
            self._over.sampled(request_ids, token_ids, loops.due)

    def _end_tables(self, loops: TableLoops) -> None:
        """Note that a step with loops in the tables was given to the device."""
        if self.repeats:
            loops.repeat()
            return
        assert self.interleaver is not None
        self.interleaver.end_tables()
        self.riding = loops.present(self.riding)

    def _admit(self, interleaver: Interleaver, scheduler_output: SchedulerOutput) -> None:
        traced = []
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            invoke = InvokeRequest.from_args(params.extra_args) if params is not None else None
            if invoke is None:
                continue
            interleaver.spent.came(invoke.flow.tenant)
            # The V2 runner gets an evicted request as a new request.
            if request.req_id in interleaver.mediators or request.req_id in interleaver.deferred:
                interleaver.preempted(request.req_id)
                continue
            prompt_tokens = len(request.prompt_token_ids or ())
            at_once = scheduler_output.num_scheduled_tokens[request.req_id] == prompt_tokens
            if not at_once or not interleaver.defer(request.req_id, invoke, prompt_tokens):
                rows = scheduler_output.num_scheduled_tokens[request.req_id]
                interleaver.admit(request.req_id, invoke, prompt_tokens, request.num_computed_tokens, rows)
                traced.append(request.req_id)
            if may_run_ahead(params, invoke, self.vllm_config):
                self._over.watch(request.req_id, params)
        if traced:
            interleaver.admitted(traced)
            if interleaver.loops is not None:
                self._start_early(interleaver, scheduler_output, traced)

    def _start_early(self, interleaver: Interleaver, scheduler_output: SchedulerOutput, traced: Sequence[str]) -> None:
        """Start new blocks that may be in the tables in the step that begins.

        The step has all rows of their prompts that are computed.
        """
        tokens = scheduler_output.num_scheduled_tokens
        rows = {
            one.req_id: len(one.prompt_token_ids or ()) - one.num_computed_tokens
            for one in scheduler_output.scheduled_new_reqs
        }
        with self.kernels.used():
            interleaver.start_early(one for one in traced if tokens[one] == rows[one])

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if output is None or (not self.interleaves and self.sandboxes is None):
            return output
        ended: dict[str, Ended] = {}
        spent: dict[str, float] = {}
        interleaver = self.interleaver
        if self.interleaves and interleaver is not None:
            spent = interleaver.spent.take()
            if interleaver.ended or spent:
                ended = interleaver.take_ended()
                self._over.ended(ended)
        processes = self.sandboxes.news() if self.sandboxes is not None else None
        if not ended and not spent and processes is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return EndedAsyncOutput(output, ended, spent, processes)
        return _with_ended(output, ended, spent, processes)


def batch_of(
    waits: Callable[[str], Iterable[str]],
    partial: Callable[[str], bool],
    rows: Iterable[tuple[str, int, int]],
    tokens: int,
    padded_tokens: int,
    requests: int,
) -> Batch:
    """Return where the traced requests' rows are in a step.

    Args:
        waits: returns the keys of the blocks that wait for the step of a request.
        partial: returns whether the step has a chunk of a request's prompt that is not the last.
        rows: each request's id, its first row, and the row after its last, in the order of the batch.
        tokens: the number of rows of the batch.
        padded_tokens: the number of rows of the tensors, padding included.
        requests: the number of requests in the batch.
    """
    of_all = {request_id: Span(index, start, stop) for index, (request_id, start, stop) in enumerate(rows)}
    spans = {key: span for request_id, span in of_all.items() for key in waits(request_id)}
    chunks = {request_id: span for request_id, span in of_all.items() if partial(request_id)}
    return Batch(spans, tokens, padded_tokens, requests, chunks)


def _bounds(scheduler_output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """Return how many rows of each request were computed before a step, and are in the step."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
    rows = scheduler_output.num_scheduled_tokens
    return {request_id: (before, rows[request_id]) for request_id, before in computed.items() if request_id in rows}


def _with_ended(
    output: ModelRunnerOutput, ended: dict[str, Ended], spent: dict[str, float], processes: int | None
) -> EndedModelRunnerOutput:
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(ModelRunnerOutput)}
    return EndedModelRunnerOutput(**fields, ended=ended, spent=spent, processes=processes)
