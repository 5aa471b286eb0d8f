"""vLLM's V1 model runner with blocks interleaved, through methods that it calls on itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from executor.core.request import Batch
from executor.interleave.interleaver import Interleaver
from executor.model.tree import LOGITS, SAMPLES
from executor.plugin.guesses import Guesses
from executor.plugin.runner import InterleavingRunner, batch_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class InterleavingRunnerV1(InterleavingRunner):
    """Mixed in before a V1 model runner."""

    def _execute_traced(
        self, interleaver: Interleaver, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        self._scheduled = scheduler_output.num_scheduled_tokens
        return super()._execute_traced(interleaver, scheduler_output, *args, **kwargs)

    def _execute_riding(
        self, interleaver: Interleaver, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        self._scheduled = scheduler_output.num_scheduled_tokens
        if self._apart:
            return super(InterleavingRunner, self).execute_model(scheduler_output, *args, **kwargs)
        return super()._execute_riding(interleaver, scheduler_output, *args, **kwargs)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tracing and not self.riding:
            return super()._model_forward(*args, **kwargs)
        interleaver = self.interleaver
        assert interleaver is not None
        apart = self._apart
        get_forward_context().skip_compiled = not apart
        padded = next(
            tensor
            for tensor in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("positions"))
            if isinstance(tensor, torch.Tensor)
        ).shape[0]
        if self.tracing:
            interleaver.begin_step(self._batch(padded))
        try:
            with self._tables_of(interleaver, padded, apart):
                output = super()._model_forward(*args, **kwargs)
            if self.tracing:
                interleaver.check_cache()
            return output
        finally:
            interleaver.end_forward()

    @contextmanager
    def _tables_of(self, interleaver: Interleaver, padded: int, apart: bool) -> Iterator[None]:
        """Return a context in which the model runs the taps of the step's loops in the tables.

        Args:
            interleaver: with the loops.
            padded: the rows of the step's tensors.
            apart: whether no loop of the step runs in the pass.
        """
        loops = interleaver.loops
        if not self.riding or loops is None:
            yield
            return
        if not self.repeats:
            batch = [(one, self._scheduled[one]) for one in self.input_batch.req_ids]
            loops.begin_step(batch, self.riding, padded)
        with nullcontext() if apart else loops.running(self.riding):
            yield
        if apart:
            loops.ran_apart()
        self._end_tables(loops)

    def _batch(self, padded: int) -> Batch:
        """Return where the traced requests' rows are, in the updated order of the input batch."""
        request_ids = self.input_batch.req_ids
        bounds = list(accumulate((self._scheduled[request_id] for request_id in request_ids), initial=0))
        rows = ((request_id, *bound) for request_id, bound in zip(request_ids, pairwise(bounds), strict=True))
        assert self.interleaver is not None
        return batch_of(self._waits, self.interleaver.chunks.partial, rows, bounds[-1], padded, len(request_ids))

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:  # [requests, vocab]
        if not self.tracing and not self.riding:
            return super()._sample(logits, spec_decode_metadata)
        traced, self.tracing = self.tracing, False
        guesses = Guesses(spec_decode_metadata)
        if logits is not None:
            logits = guesses.shown(logits, lambda rows: self._visit(LOGITS, rows, traced))
        output = super()._sample(logits, spec_decode_metadata)
        output.sampled_token_ids = guesses.sampled(
            output.sampled_token_ids, lambda tokens: self._visit(SAMPLES, tokens, traced)
        )
        if traced:
            assert self.interleaver is not None
            ids, waits = self.input_batch.req_ids, self.interleaver.waits
            chunks = {one for one in ids if self.interleaver.chunks.partial(one)}
            self.interleaver.end_step()
            self._over.sampled(ids, output.sampled_token_ids, lambda one: one not in chunks and waits(one))
        self._look_for_ends(self.input_batch.req_ids, output.sampled_token_ids)
        return output


class GPURunnerV1(InterleavingRunnerV1, GPUModelRunner):
    """The V1 runner on GPUs, where a step may replay CUDA graphs."""

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self.tracing or self.riding:
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)
