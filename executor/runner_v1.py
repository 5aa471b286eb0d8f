"""vLLM's V1 model runner with blocks interleaved.

Everything goes through methods that vLLM's runner calls on itself. A step without a live mediator passes through each of
them with one test of an attribute and is the engine's own: compiled and with CUDA graphs, as stock. A step with one runs
eager and uncompiled, that step alone, because compiled code and graphs do not call modules' hooks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from executor.interleaver import Interleaver
from executor.scheduler import EndedModelRunnerOutput
from executor.work import Batch, Span, Work

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object


class InterleavingRunner(_Base):
    """Mixed in before a V1 model runner.

    Attributes:
        interleaver: set by the worker when the model has loaded.
        tracing: whether the step that is running has a live mediator.
    """

    interleaver: Interleaver | None = None
    tracing: bool = False

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        interleaver = self.interleaver
        if interleaver is None:
            return super().execute_model(scheduler_output, intermediate_tensors)
        if scheduler_output.scheduled_new_reqs:
            self._admit(interleaver, scheduler_output)
        if not interleaver.mediators:
            return super().execute_model(scheduler_output, intermediate_tensors)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            interleaver.preempted(request_id)
        self.tracing = any(interleaver.waits(request_id) for request_id in scheduler_output.num_scheduled_tokens)
        if not self.tracing:
            return super().execute_model(scheduler_output, intermediate_tensors)
        self._scheduled = scheduler_output.num_scheduled_tokens
        try:
            return super().execute_model(scheduler_output, intermediate_tensors)
        except BaseException:
            self.tracing = False
            interleaver.end_forward()
            raise

    @staticmethod
    def _admit(interleaver: Interleaver, scheduler_output: SchedulerOutput) -> None:
        traced = []
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            work = Work.from_args(params.extra_args) if params is not None else None
            if work is not None:
                prompt_tokens = len(request.prompt_token_ids or ())
                interleaver.admit(request.req_id, work, prompt_tokens, request.num_computed_tokens)
                traced.append(request.req_id)
        if traced:
            interleaver.admitted(traced)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self.tracing:
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tracing:
            return super()._model_forward(*args, **kwargs)
        interleaver = self.interleaver
        assert interleaver is not None
        get_forward_context().skip_compiled = True
        interleaver.begin_step(self._batch(interleaver, kwargs))
        try:
            return super()._model_forward(*args, **kwargs)
        finally:
            interleaver.end_forward()

    def _batch(self, interleaver: Interleaver, kwargs: dict[str, Any]) -> Batch:
        """Return where the traced requests' rows are, in the order that the input batch has after its updates."""
        spans = {}
        start = 0
        for index, request_id in enumerate(self.input_batch.req_ids):
            stop = start + self._scheduled[request_id]
            for key in interleaver.waits(request_id):
                spans[key] = Span(index, start, stop)
            start = stop
        first = next(
            tensor
            for tensor in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("positions"))
            if isinstance(tensor, torch.Tensor)
        )
        return Batch(spans, start, first.shape[0], len(self.input_batch.req_ids))

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if not self.tracing:
            return super()._sample(logits, spec_decode_metadata)
        interleaver = self.interleaver
        assert interleaver is not None
        self.tracing = False
        if logits is not None:
            logits = interleaver.visit_logits(logits)
        output = super()._sample(logits, spec_decode_metadata)
        output.sampled_token_ids = interleaver.visit_samples(output.sampled_token_ids)
        interleaver.end_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        interleaver = self.interleaver
        if interleaver is None or not interleaver.ended:
            return output
        ended = interleaver.take_ended()
        if isinstance(output, ModelRunnerOutput):
            return EndedModelRunnerOutput(**_fields(output), ended=ended)
        raise RuntimeError("traced requests need synchronous scheduling: set async_scheduling to false")


def _fields(output: ModelRunnerOutput) -> dict[str, Any]:
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(ModelRunnerOutput)}


class CPURunnerV1(InterleavingRunner, CPUModelRunner):
    """The V1 runner on CPUs."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep the random generators of cut prompts out of the sampling that is thrown away.

        vLLM samples after every chunk of a prompt, drops what was sampled before the last, and sets a request's own
        generator back by an offset; generators on CPUs have none, so a seeded request would end the engine.
        """
        generators = self.input_batch.generators
        if not generators:
            return super().sample_tokens(grammar_output)
        dropped = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        aside = {index: generators.pop(index) for index in dropped if index in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(aside)


class GPURunnerV1(InterleavingRunner, GPUModelRunner):
    """The V1 runner on GPUs."""
