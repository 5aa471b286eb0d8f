"""Runs one request of the OpenAI-compatible endpoint on the engine.

It may have several sequences, or a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm import SamplingParams

from executor.core.ended import Ended, Ending
from executor.core.request import InvokeRequest, shared_salt
from executor.engine.failures import TraceFailed, failed_event
from executor.engine.long_prompts import check_long_prompts
from executor.engine.outputs import Outputs
from executor.engine.rpc import Endings
from executor.engine.sampling import check_types
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import kind_of


class OpenAIRun:
    """The requests to vLLM that one request of the endpoint becomes.

    Args:
        llm: vLLM's AsyncLLM.
        endings: ends blocks in the workers.
        trace: the trace that carries the request.
        tenant: whose prefix cache the request shares.
        invoke: what the workers are told of the block; None: the request has none.
        send: takes each serialized event.
        reported: picks the answer of the rank that reports.

    Attributes:
        result: the tokens of all prompts, and all generated tokens.
        failed: whether the block failed.
    """

    def __init__(
        self,
        llm: Any,
        endings: Endings,
        trace: pb.Trace,
        tenant: str,
        invoke: InvokeRequest | None,
        send: Callable[[bytes], None],
        reported: Callable[[list[Any]], Ending],
    ) -> None:
        self._llm = llm
        self._endings = endings
        self._trace = trace
        self._tenant = tenant
        self._invoke = invoke
        self._send = send
        self._reported = reported
        self._begun = False
        self.result = Result()
        self.failed = False

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Run one request; yield vLLM's outputs.

        Args:
            prompt: the rendered prompt, as vLLM's renderer makes it.
            params: the sampling parameters. vLLM judges them when the request comes.
            request_id: chosen by vLLM's serving class.
            options: further arguments of AsyncLLM.generate.

        Raises:
            TraceFailed: the block failed, a traced request has several sequences, or its prompt is too long for its block.
            ValueError: a parameter has a type that the engine's process could not read.
        """
        check_types(params)
        requests = self._plain if self._invoke is None else self._traced
        async with contextlib.aclosing(requests(dict(prompt), params, request_id, options)) as outputs:
            async for output in outputs:
                yield output

    def last(self) -> bytes:
        """Return the last output of a request without a block, as a serialized event.

        It counts the tokens.
        """
        result = self.result
        output = pb.Output(
            prompt_token_ids=result.prompt_token_ids, token_ids=result.token_ids, finished=True, finish_reason="stop"
        )
        return pb.Event(output=output).SerializeToString()

    async def _plain(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        prompt["cache_salt"] = shared_salt(self._tenant, prompt.get("cache_salt") or "")
        first = True
        async for output in self._llm.generate(prompt, params, request_id, **options):
            if first:
                self.result.prompt_token_ids.extend(output.prompt_token_ids or ())
                first = False
            for completion in output.outputs:
                self.result.token_ids.extend(completion.token_ids)
            yield output

    async def _traced(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        assert self._invoke is not None
        if self._begun or params.n > 1:
            message = "a request with interpose edits or saves has one prompt and one sequence; send one for each"
            raise TraceFailed(failed_event(self._trace, 0, pb.ERROR_CODE_INVALID_ARGUMENT, message).failed)
        self._begun = True
        assert self._invoke.shipment is not None
        await check_long_prompts(self._llm, self._trace, {0: (prompt, {})}, self._invoke.shipment)
        params.extra_args = {**(params.extra_args or {}), **self._invoke.to_args()}
        own = prompt.get("cache_salt") or ""
        prompt["cache_salt"] = shared_salt(self._tenant, own) if self._invoke.prefix else request_id
        outputs = Outputs(0, self._send, stream=False)
        with contextlib.closing(outputs):
            async for output in self._llm.generate(prompt, params, request_id, **options):
                outputs.add(output)
                if output.finished:
                    await self._end(outputs, output)
                yield output

    async def _end(self, outputs: Outputs, output: Any) -> None:
        """End the block, and send its events before the last output goes on.

        Raises:
            TraceFailed: the block failed.
        """
        self.result = outputs.result()
        how, ended, logs = self._reported(await self._endings.end(self._trace.id, 0, self.result.to_plain()))
        reason = {Ended.STOPPED: "tracer_stop", Ended.FAILED: "error"}.get(how, self.result.finish_reason)
        for event in (outputs.last(reason, logs), *ended):
            self._send(event)
        if how is Ended.STOPPED:
            output.outputs[0].finish_reason = "stop"
        failures = [pb.Event.FromString(event).failed for event in ended if kind_of(event) == "failed"]
        if failures:
            self.failed = True
            raise TraceFailed(failures[0])
