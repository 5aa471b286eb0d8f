"""Captured graphs with taps in vLLM's V2 runner.

They stand in for the runner's graph manager in a step with loops in the tables.

vLLM's own graphs hold compiled code, which calls no modules. So a step with taps replays a graph of the uncompiled model, which
is captured between two steps when the first step needs it. Its sizes are those of vLLM's own graphs, so that inputs are padded
alike, and its output goes to vLLM's own buffer. A batch with prompts takes the sizes too, where the model's attention allows
prompts in graphs.

A step in which blocks run as they are takes a chain of such graphs, with breaks where the blocks wait
(`executor.graphs.segments`).

The runner asks its manager for a graph before it writes the inputs of the step. So a capture may use the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer, get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, prepare_inputs_to_capture

from executor.graphs.cache import Entry, GraphCache, Key
from executor.graphs.capture import Captured, CaptureFailed, CudaRecorder, Recorder, capture
from executor.graphs.chain import Chain, Segmented
from executor.graphs.dispatch import Decision, Dispatcher, Kind, Step
from executor.graphs.limits import GraphLimits
from executor.graphs.loops import TableLoops
from executor.graphs.segments import Asked, run
from executor.graphs.tickets import Event
from executor.model.bits import same_bits
from executor.plugin.captures import Captures, why_not_recorded

logger = init_logger(__name__)

# How far a graph with adapters may be from hooks: the norm of the difference over the norm of what the model gives.
NEAR = 0.02
# What the loops have left, [bytes], and what the model gives, [tokens, hidden].
_Left = tuple[torch.Tensor, torch.Tensor]


class TableGraphs:
    """The graphs of one worker, in the place of the runner's manager.

    Args:
        runner: the V2 runner, warmed up.
        loops: the loops in the tables.
        limits: the bounds of graphs.
        captures: what ranks that share the model have in common of their captures.

    Attributes:
        dispatcher: decides for each step.
        decision: how the running step runs.
    """

    def __init__(self, runner: Any, loops: TableLoops, limits: GraphLimits, captures: Captures) -> None:
        self._runner = runner
        self._manager = runner.cudagraph_manager
        self._loops = loops
        self._captures = captures
        self._model = runner.model
        self._recorder: Recorder = CudaRecorder(runner.device, self._manager.pool)
        self._most_kept = limits.chain_bytes
        self._warm: set[tuple[int, int]] = set()  # tokens and adapters
        self._sizes = self._usable_sizes()
        self._mixed = self._holds_prompts()
        self.dispatcher = Dispatcher(
            self,
            GraphCache(limits.graphs, limits.graph_bytes, Event.now),
            on=bool(self._sizes),
            prompts=self._mixed,
        )
        self.decision = Decision(Kind.STOCK)
        self._asked = Asked()
        self._fits: BatchExecutionDescriptor | None = None

    def _usable_sizes(self) -> list[int]:
        """Return the numbers of tokens for which there are buffers, in rising order."""
        hidden = self._manager.hidden_states
        if hidden is None or self._has_state():
            return []
        sizes = sorted(self._runner.vllm_config.compilation_config.cudagraph_capture_sizes or ())
        return [size for size in sizes if size <= len(hidden)]

    def _has_state(self) -> bool:
        """Whether a layer carries state from step to step; its first step cannot be run twice."""
        groups = [group for groups in self._runner.attn_groups for group in groups]
        return any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)

    def _holds_prompts(self) -> bool:
        support = get_attn_cg_support(self._runner.attn_groups, self._runner.vllm_config)
        return bool(support.min_cg_support == AttentionCGSupport.ALWAYS)

    # What the runner calls.

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """Decide how the step runs; return the sizes of its graph, or that it runs eager."""
        if self._runner.repeats:
            if self._fits is not None:
                self.dispatcher.repeat()
                return self._fits
            self._runner.repeats = False  # a capture may come, which writes over the tables' rows
        found = self._manager.dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
        )
        prompt = uniform_token_count != 1
        fits = found if found.cg_mode == CUDAGraphMode.FULL and found.num_tokens in self._sizes else None
        if fits is None and self._mixed:
            size = next((size for size in self._sizes if size >= num_tokens), None)
            if size is not None:
                requests = min(size, self._manager.max_num_reqs)
                loras = found.num_active_loras
                full = BatchExecutionDescriptor(CUDAGraphMode.FULL, size, requests, num_active_loras=loras)
                fits = full if requests >= num_reqs else None
        self.decision = self.dispatcher.decide(self._step(fits, prompt))
        self._fits = fits if self.decision.kind is Kind.GRAPH else None
        if fits is not None and self.decision.entry is not None:
            return fits
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs, num_active_loras=num_active_loras
        )

    def _step(self, fits: BatchExecutionDescriptor | None, prompt: bool) -> Step:
        """Return what the coming step needs."""
        runner = self._runner
        sites, programs = self._loops.sites_of(runner.riding), self._loops.programs_of(runner.riding)
        if not runner.tracing:
            return Step(fits, prompt, sites, programs)
        hooks = runner.interleaver.hooks  # they still say what the last step with blocks asked for
        self._asked.note(hooks.asked, hooks.assigned)
        config = runner.vllm_config
        general = "loops run beside blocks at no site" if runner.riding and not sites else ""
        if config.parallel_config.world_size > 1 or config.lora_config is not None:
            general = "segments are for one rank, without adapters"
        return Step(fits, prompt, sites, programs, self._asked.breaks, general)

    def run_fullgraph(self, descriptor: BatchExecutionDescriptor) -> torch.Tensor:  # [tokens, hidden]
        """Run the step in its graph, or in segments; return what the model gives."""
        entry = self.decision.entry
        assert entry is not None
        if self.decision.kind is Kind.SEGMENTS:
            self._run_segments(entry, descriptor.num_tokens)
        else:
            self.dispatcher.run(entry)
            if not entry.checked:
                self._fits = None
        hidden: torch.Tensor = self._manager.hidden_states[: descriptor.num_tokens]
        return hidden

    def _run_segments(self, entry: Entry, size: int) -> None:
        """Run a step with blocks in segments, as far as these go."""
        runner, sites = self._runner, entry.key.sites
        interleaver, metadata = runner.interleaver, runner.metadata
        slots = build_slot_mappings_by_layer(runner.laid_out[1], runner.kv_cache_config)

        def eager() -> None:
            with self._loops.hooked(sites, ()):
                self._run(metadata, slots, size, bool(sites))

        with self._context(metadata, slots, size):
            chain = entry.graph.begin() if self.dispatcher.check(entry) else None
            complete = run(chain, interleaver.hooks, lambda: interleaver.begin_step(runner._batch()), eager)
            if chain is not None:
                self.dispatcher.ran(complete)
            interleaver.check_cache()

    # What the dispatcher calls: `executor.graphs.dispatch.Device`.

    def capture(self, key: Key) -> Captured:
        """Capture a graph of the uncompiled model with the taps of some sites.

        All ranks capture it, and have it or not alike.

        Raises:
            CaptureFailed: nothing of the graph stays.
        """
        captured, failed = None, CaptureFailed("another rank could not capture it", out_of_memory=False)
        try:
            captured = self._captured(key)
        except CaptureFailed as error:
            failed = error
        size = self._captures.kept(None if captured is None else captured.size)
        if captured is None or size is None:
            raise failed
        assert isinstance(key.descriptor, BatchExecutionDescriptor)
        self._warm.add((key.descriptor.num_tokens, key.descriptor.num_active_loras))
        return Captured(captured.graph, size)

    def _captured(self, key: Key) -> Captured:
        """Capture a graph on this rank; raises as `capture`."""
        descriptor = key.descriptor
        assert isinstance(descriptor, BatchExecutionDescriptor)
        size, tables = descriptor.num_tokens, key.breaks is None or bool(key.sites)
        self._loops.blank(size)
        runner, recorder = self._runner, self._recorder
        broken: AbstractContextManager[None] = nullcontext()
        if key.breaks is not None:
            # Most locations have up to two tensors of the hidden size, each of which is kept and copied.
            kept = 4 * len(key.breaks.spots) * self._manager.hidden_states[:size].nbytes
            if kept > self._most_kept:
                raise CaptureFailed(f"{len(key.breaks.spots)} breaks of {size} rows", out_of_memory=False)
            recorder = segmented = Segmented(recorder, runner.interleaver.hooks.tree, key.breaks, size)
            broken = segmented.hooked()
        in_use = list(runner.lora_state.lora_requests.values()) if descriptor.num_active_loras else []

        def prepare() -> Callable[[], None]:
            self._set_adapters(in_use, size)
            metadata, slots = prepare_inputs_to_capture(
                descriptor.num_reqs or min(size, self._manager.max_num_reqs),
                size,
                runner.model_state,
                runner.input_buffers,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
                full_cudagraph=True,
                max_query_len=descriptor.max_query_len or descriptor.uniform_token_count,
            )
            runner.input_buffers.is_padding.fill_(True)
            return lambda: self._run(metadata, slots, size, tables)

        # The kernels of a program may not be compiled yet.
        warm = (size, descriptor.num_active_loras) not in self._warm or bool(key.plans)
        try:
            with torch.inference_mode(), runner.kernels.used(), self._loops.unchanged(key.plans):
                with self._loops.hooked(key.sites, key.plans), broken, self._captures.taking_part():
                    return capture(recorder, prepare, warm)
        except CaptureFailed as failed:
            logger.warning("a CUDA graph with blocks could not be captured: %s", failed)
            raise
        except Exception as error:  # a defect of ours, of which the engine must not die
            logger.exception("a CUDA graph with blocks could not be captured")
            raise CaptureFailed(str(error), out_of_memory=False) from error

    def _set_adapters(self, adapters: list[Any], rows: int) -> None:
        """Have so many rows use the first of some adapters, or none.

        A graph holds the kernels of adapters, or does not. Which row uses which adapter they read from vLLM's buffers, which the
        runner writes for each step.
        """
        if self._runner.lora_config is not None:
            used = adapters[:1]
            numbers = (used[0].lora_int_id if used else 0,) * rows
            self._runner._set_active_loras(numbers, numbers, set(used))

    def replay(self, graph: Any) -> None:
        """Replay a graph on the inputs of the step."""
        graph.replay()

    def agrees(self, graph: Any, key: Key) -> bool:
        """Replay a graph, run the step eager with hooks, and return whether all values are equal.

        All ranks return the same. A chain is replayed with nobody served.
        """
        descriptor = key.descriptor
        assert isinstance(descriptor, BatchExecutionDescriptor)
        runner, size = self._runner, descriptor.num_tokens
        if key.breaks is not None:
            return self._chain_agrees(graph, key, size)
        if not descriptor.num_active_loras:
            return self._captures.equal(_same(*self._both(graph, key, size)))
        # vLLM's kernels of adapters add in any order, so only a pass without adapters has the same bits each time.
        self._set_adapters([], size)
        with self._loops.unchanged(key.plans):
            equal = _same(*self._both(graph, key, size))
        batch = runner.prepared
        used = runner.lora_state.make_lora_inputs(batch.req_ids, batch.idx_mapping_np, batch.num_scheduled_tokens)
        runner._set_active_loras(*used)
        self._loops.again()
        (_, mine), (_, theirs) = self._both(graph, key, size)
        apart = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        return self._captures.equal(equal and bool(apart <= NEAR))

    def _both(self, graph: Any, key: Key, size: int) -> tuple[_Left, _Left]:
        """Replay a graph, then run the step eager with hooks; return what each has left."""
        runner = self._runner
        batch, tokens = runner.prepared, runner.prepared.num_tokens
        with self._loops.unchanged(key.plans):
            graph.replay()
        mine = self._loops.read_now(), self._manager.hidden_states[:tokens].clone()
        tables, mappings = runner.laid_out
        metadata = runner.model_state.prepare_attn(
            batch, CUDAGraphMode.FULL, tables, mappings, runner.attn_groups, runner.kv_cache_config
        )
        slots = build_slot_mappings_by_layer(mappings, runner.kv_cache_config)
        self._loops.again()
        with runner.kernels.used(), self._loops.hooked(key.sites, key.plans):
            self._run(metadata, slots, size)
        return mine, (self._loops.read_now(), self._manager.hidden_states[:tokens].clone())

    def _chain_agrees(self, chain: Chain, key: Key, size: int) -> bool:
        """Return whether a chain leaves at its breaks, at the end and in the tables what hooks see."""
        runner, tokens, hidden = self._runner, self._runner.prepared.num_tokens, self._manager.hidden_states
        slots = build_slot_mappings_by_layer(runner.laid_out[1], runner.kv_cache_config)
        chain.begin()
        while (at := chain.go_on()) is not None:
            at.pass_by()
        mine, read = hidden[:tokens].clone(), self._loops.read_now() if key.sites else None
        if key.sites:
            self._loops.again()
        with self._loops.hooked(key.sites, ()), chain.compared(runner.interleaver.hooks.tree, tokens) as found:
            self._run(runner.metadata, slots, size, bool(key.sites))
        same = all(found) and same_bits(mine, hidden[:tokens])
        if read is not None:
            same = same and torch.equal(read, self._loops.read_now())
            self._loops.again()
        return same

    def _run(self, metadata: Any, slots: Any, size: int, tables: bool = True) -> None:
        """Run what a graph holds: the model, and what the tables do when it has run."""
        self._manager.hidden_states[:size] = self._forward(metadata, slots, size)
        if tables:
            self._loops.ran(slots, size)

    def _context(self, metadata: Any, slots: Any, size: int) -> AbstractContextManager[Any]:
        """Return the forward context of a step."""
        context: AbstractContextManager[Any] = set_forward_context(
            metadata,
            self._runner.vllm_config,
            num_tokens=size,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slots,
            skip_compiled=True,
            is_padding=self._runner.input_buffers.is_padding[:size],
        )
        return context

    def _forward(self, metadata: Any, slots: Any, size: int) -> torch.Tensor:
        """Run the uncompiled model on the runner's buffers; return [size, hidden]."""
        buffers = self._runner.input_buffers
        with self._context(metadata, slots, size):
            output: torch.Tensor = self._model(
                input_ids=buffers.input_ids[:size],
                positions=buffers.positions[:size],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return output


def _same(one: _Left, other: _Left) -> bool:
    """Return whether two passes left the same.

    Bits are compared, because other dtypes than the model's lie there too, as elements that may be no numbers.
    """
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def why_not(runner: Any) -> str:
    """Return why a runner can have no graphs with taps, "" if it can.

    Its loops in the tables then run at hooks, in eager steps.
    """
    if getattr(runner, "cudagraph_manager", None) is None or runner.cudagraph_manager.hidden_states is None:
        return "the engine captures no full graphs"
    if runner.uses_inputs_embeds or runner.use_aux_hidden_state_outputs or runner.is_encoder_decoder:
        return "the model takes or gives more than hidden states"
    if runner.pcp_manager is not None or runner.ubatch_runner is not None:
        return "a step's rows are spread"
    if runner.lora_config is not None and runner.lora_config.specialize_active_lora:
        return "the kernels of adapters depend on how many a step uses"
    return why_not_recorded(get_tp_group().device_communicator)
