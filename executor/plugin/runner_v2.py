"""vLLM's V2 model runner, the default on GPUs, with blocks interleaved.

The runner's `execute_model` is one method from the choice of a graph to the output, and calls no method of its own in between
but `prepare_inputs` and `prepare_attn`. So four attributes of the runner have stand-ins in a step with a live mediator, each for
one reason:

- `cudagraph_manager`: the runner asks it whether the step replays a graph, and a full graph never calls the model;
- `model`: the interleaver's step begins just before the model is called, when the batch is laid out and the forward context is
  set. A hook that is registered there would miss the model's own input;
- `model_state`: it makes the attention's metadata of the step, which the blocks' forward context needs if the step runs in
  segments of graphs;
- `sampler`: the runner's `sample` computes the logits and gives them to it at once.

The stand-ins are gone when the forward, or the sampling, is over.

The runner's sampler works on the GPU and keeps what a request needs in slots, so the batch may have another order in every
step. Therefore rows are taken from the batch that was prepared for the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from executor.core.request import Batch
from executor.interleave.interleaver import Interleaver
from executor.model.tree import LOGITS, SAMPLES
from executor.plugin.graphs import TableGraphs
from executor.plugin.runner import InterleavingRunner, batch_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch


class _NoGraphs:
    """Stands in for the runner's graph manager in a step that must run eager."""

    def dispatch(
        self, num_reqs: int, num_tokens: int, *_: Any, num_active_loras: int = 0, **__: Any
    ) -> BatchExecutionDescriptor:
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs, num_active_loras=num_active_loras
        )


class _Begun:
    """Stands in for the runner's model in a step with a live mediator.

    Its call begins the step.

    Args:
        model: the model, to which every other use goes.
        begin: called before the model runs; returns a context for it.
        ran: called when the model has run.
    """

    def __init__(
        self, model: torch.nn.Module, begin: Callable[[], AbstractContextManager[None]], ran: Callable[[], None]
    ) -> None:
        self._model = model
        self._begin = begin
        self._ran = ran

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._begin():
            output = self._model(*args, **kwargs)
        self._ran()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Noted:
    """Stands in for the runner's model state in a step with a live mediator.

    It notes the attention's metadata.

    Args:
        state: the model state, to which every other use goes.
        note: called with the metadata.
    """

    def __init__(self, state: Any, note: Callable[[Any], None]) -> None:
        self._state = state
        self._note = note

    def prepare_attn(self, *args: Any, **kwargs: Any) -> Any:
        metadata = self._state.prepare_attn(*args, **kwargs)
        self._note(metadata)
        return metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class GPURunnerV2(InterleavingRunner, GPUModelRunner):
    """The V2 runner.

    Attributes:
        prepared, laid_out: the batch of the running step, and where it is in the cache, while the step needs them.
        metadata: the attention's metadata of the running step, likewise.
        graphs: the graphs of steps with blocks; None: they run eager.
    """

    sampled = torch.int64
    cudagraph_manager: Any
    model: Any
    sampler: Any
    prepared: Any = None
    laid_out: Any = None
    metadata: Any = None
    model_state: Any
    graphs: TableGraphs | None = None

    def _execute_traced(
        self, interleaver: Interleaver, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        def begin() -> AbstractContextManager[None]:
            get_forward_context().skip_compiled = True
            interleaver.begin_step(self._batch())
            return self._taps()

        graphs = self.graphs if self.graphs is not None else _NoGraphs()
        state = self.model_state
        self.model_state = _Noted(state, lambda metadata: setattr(self, "metadata", metadata))
        try:
            with self._instead(graphs, _Begun(self.model, begin, interleaver.check_cache)):
                return super()._execute_traced(interleaver, scheduler_output, *args, **kwargs)
        finally:
            self.model_state = state

    def _execute_riding(
        self, interleaver: Interleaver, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if self._apart:  # the engine's own step, in its own graphs
            try:
                output = GPUModelRunner.execute_model(self, scheduler_output, *args, **kwargs)
            finally:
                self.prepared = self.laid_out = None
            assert interleaver.loops is not None
            interleaver.loops.ran_apart()
            self._end_tables(interleaver.loops)
            return output

        @contextmanager
        def begin() -> Iterator[None]:  # of a step that runs in no graph
            get_forward_context().skip_compiled = True
            with self.kernels.used(), self._taps():
                yield

        graphs = self.graphs if self.graphs is not None else _NoGraphs()
        with self._instead(graphs, _Begun(self.model, begin, lambda: None)):
            return GPUModelRunner.execute_model(self, scheduler_output, *args, **kwargs)

    @contextmanager
    def _instead(self, graphs: Any, model: Any) -> Iterator[None]:
        """Return a context in which the runner has another graph manager and another model."""
        before = self.cudagraph_manager, self.model
        self.cudagraph_manager, self.model = graphs, model
        try:
            yield
            if self.riding and self.interleaver is not None and self.interleaver.loops is not None:
                self._end_tables(self.interleaver.loops)
        finally:
            self.cudagraph_manager, self.model = before
            self.prepared = self.laid_out = self.metadata = None

    def _taps(self) -> AbstractContextManager[None]:
        """Return a context in which the model runs the taps of the step's loops in the tables."""
        loops = self.interleaver.loops if self.interleaver is not None else None
        return loops.running(self.riding) if loops is not None and self.riding else nullcontext()

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        prepared = super().prepare_inputs(*args, **kwargs)
        if (self.tracing or self.riding) and not self.repeats:
            self.prepared = prepared
            if self.riding and self.interleaver is not None and self.interleaver.loops is not None:
                rows = zip(prepared.req_ids, prepared.num_scheduled_tokens.tolist(), strict=False)
                self.interleaver.loops.begin_step(rows, self.riding, prepared.num_tokens_after_padding)
        return prepared

    def prepare_attn(self, *args: Any, **kwargs: Any) -> Any:
        laid_out = super().prepare_attn(*args, **kwargs)
        if (self.tracing or self.riding) and not self.repeats:
            self.laid_out = laid_out
        return laid_out

    def _batch(self) -> Batch:
        """Return where the traced requests' rows are in the batch that was prepared for this step."""
        prepared = self.prepared
        assert prepared is not None
        bounds = prepared.query_start_loc_np[: prepared.num_reqs + 1].tolist()
        rows = zip(prepared.req_ids, bounds, bounds[1:], strict=False)
        assert self.interleaver is not None
        partial = self.interleaver.chunks.partial
        return batch_of(self._waits, partial, rows, bounds[-1], prepared.num_tokens_after_padding, prepared.num_reqs)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> Any:  # [requests, hidden]
        if not self.tracing and not self.riding:
            return super().sample(hidden_states, input_batch, grammar_output)
        traced, loops = self.tracing, self._loops
        if not traced and (loops is None or not loops.outside):
            output, sampled, rejected = super().sample(hidden_states, input_batch, grammar_output)
            self._look_for_ends(input_batch.req_ids, output.sampled_token_ids)
            return output, sampled, rejected
        interleaver = self.interleaver
        assert interleaver is not None
        self.tracing = False
        # The method computes the logits and restricts them by grammars. So it gets a sampler that first shows them to the
        # blocks.
        sampler = self.sampler
        self.sampler = lambda logits, batch: sampler(self._visit(LOGITS, logits, traced), batch)
        try:
            output, sampled, rejected = super().sample(hidden_states, input_batch, grammar_output)
        finally:
            self.sampler = sampler
        output.sampled_token_ids = self._visit(SAMPLES, output.sampled_token_ids, traced)
        if traced:
            chunks = {one for one in input_batch.req_ids if interleaver.chunks.partial(one)}
            interleaver.end_step()
            ids = input_batch.req_ids
            self._over.sampled(ids, output.sampled_token_ids, lambda one: one not in chunks and interleaver.waits(one))
        self._look_for_ends(input_batch.req_ids, output.sampled_token_ids)
        return output, sampled, rejected
