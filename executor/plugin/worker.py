"""vLLM's workers with an interleaver: the runner is the project's, the rest is stock.

vLLM chooses the worker class by its name in `worker_cls`, and the runner by the worker's own factory. The engine's questions to
workers beside steps arrive by `collective_rpc` under the names `interpose_*`.

Size: what a worker is told and asked beside its steps has a method here.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.utils.gc_utils import freeze_gc_heap

from executor.block.budget import Budget
from executor.block.tally import Precision
from executor.block.watchdog import heartbeat
from executor.core.ended import Ended, Ending
from executor.core.request import InvokeRequest, Opened, step_tokens
from executor.core.startup import Startup
from executor.core.text import clip
from executor.graphs.buffers import Outputs
from executor.graphs.limits import GraphLimits
from executor.graphs.loops import TableLoops
from executor.graphs.programs import Programs
from executor.graphs.sites import Observed, observe, outside_of, sites_of
from executor.graphs.tables import Tables
from executor.graphs.taps import Taps
from executor.graphs.tickets import copier_on
from executor.interleave.context import Host
from executor.interleave.explaining import Facts
from executor.interleave.interleaver import Interleaver
from executor.interleave.scan import forms_of, scan
from executor.model.apply import Applier
from executor.model.constants import MOST_BYTES, ConstantPool
from executor.model.describe import describe_model
from executor.model.kv_guard import CacheGuard
from executor.model.lora import check_wrapped
from executor.model.tree import ModuleTree
from executor.parallel.agreement import AllRanks, Alone
from executor.parallel.merge_tree import gather, join
from executor.parallel.pipeline import OneStage, Pipeline
from executor.plan.forms import Form
from executor.plan.row_values import forms_of_rows
from executor.plugin.counters import counters
from executor.plugin.kernels import EagerKernels
from executor.plugin.sandboxes import start
from executor.sandbox.pool import Pool
from executor.saves.collect import Limits
from executor.saves.outbox import LocalOutbox, Outbox, RayOutbox
from executor.views.catalogue import add_views
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


logger = init_logger(__name__)


def answered(trace_id: str, invoke: int, do: Callable[[], Ending]) -> Ending:
    """Return what `do` returns, or a failure if it raises.

    The engine takes one answer from every rank. After a rank that raised, it would take none from the others, and the next
    question would get the answers that are left.
    """
    try:
        return do()
    except Exception as error:
        logger.exception("trace %s, invoke %d", trace_id, invoke)
        message = clip(f"the worker could not end the block: {type(error).__name__}: {error}")
        failed = pb.Failure(code=pb.ERROR_CODE_ENGINE, message=message, trace_id=trace_id, invoke=invoke)
        return Ended.FAILED, [pb.Event(failed=failed).SerializeToString()], 0


class InterposeWorker(_Base):
    """Mixed in before a vLLM worker."""

    interpose_sandboxes: Pool | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model as stock; meanwhile the process loads its part that forks sandboxes."""
        if self.vllm_config.additional_config["interpose"]["sandbox"]:
            self.interpose_sandboxes = Pool()
            if self._reports:
                self.interpose_sandboxes.load()
        return super().load_model(*args, **kwargs)

    @property
    def _reports(self) -> bool:
        """Whether this rank sends what blocks save, and has the sandboxes."""
        return bool(get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank)

    def determine_available_memory(self) -> Any:
        """Run the model once as stock, which may compile it, and report that stage.

        Compiling can take minutes.
        """
        self._tell("compiling the model" if self._compiles else "measuring memory")
        available = super().determine_available_memory()
        if not self._has_tables or self.vllm_config.cache_config.kv_cache_memory_bytes is not None:
            return available
        scheduling = self.vllm_config.scheduler_config
        sites = 10 * sum(1 for _ in self.model_runner.get_model().modules())
        rows = scheduling.max_num_batched_tokens + scheduling.max_num_seqs
        reserved = GraphLimits().device_bytes(scheduling.max_num_seqs, sites, rows) + MOST_BYTES
        return max(0, available - reserved)

    @property
    def _has_tables(self) -> bool:
        """Whether loops may run in the tables."""
        graphs = bool(self.vllm_config.additional_config["interpose"]["graphs"])
        return graphs and self._fits_tables and self.vllm_config.speculative_config is None

    @property
    def _fits_tables(self) -> bool:
        """Whether the model can have tables: not over pipeline stages.

        Sums over more than two ranks on CPUs are rounded differently on each rank, so that each rank would read other numbers.
        """
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size > 1:
            return False
        return self.device.type != "cpu" or parallel.tensor_parallel_size <= 2

    @property
    def _compiles(self) -> bool:
        return bool(self.vllm_config.compilation_config.mode)  # NONE is 0

    def _tell(self, stage: str) -> None:
        Startup.of_worker(self.rank).tell(stage)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as stock, then record the module tree and the order in which a forward runs it."""
        graphs = self._compiles and self.device.type != "cpu"
        self._tell("compiling the model and capturing CUDA graphs" if graphs else "warming up")
        warmed_up = super().compile_or_warm_up_model()
        runner = self.model_runner
        settings = dict(self.vllm_config.additional_config["interpose"])
        tensor_parallel = self.parallel_config.tensor_parallel_size
        pipelined = self.parallel_config.pipeline_parallel_size > 1
        check_wrapped(runner.get_model())
        runner.kernels = EagerKernels(runner.get_model(), self.vllm_config)
        tree = ModuleTree(runner.get_model(), tensor_parallel)
        tree.axes = self.model_config.uses_mrope
        devices = [] if runner.device.type == "cpu" else [runner.device]
        cache = CacheGuard(self.vllm_config.compilation_config.static_forward_context)
        with set_current_vllm_config(self.vllm_config), torch.random.fork_rng(devices):
            order = tree.record_order(self._dummy_step)
            if pipelined:
                join(tree, order)
            add_views(tree, self.model_config.hf_text_config, self._dummy_step, gather)
            constants = ConstantPool()
            loops, observed = self._tables(tree, cache, constants) if self._has_tables else (None, Observed())
        reports = self._reports
        if self.interpose_sandboxes is not None and reports:
            start(self.interpose_sandboxes, tree, self.vllm_config)
            runner.sandboxes = self.interpose_sandboxes
        self.interpose_tree, self.interpose_shapes = tree, self._shapes(tree)
        self.interpose_outbox: Outbox = LocalOutbox() if settings["outbox"] == "local" else RayOutbox(reports)
        host = Host(
            tree=tree,
            applier=Applier(tree, self.vllm_config, settings["block_memory_bytes"]),
            budget=Budget(settings["step_seconds"], settings["block_memory_bytes"], heartbeat()),
            outbox=self.interpose_outbox,
            limits=Limits(settings["inline_bytes"], settings["max_saved_bytes"]),
            ranks=AllRanks() if tensor_parallel > 1 or pipelined else Alone(),
            stages=Pipeline(tree) if pipelined else OneStage(),
            reports=reports,
            precision=Precision.of(self.vllm_config),
            vocabulary=self.model_config.get_vocab_size(),
            cache=cache,
            constants=constants,
            plans=settings["plans"],
            loops=loops,
            forms=observed.forms,
            shapes=self.interpose_shapes,
            step_tokens=step_tokens(self.vllm_config.scheduler_config),
            facts=self._facts,
            sandboxes=self.interpose_sandboxes,
            sandbox_plans=settings["sandbox_plans"],
        )
        runner.interleaver = Interleaver(host)
        freeze_gc_heap()  # What blocks leave behind is collected while the worker waits (`executor.block.garbage`).
        if loops is not None:
            self._prepare_graphs(loops)
        if pipelined:  # The other engines run the stock worker's method, with no call in between.
            self.execute_model = self._execute_staged
        self._tell("ready")
        return warmed_up

    def _tables(self, tree: ModuleTree, cache: CacheGuard, constants: ConstantPool) -> tuple[TableLoops, Observed]:
        """Return what runs loops in the tables, and the forms of the model's values."""
        hidden: list[Any] = []
        observed = observe(tree, lambda: hidden.append(self._dummy_step()))
        scheduling = self.vllm_config.scheduler_config
        sites = sites_of(observed, self.model_config.dtype)
        observed.forms.update(outside_of(self.model_runner.get_model(), hidden[0], self.model_runner.sampled))
        limits = GraphLimits()
        rows = scheduling.max_num_batched_tokens + scheduling.max_num_seqs
        widths = [site.width for site in sites]
        tables = Tables(widths, scheduling.max_num_seqs, rows, self.model_config.dtype, self.device, limits)
        modules = {path: node.module for path, node in tree.nodes.items() if node.module is not None}
        outputs = Outputs(tables, copier_on(tables.output.device), limits.ring_bytes, limits.host_bytes)
        programs = Programs(modules, tables, limits, observed.is_spread, self._forget_program, constants.origin)
        return TableLoops(Taps(modules, sites, tables), tables, outputs, cache, programs), observed

    def _forget_program(self, key: str) -> None:
        """Drop the captured graphs that hold a program."""
        graphs = getattr(self.model_runner, "graphs", None)
        if graphs is not None:
            graphs.dispatcher.forget(key)

    def _facts(self) -> Facts:
        """Return what explanations need to know of this worker; the first call finds out."""
        known: Facts | None = getattr(self, "interpose_facts", None)
        if known is None:
            tree, settings = self.interpose_tree, self.vllm_config.additional_config["interpose"]
            runner = self.model_runner
            forms = forms_of(tree, runner.get_model(), self._dummy_pass, runner.sampled)
            alone = self.parallel_config.world_size == 1
            observed = Observed(forms) if alone or not self._fits_tables else observe(tree, self._dummy_step)
            sites = sites_of(observed, self.model_config.dtype) if self._fits_tables else []
            numbers = {site.key: number for number, site in enumerate(sites)}
            loops = runner.interleaver.loops
            segments = alone and self.vllm_config.lora_config is None and getattr(runner, "graphs", None) is not None
            known = self.interpose_facts = Facts(
                tree, forms, numbers, settings["plans"], self._has_tables, loops, observed.is_spread, segments, alone
            )
        return known

    def _shapes(self, tree: ModuleTree) -> dict[tuple[str, str], Form]:
        """Return the forms of values if a step may begin or end inside a prompt, else {}.

        With a prefix cache a step may begin there, and steps of a model with states end at edges of cache blocks.
        """
        longer = self.model_config.max_model_len - 1 > step_tokens(self.vllm_config.scheduler_config)
        cache = self.vllm_config.cache_config
        inside = longer or cache.enable_prefix_caching or cache.mamba_cache_mode == "align"
        if not inside or self.parallel_config.pipeline_parallel_size > 1:
            return {}
        runner = self.model_runner
        devices = [] if runner.device.type == "cpu" else [runner.device]
        config, modes = set_current_vllm_config(self.vllm_config), torch.inference_mode()
        with config, modes, torch.random.fork_rng(devices), runner.kernels.used():
            return forms_of(tree, runner.get_model(), self._dummy_pass, runner.sampled)

    def _dummy_pass(self, tokens: int) -> None:
        """Run the model on so many dummy tokens, of which the last one has logits."""
        self.model_runner._dummy_run(tokens, is_profile=True)
        if (
            self.vllm_config.lora_config is not None
        ):  # else the adapters' kernels expect as many logits as the step before had
            self.model_runner._set_active_loras((0,), (0,) * tokens, set())

    def _prepare_graphs(self, loops: TableLoops) -> None:
        """Make ready to run loops in the tables in captured graphs, on devices that have graphs."""

    @torch.inference_mode()
    def _execute_staged(self, scheduler_output: SchedulerOutput) -> Any:
        """Run a step; pipeline stages run a step with a live mediator together.

        See `executor.parallel.pipeline`.
        """
        if not self.model_runner.begins_traced(scheduler_output):
            return super().execute_model(scheduler_output)
        interleaver = self.model_runner.interleaver
        stages = interleaver.stages
        interleaver.follow(range(stages.mine))
        try:
            output = super().execute_model(scheduler_output)
        except Exception as error:
            stages.fail(error)
            raise
        if stages.mine < stages.last:
            stages.end()
            interleaver.follow(range(stages.mine + 1, stages.last + 1))
            self.model_runner.end_traced()
        return output

    def interpose_open(self, shipment: dict[str, Any]) -> str:
        """Take a trace whose requests come next; return why this failed, or "".

        Args:
            shipment: the trace, as `executor.core.request.shipped` made it ready.
        """

        try:  # see `answered`
            self.model_runner.interleaver.open(Opened.of(shipment))
        except Exception as error:
            logger.exception("trace %s", shipment["key"])
            return clip(f"the worker could not take the trace: {type(error).__name__}: {error}")
        return ""

    def interpose_scan(self, shipment: dict[str, Any], prompt: list[int], steps: int) -> Ending:
        """Run a block on shapes, or explain it; see `executor.interleave.scan.scan`."""
        runner = self.model_runner
        request = InvokeRequest(shipment["key"], 0, shipment=shipment)
        devices = [] if runner.device.type == "cpu" else [runner.device]
        config, modes = set_current_vllm_config(self.vllm_config), torch.inference_mode()

        def run() -> Ending:
            with config, modes, torch.random.fork_rng(devices), runner.kernels.used():
                return scan(
                    runner.interleaver,
                    runner.get_model(),
                    self._dummy_pass,
                    request,
                    prompt,
                    steps,
                    runner.sampled,
                )

        return answered(request.trace, 0, run)

    def interpose_has_process(self) -> bool:
        """Return whether a block that is no request may start, as far as it needs a process."""
        return self.interpose_sandboxes is None or self.interpose_sandboxes.ready

    def interpose_follow(self, shipment: dict[str, Any], invoke: int, tokens: int) -> bytes:
        """Return why a block cannot run over a prompt in chunks, a Failure; b"" if it can."""
        try:  # see `answered`
            with self.model_runner.kernels.used(), torch.inference_mode():
                failure = self.model_runner.interleaver.why_not_gathered(Opened.of(shipment), invoke, tokens)
        except Exception as error:
            logger.exception("trace %s", shipment["key"])
            message = clip(f"the worker could not follow the block: {type(error).__name__}: {error}")
            failure = pb.Failure(code=pb.ERROR_CODE_ENGINE, message=message)
        return b"" if failure is None else failure.SerializeToString()

    def _dummy_step(self) -> Any:
        """Run one forward without a request, eager and uncompiled; return what the model gives.

        Its modules are called as in a traced step.
        """
        model = self.model_runner.get_model()

        def uncompiled(module: torch.nn.Module, args: Any) -> None:
            get_forward_context().skip_compiled = True

        given: list[Any] = []
        hooks = [
            model.register_forward_pre_hook(uncompiled),
            model.register_forward_hook(lambda module, args, output: given.append(output)),
        ]
        group = get_pp_group()
        if not group.is_first_rank:
            self._take_over(group.recv_tensor_dict())
        try:
            with self.model_runner.kernels.used():
                self.model_runner._dummy_run(1, is_profile=True)
        finally:
            for hook in hooks:
                hook.remove()
        if not given:
            kind = type(model).__name__
            raise ValueError(
                f"{kind} is not supported with traces: vLLM compiles it as a whole and runs it without hooks"
            )
        if not group.is_last_rank:
            group.send_tensor_dict(given[0].tensors)
        return given[0]

    def _take_over(self, tensors: dict[str, torch.Tensor]) -> None:  # [rows, hidden]
        """Give the next dummy step the output of the pipeline stage before."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=runner.device
            )
        with torch.inference_mode():  # the mode in which the runner may have made them
            for name, tensor in tensors.items():
                runner.intermediate_tensors[name][: tensor.shape[0]].copy_(tensor)

    def interpose_describe(self) -> bytes:
        """Return the model's description, a serialized ModelDescription."""
        return describe_model(self.vllm_config, self.interpose_tree).SerializeToString()

    def interpose_row_values(self) -> dict[str, str]:
        """Return what inputs and outputs of modules have rows, as of `RowValues`."""
        return forms_of_rows(self.interpose_shapes)

    def interpose_finish(self, trace_id: str, invoke: int, result: dict[str, Any]) -> Ending:
        """End an invoke's block; see `Interleaver.finish`."""
        return self._finish(trace_id, invoke, Result.from_plain(result))

    def interpose_finish_all(self, ended: list[tuple[str, int, dict[str, Any]]]) -> list[Ending]:
        """End the blocks of several invokes, whose arguments `interpose_finish` takes one by one."""
        interleaver = self.model_runner.interleaver
        with self.model_runner.kernels.used():
            known = interleaver.finish_deferred({trace: len(result["token_ids"]) for trace, _, result in ended})
        return [known.get(one[0]) or self.interpose_finish(*one) for one in ended]

    def interpose_finish_joint(self, trace_id: str, invoke: int, results: list[dict[str, Any]]) -> Ending:
        """End the block of an invoke without a prompt, with the results of all others.

        See `Interleaver.finish`.
        """
        return self._finish(trace_id, invoke, [Result.from_plain(one) for one in results])

    def _finish(self, trace_id: str, invoke: int, result: Result | list[Result]) -> Ending:
        with self.model_runner.kernels.used():
            return answered(trace_id, invoke, lambda: self.model_runner.interleaver.finish(trace_id, invoke, result))

    def interpose_drop(self, trace_id: str) -> None:
        """Give a trace up; see `Interleaver.drop`."""

        def drop() -> Ending:
            self.model_runner.interleaver.drop(trace_id)
            return Ended.CANCELLED, [], 0

        answered(trace_id, -1, drop)

    def interpose_counters(self) -> dict[str, float]:
        """Return what this worker has counted since its start, and what it holds."""
        return counters(self.model_runner, self.interpose_sandboxes)

    def interpose_idle(self) -> dict[str, Any]:
        """Return whether this worker holds nothing of any trace, and where blocks run."""
        return {
            "idle": self.model_runner.interleaver.idle,
            "main_thread": threading.current_thread() is threading.main_thread(),
        }

    def shutdown(self) -> None:
        """Send what is left, then shut down as stock."""
        outbox = getattr(self, "interpose_outbox", None)
        if outbox is not None:
            outbox.close()
        loops = getattr(getattr(self.model_runner, "interleaver", None), "loops", None)
        if loops is not None:
            loops.close()
        if self.interpose_sandboxes is not None:
            self.interpose_sandboxes.close()
        gc.unfreeze()
        gc.enable()  # Traces may still be held.
        super().shutdown()
