"""A real vLLM engine in this process, driven step by step, for tests of what runs inside a worker."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from executor.core.fairness import NOBODY, Flow
from executor.core.programs import Code, Unit, made, units_of
from executor.core.request import InvokeRequest, shipped
from executor.engine.outputs import Outputs
from executor.engine.requests import told
from executor.plan.prompt_rows import Asked, rows_of_prompt
from executor.plan.row_values import RowValues
from executor.plugin.config import trace_options
from interpose.capture.analysis import block_reads_writes
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.v1.model_pb2 import ModelDescription
from interpose.v1.value_pb2 import Binding, Value
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder
from interpose.wire.request import TraceRequest
from interpose.wire.resolver import Resolver
from tests.engine.kept import KEPT

# A block that keeps the logits and the token of every step that it sees, and the result.
EVERY_STEP = """\
import interpose
tokens, logits = [], []
for step in tracer.iter[:]:
    logits.append(model.logits.output.save())
    tokens.append(model.samples.output.item())
interpose.save(tokens)
result = tracer.result.save()
"""


class Limits:
    """The bounds that the in-process engine runs with."""

    step_seconds = 6.0  # wall time: what one step takes where other processes hold the cores
    block_memory_bytes = 512 << 20
    inline_bytes = 16 << 10
    max_saved_bytes = 64 << 20


@dataclass
class Ran:
    """What one invoke gave: text outputs, saved values by name, a failure, prints."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    state: Ended | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    failure: pb.Failure | None = None
    updates: dict[int, Any] = field(default_factory=dict)
    increments: list[pb.Increment] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)  # as the worker sent them
    logs: str = ""
    accounting: pb.Accounting | None = None
    cached: int = 0  # tokens of the prompt that vLLM took from its prefix cache, as vLLM says it
    output: pb.Event | None = None  # what the engine generated, as it travels; None for an invoke without a prompt


def watch(patch: pytest.MonkeyPatch, part: Any, name: str, method: Callable[..., Any]) -> None:
    """Give one object another method, until `patch` is undone.

    Then it has again what its class has, whichever that is by then: schedulers and runners change theirs, and `setattr` of
    pytest before 9.2 would leave them the method of the class that they had.
    """
    patch.setitem(vars(part), name, method)


def check_failed(ran: Ran, code: int, message: str, line: int | None) -> None:
    """Assert that a block failed: with a code, words of its message, and at a line of its own, if any.

    Args:
        line: counted from 1.
    """
    assert ran.failure is not None
    assert (ran.failure.code, message in ran.failure.message) == (code, True), ran.failure
    if line is not None:
        assert ran.failure.frames[-1].line == line


class _Results(Resolver):
    def module(self, path: str) -> object:
        return path


@dataclass
class Block:
    """One invoke: prompt ids, the block's source, and what it captures."""

    prompt: list[int]
    source: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    captured: dict[str, Any] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    gang: int = 0
    joint: bool = False  # it has no prompt
    prefix: bool | None = None  # whether its prompt may come from the prefix cache; None: as its text says
    last: int = 0  # with `prefix`, how many of the prompt's last rows the block gets
    lora: Any = None  # the engine's LoRARequest


def compile_here(units: list[Unit]) -> dict[str, Code]:
    """Compile texts in this process, which may be long: for programs of the tests' own."""
    return {unit.key: made(unit, 1 << 30) for unit in units}


def request_of(trace: pb.Trace, edits: Sequence[pb.Edit] = ()) -> TraceRequest:
    """Return a trace as an engine gets it, under its own id."""
    return TraceRequest(trace.SerializeToString(), tuple(edit.SerializeToString() for edit in edits), key=trace.id)


def lone_request(trace: pb.Trace) -> InvokeRequest:
    """Return the only request of a trace, whose texts the worker compiles itself."""
    return InvokeRequest.alone(request_of(trace))


class LocalEngine:
    """vLLM's LLM, in process, with the interposing worker."""

    def __init__(
        self,
        checkpoint: Path,
        limits: Any = Limits,
        graphs: bool = False,
        segments: bool = False,
        sandbox: bool = False,
        plans: bool = False,
        **options: Any,
    ) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
        from vllm import LLM
        from vllm.platforms import current_platform

        from tests.engine.segmented import Segmented  # with it vLLM, whose environment is set first

        KEPT.make_way()
        if not current_platform.is_cpu():  # several engines on one device, one after the other or beside another
            options = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30, **options}
        options = {"enforce_eager": True, "max_model_len": 256, "disable_log_stats": True, **options}
        graphs = graphs or os.environ.get("INTERPOSE_TEST_GRAPHS") == "1"  # the same tests, with loops in the tables
        plans = (
            plans or graphs or os.environ.get("INTERPOSE_TEST_PLANS") == "1"
        )  # the same tests, with steps of blocks as plans
        sandbox = sandbox or os.environ.get("INTERPOSE_TEST_SANDBOX") == "1"  # the same tests, in sandboxed processes
        traced = trace_options(limits, "local", plans=plans, graphs=graphs, sandbox=sandbox, sandbox_plans=plans)
        self.llm = LLM(model=str(checkpoint), **traced, **options)
        self.trusted = False  # whether traces are of a tenant with trust
        self.count = 0
        self.applied: list[pb.Edit] = []  # standing edits that traces run with
        self.compile = compile_here
        segments = segments or os.environ.get("INTERPOSE_TEST_SEGMENTS") == "1"  # the same tests, in segments
        self.segments = Segmented.of(self.worker.model_runner) if segments and current_platform.is_cpu() else None

    def close(self) -> None:
        """Give the engine's memory and process groups back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        KEPT.make_way()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def interleaver(self) -> Any:
        return self.worker.model_runner.interleaver

    @cached_property
    def row_values(self) -> RowValues:
        return RowValues.of(self.describe(), self.llm.collective_rpc("interpose_row_values")[0])

    def last_rows(self, trace: pb.Trace, index: int, block: Block) -> dict[str, Any]:
        """Return for how many of its prompt's last rows a block may ask, as the engine does."""
        config = self.llm.llm_engine.vllm_config
        sandboxed = config.additional_config["interpose"].get("sandbox") and not self.trusted
        touched = rows_of_prompt(trace, index, None if sandboxed else self.row_values)
        if block.gang > 1 or isinstance(touched, Asked):
            return {}
        return told(touched, len(block.prompt), config)

    def describe(self) -> ModelDescription:
        """Describe the model."""
        from executor.model.describe import describe_model  # with it vLLM, whose environment is set first

        return describe_model(self.llm.llm_engine.vllm_config, self.worker.interpose_tree)

    def plain(self, prompt: list[int], **sampling: Any) -> Any:
        """Generate without a trace; returns vLLM's completion."""
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling})
        return self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]

    def give_up(self, block: Block, steps: int) -> None:
        """Run some steps of a traced request, then give it up."""
        from vllm import SamplingParams

        trace = self.trace([block], {})
        params = SamplingParams(max_tokens=50, ignore_eos=True, extra_args=lone_request(trace).to_args())
        self.llm.llm_engine.add_request("dropped", {"prompt_token_ids": block.prompt, "cache_salt": "x"}, params)
        for _ in range(steps):
            self.llm.llm_engine.step()
        assert not self.interleaver.idle
        self.llm.llm_engine.abort_request(["dropped"])
        self.llm.collective_rpc("interpose_drop", args=(trace.id,))

    def run(self, *blocks: Block, shared: dict[str, Any] | None = None, plain: tuple[list[int], ...] = ()) -> list[Ran]:
        """Run one trace whose invokes are `blocks`, with `plain` prompts beside it; returns one Ran for each, plain ones last."""
        return self.run_traces([list(blocks)], shared=shared, plain=plain)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def run_streamed(self, *blocks: Block, plain: tuple[list[int], ...] = ()) -> list[Ran]:
        """Run one streamed trace; each Ran has its increments, those that the worker sent and the last."""
        return self.run_traces([list(blocks)], plain=plain, stream=True)

    def reschedule(self, chunked: bool, cached: bool, step_tokens: int) -> None:
        """Give the idle engine a new scheduler, which cuts prompts and caches them or not; the workers stay."""
        from executor.plugin.scheduler import InterposeScheduler  # with it vLLM, whose environment is set first

        core = self.llm.llm_engine.engine_core.engine_core
        old = core.scheduler
        config = old.vllm_config
        config.scheduler_config.enable_chunked_prefill = chunked
        config.scheduler_config.max_num_batched_tokens = step_tokens
        config.scheduler_config.max_num_scheduled_tokens = step_tokens
        config.cache_config.enable_prefix_caching = cached
        core.scheduler = InterposeScheduler(
            vllm_config=config,
            kv_cache_config=old.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=old.block_size,
            hash_block_size=old.block_size,
            log_stats=False,
        )

    def run_traces(
        self,
        traces: list[list[Block]],
        shared: dict[str, Any] | None = None,
        plain: tuple[list[int], ...] = (),
        plain_tokens: int = 4,
        stream: bool = False,
        captured: pb.Trace | None = None,
        flows: Sequence[Flow] = (),
    ) -> list[Ran]:
        """Run traces made of blocks, or one that a notebook captured: its values are left in the events.

        Args:
            flows: of each trace; without them all are of the same tenant.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        outbox = self.worker.interpose_outbox
        pending: dict[str, tuple[pb.Trace, int, int]] = {}
        rans: list[Ran] = []
        results: dict[str, Ran] = {}
        held: list[tuple[pb.Trace, int, int, Block, Ran]] = []
        ended: set[tuple[str, int]] = set()
        by_invoke: dict[tuple[str, int], Ran] = {}

        def submit(trace: pb.Trace, index: int, count: int, block: Block, ran: Ran) -> None:
            flow = flow_by[trace.id]
            own = shipment[trace.id] if count == 1 else None
            last: dict[str, Any] = {"prefix": block.prefix, "last": block.last}
            if block.prefix is None:
                last = self.last_rows(request_of(trace, self.applied).parse(), index, block)
            request = InvokeRequest(trace.id, index, block.gang, flow, self.trusted, shipment=own, **last)
            self.count += 1
            request_id = f"r{self.count}"
            sampling = {"temperature": 0.0, "max_tokens": 1, **block.sampling}
            params = SamplingParams(**sampling, extra_args=request.to_args(), output_kind=RequestOutputKind.CUMULATIVE)
            engine.add_request(
                request_id,
                {"prompt_token_ids": block.prompt, "cache_salt": request.salt(request_id)},
                params,
                lora_request=block.lora,
            )
            pending[request_id] = (trace, index, count)
            results[request_id] = ran

        without: list[tuple[pb.Trace, int, dict[int, Result]]] = []
        generated: dict[str, dict[int, Result]] = {}
        shipment: dict[str, dict[str, Any]] = {}
        flow_by: dict[str, Flow] = {}
        for number, blocks in enumerate(traces):
            trace = captured or self.trace(blocks, shared or {})
            generated[trace.id] = {}
            without += [(trace, i, generated[trace.id]) for i, block in enumerate(blocks) if block.joint]
            trace.stream = trace.stream or stream
            flow = flow_by[trace.id] = flows[number] if flows else NOBODY
            request = replace(request_of(trace, self.applied), trusted=self.trusted, tenant=flow.tenant)
            shipment[trace.id] = shipped(request, self.compile(units_of(request.parse())))
            if len(blocks) > 1:
                assert not self.worker.interpose_open(shipment[trace.id])
            for index, block in enumerate(blocks):
                ran = by_invoke[(trace.id, index)] = Ran()
                rans.append(ran)
                if block.joint:
                    continue
                if block.after:
                    held.append((trace, index, len(blocks), block, ran))
                else:
                    submit(trace, index, len(blocks), block, ran)
        for prompt in plain:
            self.count += 1
            params = SamplingParams(temperature=0.0, max_tokens=plain_tokens, output_kind=RequestOutputKind.CUMULATIVE)
            engine.add_request(f"r{self.count}", {"prompt_token_ids": prompt}, params)
            results[f"r{self.count}"] = Ran()
            rans.append(results[f"r{self.count}"])
        before = len(outbox.logs)
        outbox.increments.clear()
        while engine.has_unfinished_requests() or held:
            for output in engine.step():
                if not output.finished or output.request_id not in results:
                    continue
                ran = results[output.request_id]
                completion = output.outputs[0]
                ran.token_ids, ran.finish_reason = list(completion.token_ids), completion.finish_reason or ""
                ran.cached = output.num_cached_tokens or 0
                if output.request_id not in pending:
                    continue
                trace, index, _ = pending.pop(output.request_id)
                outputs = Outputs(index, lambda event: None, stream=False)
                outputs.add(output)
                result = generated[trace.id][index] = outputs.result()
                ran.output = pb.Event.FromString(outputs.last(ran.finish_reason, 0))
                ran.state, ran.events, _ = self.worker.interpose_finish(trace.id, index, asdict(result))
                if captured is None:
                    self.take(ran, ran.events)
                ended.add((trace.id, index))
                for entry in list(held):
                    if all((entry[0].id, other) in ended for other in entry[3].after):
                        held.remove(entry)
                        submit(*entry)
        for trace, number, results_of in without:
            ran = by_invoke[(trace.id, number)]
            plain = [asdict(results_of[index]) for index in sorted(results_of)]
            ran.state, ran.events, _ = self.worker.interpose_finish_joint(trace.id, number, plain)
            if captured is None:
                self.take(ran, ran.events)
        for trace_id, index, text in outbox.logs[before:]:
            by_invoke[(trace_id, index)].logs += text
        for trace_id, data in reversed(outbox.increments):
            increment = pb.Event.FromString(data).increment
            by_invoke[(trace_id, increment.invoke)].increments.insert(0, increment)
        return rans

    def edit(self, name: str, source: str, **captured: Any) -> pb.Edit:
        """Make a standing edit of a block."""
        trace = self.trace([Block([], source, captured=captured)], {})
        return pb.Edit(name=name, scope=trace.scope, program=trace.invokes[0].program)

    def take(self, ran: Ran, events: list[bytes]) -> None:
        outbox = self.worker.interpose_outbox
        for data in events:
            event = pb.Event.FromString(data)
            if event.WhichOneof("kind") == "failed":
                ran.failure = event.failed
                continue
            if event.WhichOneof("kind") == "increment":
                ran.increments.append(event.increment)
                continue
            if event.WhichOneof("kind") == "accounting":
                ran.accounting = event.accounting
                continue
            decoder = Decoder(event.saves.objects, get_blob=lambda blob: outbox.blobs.pop(blob.id), resolver=_Results())
            ran.saved.update({binding.name: decoder.decode(binding.value) for binding in event.saves.names})
            ran.updates.update({update.index: decoder.decode(update.value) for update in event.saves.updates})

    def trace(self, blocks: list[Block], shared: dict[str, Any]) -> pb.Trace:
        self.count += 1
        # A captured value that is a message already travels as it is.
        encoder = Encoder(
            inline_bytes=1 << 30, put_blob=lambda data: "", special=lambda obj: obj if isinstance(obj, Value) else None
        )
        trace = pb.Trace(id=f"t{self.count}", stacks=True)
        for name, value in shared.items():
            trace.shared.append(Binding(name=name, value=encoder.encode(value)))
        for block in blocks:
            source = textwrap.dedent(block.source).strip("\n") + "\n"
            reads, writes = block_reads_writes(ast.parse(source).body)
            program = pb.Program(source=source, filename="<block>", first_line=1, writes=writes)
            names = {"model": Value(module=""), "tracer": Value(tracer=True), "torch": Value(python_module="torch")}
            for name in reads:
                if name in block.captured:
                    program.reads.append(Binding(name=name, value=encoder.encode(block.captured[name])))
                elif name in names:
                    program.reads.append(Binding(name=name, value=names[name]))
            trace.invokes.append(pb.Invoke(program=program, after=block.after, joint=block.joint))
        trace.scope.CopyFrom(encoder.objects)
        return trace


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two values agree in shape and to `tolerance`."""
    return a.shape == b.shape and bool((a.double() - b.double()).abs().max() <= tolerance)
