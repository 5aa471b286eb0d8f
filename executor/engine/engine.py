"""An engine that runs traces: vLLM's AsyncLLM with interposing workers.

Each invoke is one request.

Size: the ways in which a trace runs: as requests, as a scan, as an answer of the endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from executor.cluster.start_failure import CannotStart, failure_of
from executor.core.ended import Ended, Ending
from executor.core.programs import Code, units_of
from executor.core.request import InvokeRequest, flow_of, shipped, step_tokens
from executor.engine.bundled import bundled
from executor.engine.failures import MOST_STEPS, TraceFailed, check_room, check_scan, check_traced, failed_event
from executor.engine.long_prompts import check_long_prompts
from executor.engine.openai_run import OpenAIRun
from executor.engine.outputs import TOKENS_AT_ONCE, Outputs
from executor.engine.requests import is_quick, last_rows, may_use_prefix, prompt_of, sampling_of
from executor.engine.rpc import Endings, call_workers, until_there_is_a_process
from executor.engine.startup import ModelSettings, Started, started
from interpose.contract.result import Result
from interpose.v1 import model_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import kind_of
from interpose.wire.gang import gang_of, joint_invokes, start_after
from interpose.wire.request import TraceRequest


class TraceEngine:
    """Runs traces on one vLLM engine. Make it with `start`.

    Args:
        ready: vLLM's engine, and what is known of its model.

    Attributes:
        llm: vLLM's engine.
        serving: answers requests of the OpenAI-compatible endpoint.
    """

    def __init__(self, ready: Started) -> None:
        self.llm = ready.llm
        self._compiler = ready.compiler
        self._verdicts = ready.verdicts
        self._adapters = ready.adapters
        self._description = ready.description
        self._row_values = ready.row_values
        self._endings = Endings(ready.llm)
        self.serving = ready.serving
        self._why_untraced = ready.why_untraced
        self._running = self._waiting = 0

    @classmethod
    async def start(
        cls, model: ModelSettings, progress: Callable[[str], None] = lambda stage: None, metrics: bool = False
    ) -> TraceEngine:
        """Start the engine and load the model.

        Args:
            model: the model's settings.
            progress: called with each stage's name.
            metrics: whether vLLM's own metrics go to Ray's agent.

        Raises:
            CannotStart: with the reason, and whether another try can succeed.
        """
        try:
            return cls(await started(model, progress, metrics))
        except Exception as error:
            raise CannotStart(failure_of(error)) from error

    def describe(self) -> model_pb2.ModelDescription:
        """Return the model's description."""
        return self._description

    def load(self) -> tuple[int, int]:
        """Return how many invokes run, and how many wait for another invoke of their trace."""
        return self._running, self._waiting

    async def check_health(self) -> None:
        """Raise an error if the engine is dead."""
        await self.llm.check_health()

    async def idle(self) -> bool:
        """Return whether no worker holds anything of any trace."""
        return all(state["idle"] for state in await call_workers(self.llm, "interpose_idle"))

    async def counters(self) -> dict[str, float]:
        """Return the sums over the workers of what they counted since their start, and hold."""
        sums: Counter[str] = Counter()
        for one in await call_workers(self.llm, "interpose_counters"):
            sums.update(one)
        return dict(sums)

    async def shutdown(self) -> None:
        """Stop the engine and its workers."""
        self._compiler.close()
        await asyncio.get_running_loop().run_in_executor(None, self.llm.shutdown)

    async def run(self, request: TraceRequest, results: dict[int, Result] | None = None) -> AsyncIterator[bytes]:
        """Run a trace, with one request for every invoke.

        An invoke that reads names of another invoke starts after that invoke has ended.

        Args:
            request: the trace, which is checked here against the model.
            results: takes the result of each invoke that ends.

        Yields:
            Serialized Output, Saves and Failed events, with one Failed for each invoke that fails. Events that are there at the
                same time come in bundles. Closing the generator aborts the trace.

        Raises:
            TraceFailed: nothing ran, because the trace asks for something that this engine does not take.
        """
        trace = request.parse()
        check_traced(trace, self._why_untraced)
        if trace.HasField("openai"):
            async with contextlib.aclosing(self._answer(request, trace, {} if results is None else results)) as parts:
                async for part in parts:
                    yield part
            return
        if trace.scan:
            for scanned in await self._scan(request, trace):
                yield scanned
            return
        joint = joint_invokes(trace)
        prompted = [index for index in range(len(trace.invokes)) if index not in joint]
        prepared = await self._prepared(trace, prompted)
        codes = await self._compiled(trace)
        shipment = shipped(request, codes)
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        ended = [asyncio.Event() for _ in trace.invokes]
        results, failed = {} if results is None else results, set[int]()
        gang = gang_of(trace)
        check_room(trace, gang, prepared, self.llm.vllm_config.scheduler_config)
        await check_long_prompts(self.llm, trace, prepared, shipment)
        waits_for = start_after(trace)
        for index in joint:  # Its block gets nothing more once the other invokes have ended.
            waits_for[index] = set(prompted)

        async def one(index: int) -> None:
            try:
                after = sorted(waits_for[index])
                if after:
                    self._waiting += 1
                    try:
                        for other in after:
                            await ended[other].wait()
                    finally:
                        self._waiting -= 1
                    broken = [other for other in after if other in failed]
                    if broken and index not in joint:
                        await self._skip(trace, index, broken[0], events)
                        failed.add(index)
                        return
                self._running += 1
                try:
                    if index in joint:
                        done = await self._joint(trace, index, [results[one] for one in sorted(results)], events)
                    else:
                        size, own = len(gang) if index in gang else 0, shipment if alone else None
                        last = self._last_rows(
                            trace, index, codes, len(prepared[index][0]["prompt_token_ids"]), request
                        )
                        invoke = InvokeRequest(
                            trace.id, index, size, flow_of(request), request.trusted, shipment=own, **last
                        )
                        done = await self._invoke(trace, invoke, prepared[index], events, results)
                    if not done:
                        failed.add(index)
                finally:
                    self._running -= 1
            except VLLMValidationError as error:  # vLLM checks some parameters only when a request comes.
                failed.add(index)
                events.put_nowait(
                    failed_event(trace, index, pb.ERROR_CODE_INVALID_ARGUMENT, str(error)).SerializeToString()
                )
            except (EngineDeadError, EngineGenerateError) as error:
                failed.add(index)
                events.put_nowait(self._stopped(trace, index, error).SerializeToString())
            finally:
                ended[index].set()

        alone = len(trace.invokes) == 1

        async def all_of_them() -> None:
            try:
                if not alone:
                    await self._open(trace, shipment)
                await asyncio.gather(*(one(index) for index in range(len(trace.invokes))))
            finally:
                events.put_nowait(None)

        async with self._at_work(all_of_them(), trace.id, lambda: bool(failed)):
            async for bundle in bundled(events, lambda: self._running):
                yield bundle

    async def _answer(
        self, request: TraceRequest, trace: pb.Trace, results: dict[int, Result]
    ) -> AsyncGenerator[bytes, None]:
        """Answer a request of the OpenAI-compatible endpoint; yield events as `run` does."""
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        invoke = None
        if trace.openai.traced:
            codes = await self._compiled(trace)
            prefix = may_use_prefix(trace, 0, codes, self.llm.vllm_config)
            invoke = InvokeRequest.alone(request, codes, prefix)
        run = OpenAIRun(self.llm, self._endings, trace, request.tenant, invoke, events.put_nowait, _reported)

        async def all_of_it() -> None:
            self._running += 1
            try:
                async for part in self.serving.answer(trace.openai, run.generate):
                    events.put_nowait(pb.Event(http=part).SerializeToString())
                if invoke is None:
                    events.put_nowait(run.last())
            except TraceFailed as error:
                if not run.failed:
                    events.put_nowait(pb.Event(failed=error.failure).SerializeToString())
            except (EngineDeadError, EngineGenerateError) as error:
                events.put_nowait(self._stopped(trace, 0, error).SerializeToString())
            finally:
                self._running -= 1
                results[0] = run.result
                events.put_nowait(None)

        async with self._at_work(all_of_it(), trace.id, lambda: run.failed, invoke is not None):
            async for bundle in bundled(events, lambda: self._running):
                yield bundle

    @contextlib.asynccontextmanager
    async def _at_work(
        self, work: Coroutine[Any, Any, None], trace_id: str, failed: Callable[[], bool], blocks: bool = True
    ) -> AsyncGenerator[None, None]:
        """Do a trace's work beside a `with` block; give it up if the block is left before its end.

        Args:
            failed: whether a request has failed, so that the workers may hold something of the trace.
            blocks: whether the workers know the trace.
        """
        task, complete = asyncio.create_task(work), False
        try:
            yield
            await task
            complete = True
        finally:
            if blocks and (not complete or failed()):
                await asyncio.shield(self._give_up(task, trace_id))
            task.cancel()

    async def _open(self, trace: pb.Trace, shipment: dict[str, Any]) -> None:
        """Give the workers the common part of a trace, before the trace's first request.

        Raises:
            TraceFailed: a worker has no room for the trace, or the engine has ended.
        """
        try:
            reasons = [reason for reason in await call_workers(self.llm, "interpose_open", shipment) if reason]
        except EngineDeadError as error:
            raise TraceFailed(self._stopped(trace, -1, error).failed) from None
        if reasons:
            raise TraceFailed(failed_event(trace, -1, pb.ERROR_CODE_ENGINE, reasons[0]).failed)

    async def _scan(self, request: TraceRequest, trace: pb.Trace) -> list[bytes]:
        """Run a trace's block on shapes, with no request and no generated token."""
        prompt, sampling = await asyncio.to_thread(self._prepare, trace, 0)
        steps = sampling["max_tokens"]
        steps = MOST_STEPS if trace.explain else steps
        tokens = len(prompt["prompt_token_ids"])
        most = step_tokens(self.llm.vllm_config.scheduler_config)
        check_scan(trace, steps, self._description.pipeline_parallel_size, tokens, most)
        shipment = shipped(request, await self._compiled(trace))
        how = Ended.FAILED
        try:
            if not request.trusted:
                await until_there_is_a_process(self.llm)
            replies = await call_workers(self.llm, "interpose_scan", shipment, prompt["prompt_token_ids"], steps)
            how, ended, logs = _reported(replies)
        except EngineDeadError as error:
            raise TraceFailed(self._stopped(trace, 0, error).failed) from None
        finally:
            if how is Ended.FAILED:
                with contextlib.suppress(Exception):
                    await call_workers(self.llm, "interpose_drop", trace.id)
        finished = pb.Event(output=pb.Output(invoke=0, finished=True, finish_reason="stop", logs=logs))
        return [finished.SerializeToString(), *ended]

    def _last_rows(
        self, trace: pb.Trace, index: int, codes: dict[str, Code], tokens: int, request: TraceRequest
    ) -> dict[str, Any]:
        """Return for how many of a prompt's last rows a block may ask, as `last_rows` does.

        A block in a sandbox is given none of a prompt that may come from the prefix cache.
        """
        config = self.llm.vllm_config
        sandboxed = not request.trusted and config.additional_config.get("interpose", {}).get("sandbox")
        values = None if sandboxed else self._row_values
        return last_rows(trace, index, codes, config, tokens, values)

    async def _compiled(self, trace: pb.Trace) -> dict[str, Code]:
        """Return what a trace's texts compile to, compiled in a process of its own."""
        units = units_of(trace)
        known = self._compiler.known(units)
        return await asyncio.to_thread(self._compiler.compile, units) if known is None else known

    async def _give_up(self, task: asyncio.Task[None], trace_id: str) -> None:
        """Abort what still runs of a trace, and let the workers forget the trace."""
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
        with contextlib.suppress(Exception):
            await call_workers(self.llm, "interpose_drop", trace_id)

    async def _invoke(
        self,
        trace: pb.Trace,
        invoke: InvokeRequest,
        prepared: tuple[Any, dict[str, Any]],
        events: asyncio.Queue[Any],
        results: dict[int, Result],
    ) -> bool:
        """Run one invoke; return whether it ended without a failure.

        Args:
            invoke: what the workers are told of the invoke.
            prepared: its prompt and sampling parameters for vLLM.
            results: takes the result of the invoke.
        """
        prompt, sampling = prepared
        index = invoke.invoke
        request_id = f"{trace.id}-{index}-{uuid.uuid4().hex[:8]}"
        prompt = {**prompt, "cache_salt": invoke.salt(request_id)}
        params = SamplingParams(
            **sampling,
            extra_args=invoke.to_args(),
            output_kind=RequestOutputKind.DELTA,
            stream_interval=None if trace.stream else TOKENS_AT_ONCE,
        )
        lora = self._adapters.request(trace.invokes[index].lora or trace.lora)
        outputs = Outputs(index, events.put_nowait, trace.stream)
        with contextlib.closing(outputs):
            async for output in self.llm.generate(prompt, params, request_id, lora_request=lora):
                outputs.add(output)
            result = results[index] = outputs.result()
            how, ended, logs = _reported(await self._endings.end(trace.id, index, result.to_plain()))
            reason = {Ended.STOPPED: "tracer_stop", Ended.FAILED: "error"}.get(how, result.finish_reason)
            last = outputs.last(reason, logs)
        # An increment belongs to the last output and comes before it; all other events come after it.
        for event in sorted((last, *ended), key=lambda event: kind_of(event) != "increment"):
            events.put_nowait(event)
        return not any(kind_of(event) == "failed" for event in ended)

    async def _joint(self, trace: pb.Trace, index: int, results: list[Result], events: asyncio.Queue[Any]) -> bool:
        """End a joint invoke, which has no prompt; return whether it ended without a failure.

        The block of such an invoke ran beside the blocks of all other invokes.
        """
        plain = [one.to_plain() for one in results]
        how, ended, logs = _reported(await call_workers(self.llm, "interpose_finish_joint", trace.id, index, plain))
        if how is Ended.UNKNOWN:
            refused = failed_event(trace, index, pb.ERROR_CODE_CANCELLED, "not run: no prompt of the trace could start")
            ended = [refused.SerializeToString()]
        finished = pb.Event(output=pb.Output(invoke=index, finished=True, finish_reason="stop", logs=logs))
        for event in (finished.SerializeToString(), *ended):
            events.put_nowait(event)
        return not any(kind_of(event) == "failed" for event in ended)

    async def _skip(self, trace: pb.Trace, index: int, broken: int, events: asyncio.Queue[Any]) -> None:
        message = f"not run: it reads what invoke {broken} assigns, and that one failed"
        if broken not in trace.invokes[index].after:
            message = (
                f"not run: it starts together with an invoke that reads what invoke {broken} assigns, which failed"
            )
        events.put_nowait(failed_event(trace, index, pb.ERROR_CODE_CANCELLED, message).SerializeToString())

    def _stopped(self, trace: pb.Trace, index: int, error: Exception) -> pb.Event:
        """Return the failure of an invoke whose engine has ended, whether or not through its trace."""
        if not self._verdicts.guilty(trace.id):
            return failed_event(trace, index, pb.ERROR_CODE_UNAVAILABLE, f"the engine stopped: {error}", 5.0)
        message = (
            "a block of this trace held a worker for longer than the time it may take in one step, in code that nothing can "
            "interrupt (one long call in C, or a timer that it switched off), so the worker was ended; make the call smaller, or "
            "do the work in the notebook after the trace"
        )
        return failed_event(trace, index, pb.ERROR_CODE_DEADLINE_EXCEEDED, message)

    async def _prepared(self, trace: pb.Trace, prompted: list[int]) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
        """Check the invokes with a prompt; return what `_prepare` returns of each, by index."""

        def prepare() -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
            return {index: self._prepare(trace, index) for index in prompted}

        # Grammars, chat templates and tokenizers may take a while.
        return prepare() if is_quick(trace) else await asyncio.to_thread(prepare)

    def _prepare(self, trace: pb.Trace, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check an invoke against the model; return its prompt and sampling parameters for vLLM."""
        invoke, tokenizer = trace.invokes[index], self.llm.get_tokenizer()
        try:
            sampling = sampling_of(trace, invoke, self._description, self.llm.vllm_config, tokenizer)
            self._adapters.request(invoke.lora or trace.lora)
            return prompt_of(invoke.prompt, self._description, tokenizer), sampling
        except (ValueError, TypeError, OverflowError) as error:
            raise TraceFailed(failed_event(trace, index, pb.ERROR_CODE_INVALID_ARGUMENT, str(error)).failed) from None


def _reported(replies: list[tuple[str, list[bytes], int]]) -> Ending:
    """Return the reply of the rank that reports; `Ended` travels as its text.

    Only that rank has saves and printed text. Every rank knows a failure.
    """
    how, events, logs = max(replies, key=lambda reply: (len(reply[1]), reply[2]))
    return Ended(how), events, logs
