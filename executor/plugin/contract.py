"""The seam to vLLM: every name of vLLM that the project needs, and why.

The contract covers modules, classes, functions, parameters, attributes and environment variables.

`python -m executor.plugin.contract` checks the installed vLLM against it, and another version by the path of its package:
`docs/upgrading-vllm.md`.

Size: one table, and nothing in it runs.

vLLM calls these of ours:

    executor.plugin.config        `worker_cls`, `scheduler_cls`, `distributed_executor_backend`: what vLLM is told to use
    InterposeWorker               load_model, determine_available_memory, compile_or_warm_up_model, execute_model, shutdown:
                                  as any worker's
      InterposeGPUWorker          _make_model_runner: gives our runner
      InterposeCPUWorker          init_device: puts our runner in the place of vLLM's
      CPUMends                    load_model, get_kv_cache_spec: what vLLM's CPU build gets wrong is avoided
      interpose_*                 by name, over `collective_rpc`
    InterleavingRunner            execute_model: begins a step, and finds out whether it is traced;
                                  sample_tokens: the step's output, with the requests whose blocks ended
      InterleavingRunnerV1        _model_forward, _sample
        GPURunnerV1               _determine_batch_execution_and_padding
      GPURunnerV2                 prepare_inputs, sample; `_NoGraphs` and `_Begun` in the place of graph manager and model
    EndedAsyncOutput              get_output: the output of a step that is still on its way from the device
    InterposeScheduler            _enqueue_waiting_request, finish_requests, get_num_unfinished_requests, schedule,
                                  update_draft_token_ids, update_from_output
    LazyRayExecutor               _init_executor, _get_actor_resource_kwargs, start_worker_monitor, shutdown
      Answers                     wait_until_ready, dequeue, shutdown: in the place of a worker's `MessageQueue`
    LazyWorkerProc                run

We call the rest of vLLM that is listed here: its engine, its configuration, its process groups, its forward context, its layers
and their attributes, its kernels and its environment variables. An entry says what it is needed for. `Source` entries are
behaviours that no signature shows; they are recognised in vLLM's source, and looked into when it no longer says so.
"""

from __future__ import annotations

import sys

from executor.plugin.contract_check import main
from executor.plugin.contract_entries import Attributes, Call, Exactly, Group, Import, Method, Source, Variable

VERSION = "0.32.0"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
_V2 = "vllm.v1.worker.gpu"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_QUEUE = "vllm.v1.core.sched.request_queue"
_RAY = "vllm.v1.executor.ray_executor_v2"
_MULTIPROC = "vllm.v1.executor.multiproc_executor"
_MESSAGES = "vllm.distributed.device_communicators.shm_broadcast"
_PARALLEL = "vllm.distributed.parallel_state"
_LAYERS = "vllm.model_executor.layers"
_LINEAR = f"{_LAYERS}.linear"
_VOCABULARY = f"{_LAYERS}.vocab_parallel_embedding"
_MOE = f"{_LAYERS}.fused_moe"
_ATTENTION = f"{_LAYERS}.attention.Attention"
_LATENT = f"{_LAYERS}.attention.MLAAttention"
_BACKENDS = "vllm.v1.attention.backends"

WORKER = Group(
    "the worker",
    "executor/plugin",
    (
        Method(
            f"{_WORKER}.load_model",
            "*, load_dummy_weights=False",
            "sandboxed processes load what they need while the model loads",
        ),
        Method(f"{_CPU_WORKER}.load_model", "*, load_dummy_weights=False", "the same on CPUs"),
        Method(f"{_WORKER}.determine_available_memory", "", "the start says that the model is compiled or measured"),
        Method(f"{_CPU_WORKER}.determine_available_memory", "", "the same on CPUs"),
        Method(f"{_WORKER}.compile_or_warm_up_model", "", "the module tree is recorded when the model has warmed up"),
        Method(f"{_CPU_WORKER}.compile_or_warm_up_model", "", "the same on CPUs"),
        Call(f"{_WORKER}.execute_model", "scheduler_output", "a step of a pipeline stage runs inside our method"),
        Method(f"{_WORKER}.shutdown", "", "what is left in the outbox is sent before the worker goes"),
        Method(f"{_WORKER}._make_model_runner", "", "the runner on GPUs is ours"),
        Method(f"{_CPU_WORKER}.init_device", "", "the runner on CPUs is ours"),
        Method(f"{_WORKER}.get_kv_cache_spec", "", "on CPUs no layer gives a state in the middle of a step"),
        Import("vllm.v1.kv_cache_interface.KVCacheSpec", "what a layer keeps in the cache"),
        Attributes(
            "vllm.v1.kv_cache_interface.MambaSpec",
            _names("num_prefill_checkpoint_blocks prefill_checkpoint_alignment"),
            "whether a layer gives a state in the middle of a step",
        ),
        Attributes(
            "vllm.config.ModelConfig", _names("is_deepseek_mla"), "latent attention rotates without the kernel on CPUs"
        ),
        Source(
            f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_cpu",
            ("ops.rotary_embedding(positions, query, key, self.head_size",),
            "the kernel on CPUs takes queries of two dimensions, and latent attention has three",
        ),
        Source(
            f"{_LAYERS}.mamba.ops.cpu.mamba_ssm._mamba_chunk_scan_combined_fwd_cpu",
            ("all_states = torch.zeros(batch, nheads, headdim, dstate", "return all_states"),
            "the kernel on CPUs gives one state of each request, whatever it is asked for",
        ),
        Source(
            f"{_WORKER}._init_workspace_and_model_runner",
            ("= self._make_model_runner()",),
            "the factory is what makes it",
        ),
        Source(
            f"{_CPU_WORKER}.init_device",
            ("self.model_runner = CPUModelRunner(self.vllm_config, torch.device('cpu'))",),
            "it has no factory, so the runner is made once more, with the same arguments",
        ),
        Attributes(
            _WORKER,
            _names("vllm_config model_config parallel_config rank device model_runner use_v2_model_runner"),
            "what the interleaver's host is made of",
        ),
        Attributes(_CPU_WORKER, _names("vllm_config model_config parallel_config rank device"), "the same on CPUs"),
        Source(
            "vllm.v1.worker.worker_base.WorkerWrapperBase.execute_model",
            ("self.worker.execute_model(scheduler_output)",),
            "a pipeline stage's worker has another `execute_model` as an attribute of its own",
        ),
        Source(
            "vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker",
            ("resolve_obj_by_qualname(parallel_config.worker_cls)",),
            "the worker is named by a text",
        ),
        Source(
            f"{_MULTIPROC}.WorkerProc._execute_worker_rpc",
            ("func = getattr(self.worker, method)", "output = func(*args, **kwargs)"),
            "`interpose_*` methods are called by name, between two steps",
        ),
        Call(
            f"{_RUNNER}._dummy_run",
            "num_tokens, *, is_profile",
            "the tree is recorded, and a scan runs, on dummy tokens",
        ),
        Call(f"{_RUNNER_V2}._dummy_run", "num_tokens, *, is_profile", "the same in the second runner"),
        Call(f"{_RUNNER}.get_model", "", "the modules"),
        Call(f"{_RUNNER_V2}.get_model", "", "the modules"),
        Attributes(
            _RUNNER,
            _names("device max_num_tokens intermediate_tensors"),
            "a stage's dummy step goes on with the tensors of the stage before",
        ),
        Attributes(_RUNNER_V2, _names("device max_num_tokens intermediate_tensors"), "the same in the second runner"),
        Source(
            f"{_RUNNER}._dummy_run",
            ("self.sync_and_gather_intermediate_tensors(",),
            "a dummy step goes on with what a stage has",
        ),
        Source(
            f"{_RUNNER}.sync_and_gather_intermediate_tensors",
            ("v[:num_tokens] for k, v in self.intermediate_tensors.items()",),
            "it takes the first rows of what the stage before gave",
        ),
        Attributes("vllm.sequence.IntermediateTensors", _names("tensors"), "what a stage hands to the next one"),
        Attributes(
            "vllm.model_executor.models.interfaces.SupportsPP",
            _names("make_empty_intermediate_tensors"),
            "a stage needs the tensors before its first step",
        ),
        Call("vllm.config.set_current_vllm_config", "vllm_config", "modules look the configuration up when they run"),
        Call("vllm.distributed.get_tp_group", "", "the ranks of a stage"),
        Call("vllm.distributed.get_pp_group", "", "the stages"),
        Call("vllm.forward_context.get_forward_context", "", "what belongs to the step that is running"),
        Call("vllm.logger.init_logger", "name", "messages go where vLLM's go"),
        Call("vllm.utils.gc_utils.freeze_gc_heap", "", "what lives as long as the engine is not looked through again"),
        Import("vllm.v1.core.sched.output.SchedulerOutput", "the type of what a step is told"),
    ),
)

RUNNERS = Group(
    "the runners",
    "executor/plugin",
    (
        Call(f"{_RUNNER}.execute_model", "scheduler_output, *args, **kwargs", "a step begins in our method"),
        Call(f"{_RUNNER_V2}.execute_model", "scheduler_output, *args, **kwargs", "a step begins in our method"),
        Method(f"{_RUNNER}.sample_tokens", "grammar_output", "the step's output leaves through our method"),
        Method(f"{_RUNNER_V2}.sample_tokens", "grammar_output", "the step's output leaves through our method"),
        Call(
            f"{_RUNNER}._determine_batch_execution_and_padding",
            "*args, force_eager, **kwargs",
            "a traced step takes no CUDA graph",
        ),
        Call(
            f"{_RUNNER}._model_forward",
            "*args, input_ids, positions, inputs_embeds, **kwargs",
            "the model runs in it, in the forward context",
        ),
        Method(f"{_RUNNER}._sample", "logits, spec_decode_metadata", "logits and samples are visited around it"),
        Source(
            f"{_RUNNER}.execute_model",
            (
                "req_ids = self.input_batch.req_ids",
                "tokens = [scheduler_output.num_scheduled_tokens[i] for i in req_ids]",
                "self._determine_batch_execution_and_padding(",
                "set_forward_context(",
                "self._model_forward(input_ids=input_ids, positions=positions,",
                "inputs_embeds=inputs_embeds,",
                "return hidden_states",
                "self.execute_model_state = ExecuteModelState(",
                "return None",
            ),
            "rows are in the batch's order, the model is run by keywords, and a stage before the last returns tensors",
        ),
        Source(
            f"{_RUNNER}.sample_tokens",
            ("sampler_output = self._sample(logits, spec_decode_metadata)",),
            "samples are made in the one method that is overridden",
        ),
        Attributes(_RUNNER, _names("vllm_config"), "whether steps are scheduled ahead"),
        Attributes(_RUNNER_V2, _names("vllm_config"), "whether steps are scheduled ahead"),
        Attributes(
            _RUNNER,
            _names("input_batch discard_request_mask"),
            "rows of requests, and chunks whose samples are dropped",
        ),
        Attributes(
            "vllm.v1.worker.gpu_input_batch.InputBatch", _names("req_ids num_reqs generators"), "the order of the batch"
        ),
        Attributes("vllm.v1.utils.CpuGpuBuffer", _names("np"), "the mask as it is on the CPU"),
        Source(
            f"{_RUNNER}._bookkeeping_sync",
            ("gen = self.input_batch.generators.get(int(i))", "gen.set_offset("),
            "generators of cut prompts are set back by an offset, which those on CPUs have not",
        ),
        Call(_CPU_RUNNER, "vllm_config, device", "our CPU runner is made as vLLM makes its own"),
        Call(_RUNNER, "vllm_config, device", "our runner is made as vLLM makes its own"),
        Call(_RUNNER_V2, "vllm_config, device", "our runner is made as vLLM makes its own"),
        Call(f"{_RUNNER_V2}.prepare_inputs", "*args, **kwargs", "rows of requests are those of the batch it prepares"),
        Method(
            f"{_RUNNER_V2}.sample",
            "hidden_states, input_batch, grammar_output",
            "logits and samples are visited in and after it",
        ),
        Source(
            f"{_RUNNER_V2}.execute_model",
            (
                "dispatch_cg_and_sync_dp(self.cudagraph_manager,",
                "input_batch = self.prepare_inputs(",
                "attn_metadata = self.model_state.prepare_attn(",
                "set_forward_context(",
                "self.model(**model_inputs)",
            ),
            "a traced step finds a manager without graphs and another model where it looks for its own",
        ),
        Source(
            "vllm.v1.worker.gpu.dp_utils.dispatch_cg_and_sync_dp",
            ("cudagraph_manager.dispatch(num_reqs, num_tokens,", "num_active_loras=num_active_loras"),
            "the manager without graphs takes the first two by position and the adapters by name",
        ),
        Call(
            f"{_RUNNER_V2}.prepare_attn", "*args, **kwargs", "a graph's first step is run again on the same cache slots"
        ),
        Call(
            f"{_V2}.attn_utils.build_slot_mappings_by_layer",
            "slot_mappings, kv_cache_config",
            "as a step's context has it",
        ),
        Call(f"{_V2}.attn_utils.get_attn_cg_support", "attn_groups, vllm_config", "whether prompts can be in graphs"),
        Attributes(f"{_V2}.attn_utils.AttentionCGSupportInfo", _names("min_cg_support"), "the same"),
        Attributes("vllm.v1.attention.backend.AttentionCGSupport", _names("ALWAYS"), "the same"),
        Import("vllm.v1.kv_cache_interface.MambaSpec", "models whose layers carry state have no graphs of ours"),
        Call(
            f"{_V2}.cudagraph_utils.prepare_inputs_to_capture",
            "num_reqs, num_tokens, model_state, input_buffers, block_tables, attn_groups, kv_cache_config, *, "
            "full_cudagraph, max_query_len",
            "the inputs of a capture",
        ),
        Attributes(
            f"{_V2}.cudagraph_utils.ModelCudaGraphManager",
            _names("pool hidden_states max_num_reqs run_fullgraph"),
            "our graphs share memory, output and sizes with vLLM's",
        ),
        Attributes(
            "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator",
            _names("ca_comm fi_pcie_ipc_ar_comm aiter_ar_comm"),
            "what adds up over the ranks, in our graphs too",
        ),
        Attributes(
            "vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce",
            _names("disabled _IS_CAPTURING register_graph_buffers"),
            "a graph's addresses are exchanged when all ranks have captured it",
        ),
        Call(
            f"{_RUNNER_V2}._set_active_loras",
            "prompt_lora_mapping, token_lora_mapping, lora_requests",
            "the rows of a capture use an adapter or none",
        ),
        Call(
            f"{_RUNNER}._set_active_loras",
            "prompt_lora_mapping, token_lora_mapping, lora_requests",
            "the rows of a scan use no adapter",
        ),
        Attributes(
            "vllm.v1.worker.gpu.lora_utils.LoraState",
            _names("lora_requests make_lora_inputs"),
            "the adapters of requests",
        ),
        Attributes("vllm.config.lora.LoRAConfig", _names("specialize_active_lora"), "kernels that graphs cannot share"),
        Source(
            "vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce.capture",
            ("self._IS_CAPTURING = True", "self._IS_CAPTURING = False", "self.register_graph_buffers()"),
            "our captures do the same, but exchange no addresses if a rank could not capture",
        ),
        Attributes(
            _RUNNER_V2,
            _names("input_buffers block_tables attn_groups kv_cache_config model_state")
            + _names("uses_inputs_embeds use_aux_hidden_state_outputs is_encoder_decoder pcp_manager ubatch_runner")
            + _names("lora_config lora_state"),
            "what a capture needs, and which models and layouts it cannot be made for",
        ),
        Method(
            "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.dispatch",
            "num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len=None, num_ubatches=1",
            "the manager without graphs answers in its place",
        ),
        Source(
            f"{_RUNNER_V2}.sample",
            ("sampler_output = self.sampler(logits, input_batch)", "return (sampler_output,"),
            "a traced step finds a sampler that shows the logits first, and gives three values",
        ),
        Attributes(
            _RUNNER_V2,
            _names("cudagraph_manager model model_state sampler"),
            "what a traced step replaces for its time",
        ),
        Attributes(
            "vllm.v1.worker.gpu.input_batch.InputBatch",
            _names("req_ids num_reqs num_tokens_after_padding query_start_loc_np"),
            "the rows of each request",
        ),
        Call(
            "vllm.v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor",
            "*, cg_mode, num_tokens, num_reqs, num_active_loras",
            "the answer of the manager without graphs",
        ),
        Attributes("vllm.config.compilation.CUDAGraphMode", _names("NONE"), "no graph"),
        Exactly(
            "vllm.v1.outputs.AsyncModelRunnerOutput",
            "abstract",
            _names("get_output"),
            "the output of a traced step wraps vLLM's, and must be whole to be made",
        ),
        Attributes(
            "vllm.v1.outputs.ModelRunnerOutput",
            _names("req_ids req_id_to_index sampled_token_ids"),
            "its fields are copied into our subclass",
        ),
        Attributes("vllm.v1.outputs.SamplerOutput", _names("sampled_token_ids"), "blocks read and change the samples"),
        Attributes(
            "vllm.v1.worker.gpu.sample.output.SamplerOutput",
            _names("sampled_token_ids"),
            "the same in the second runner",
        ),
        Attributes(
            "vllm.v1.core.sched.output.SchedulerOutput",
            _names("scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens")
            + _names("finished_req_ids"),
            "which requests a step has, and which are new",
        ),
        Attributes(
            "vllm.v1.core.sched.output.NewRequestData",
            _names("req_id sampling_params prompt_token_ids num_computed_tokens"),
            "a block comes in the extra arguments of its request",
        ),
        Attributes(
            "vllm.v1.core.sched.output.CachedRequestData", _names("resumed_req_ids"), "requests that were evicted"
        ),
        Attributes(
            "vllm.forward_context.ForwardContext",
            _names("skip_compiled attn_metadata slot_mapping all_moe_layers"),
            "a traced step runs uncompiled, and its cache is looked at",
        ),
        Source(
            "vllm.compilation.decorators",
            ("get_forward_context().skip_compiled",),
            "the compiled model calls its modules when the context says so",
        ),
        Call(
            "vllm.forward_context.set_forward_context",
            "attn_metadata, vllm_config, *, skip_compiled",
            "a module that a block applies runs in a context without a batch",
        ),
    ),
)

SCHEDULER = Group(
    "the scheduler",
    "executor/plugin",
    (
        Call(
            _SCHEDULER,
            "*, vllm_config, kv_cache_config, structured_output_manager, include_finished_set, log_stats, block_size, "
            "hash_block_size",
            "tests and the engine make ours as vLLM makes its own",
        ),
        Source(
            "vllm.v1.engine.core.EngineCore.__init__",
            ("Scheduler = vllm_config.scheduler_config.get_scheduler_cls()", "Scheduler(vllm_config=vllm_config,"),
            "our class chooses the asynchronous one by `vllm_config` when it is made",
        ),
        Method(f"{_SCHEDULER}._enqueue_waiting_request", "request", "a traced request goes to the room instead"),
        Source(
            f"{_SCHEDULER}.add_request",
            ("self._enqueue_waiting_request(request)", "self.requests[request.request_id] = request"),
            "every new request comes through that method, and `requests` has them in the order in which they came",
        ),
        Method(
            f"{_SCHEDULER}.finish_requests",
            "request_ids, finished_status",
            "a request that is given up leaves the room",
        ),
        Method(f"{_SCHEDULER}.get_num_unfinished_requests", "", "the requests in the room count too"),
        Source(
            f"{_SCHEDULER}.get_num_unfinished_requests",
            ("PauseState.PAUSED_ALL: return 0", "PauseState.PAUSED_NEW:", "num_waiting = len(self.kv_holding_waiting)"),
            "while the engine is paused, requests that have not started do not count",
        ),
        Source(
            "vllm.v1.core.sched.interface.SchedulerInterface.has_unfinished_requests",
            ("self.get_num_unfinished_requests() > 0",),
            "the engine goes on with its steps while that method counts requests",
        ),
        Method(f"{_SCHEDULER}.schedule", "throttle_prefills=False", "the room says which requests start in a step"),
        Method(
            f"{_SCHEDULER}.update_from_output",
            "scheduler_output, model_runner_output",
            "requests end with the step in which their blocks end or their stop strings are complete",
        ),
        Method(
            f"{_SCHEDULER}.update_draft_token_ids",
            "draft_token_ids",
            "no token is guessed for a request whose block lives",
        ),
        Import("vllm.v1.outputs.DraftTokenIds", "the guesses of a step"),
        Attributes("vllm.v1.outputs.DraftTokenIds", _names("req_ids"), "whose guesses they are"),
        Attributes(
            "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
            _names("bonus_logits_indices"),
            "the last row of each request among the rows of the logits",
        ),
        Call(
            f"{_SCHEDULER}._handle_blocked_waiting_request",
            "request",
            "a request that waits for its grammar cannot start",
        ),
        Import("vllm.v1.core.sched.async_scheduler.AsyncScheduler", "the base of the scheduler that is a step ahead"),
        Import("vllm.v1.engine.EngineCoreOutputs", "the type of what a step gives the frontend"),
        Attributes("vllm.v1.engine.EngineCoreOutputs", _names("scheduler_stats"), "the requests in the room count too"),
        Attributes(
            "vllm.v1.metrics.stats.SchedulerStats", _names("num_waiting_reqs"), "the requests in the room count too"
        ),
        Attributes(
            _SCHEDULER,
            _names(
                "requests running waiting vllm_config scheduler_config kv_cache_manager max_model_len hash_block_size"
            )
            + _names("max_num_running_reqs max_num_active_reqs kv_holding_waiting deferred_waiting pause_state")
            + _names("num_waiting_for_streaming_input"),
            "what runs, what waits, and how much room there is",
        ),
        Attributes(
            "vllm.v1.core.sched.interface.PauseState", _names("UNPAUSED"), "a paused engine starts no traced request"
        ),
        Import("vllm.v1.core.sched.interface.PauseState", "whether the engine is paused"),
        Source(
            f"{_SCHEDULER}.schedule",
            ("preempted_req = self.running.pop()", "drop_stale_output=self.requires_kv_delivery"),
            "requests are evicted from the end of `running`, where no traced ones are",
        ),
        Source(
            f"{_SCHEDULER}.schedule",
            (
                "if not preempted_reqs and self._pause_state != PauseState.PAUSED_ALL:",
                "request_queue = self.kv_holding_waiting",
                "request_queue = self.waiting",
                "num_running = len(self.running) + self.num_waiting_for_streaming_input",
                "if num_running >= self.max_num_active_reqs: break",
                "request = request_queue.peek_request()",
            ),
            "a step starts requests from the head of the queue, up to that number, and none if it evicts a request",
        ),
        Source(
            f"{_SCHEDULER}.schedule",
            (
                "num_new_tokens = min(num_new_tokens, request_token_budget)",
                "if new_blocks is None: if request.has_encoder_inputs: self.encoder_cache_manager.free(request) break",
                "request = request_queue.pop_request()",
            ),
            "a prompt is cut at the rows that are left, and no request passes a request for which there are no blocks",
        ),
        Source(
            f"{_SCHEDULER}.update_from_output",
            (
                "request.num_stale_output_tokens > 0",
                "if output_is_stale and request.drop_stale_output: continue",
                "req_index = model_runner_output.req_id_to_index[req_id]",
                "sampled_token_ids[req_index] if sampled_token_ids else []",
                "self._update_request_with_output(request, new_token_ids, is_stale=",
            ),
            "a request ends where its new tokens are looked at, and these lie so in a step's output",
        ),
        Source(
            "vllm.v1.core.sched.utils.check_stop",
            (
                "if last_token_id == sampling_params.eos_token_id:",
                "if last_token_id in (sampling_params.stop_token_ids or ()):",
                "request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens",
                "repetition_detection is not None",
                "return False",
            ),
            "what ends a request: workers find these two tokens too, and vLLM knows the lengths beforehand",
        ),
        Source(
            f"{_SCHEDULER}.schedule",
            (
                "request.num_computed_tokens + 2 - request.num_output_placeholders >= "
                "request.num_prompt_tokens + request.max_tokens",
                "self.max_model_len - request.num_computed_tokens - self.num_sampled_tokens_per_step",
            ),
            "no step is scheduled ahead for a request that has come to its length",
        ),
        Attributes(
            "vllm.sampling_params.SamplingParams",
            _names("stop stop_token_ids eos_token_id repetition_detection structured_outputs"),
            "what may end a request",
        ),
        Source(
            "vllm.v1.core.sched.utils.check_stop",
            ("request.num_output_tokens >= request.max_tokens",),
            "a block ends its request through `max_tokens`, whatever `min_tokens` says",
        ),
        Source(
            "vllm.v1.core.sched.async_scheduler.AsyncScheduler._update_after_schedule",
            ("request.num_output_placeholders += ",),
            "a traced request with a placeholder may have to sit out: its token is not known yet",
        ),
        Attributes(
            "vllm.v1.request.Request",
            _names("request_id sampling_params status max_tokens num_tokens num_prompt_tokens num_output_tokens")
            + _names("num_computed_tokens num_output_placeholders num_tokens_with_spec num_stale_output_tokens")
            + _names("drop_stale_output is_finished spec_token_ids"),
            "how far a request is",
        ),
        Attributes(
            "vllm.v1.request.Request",
            _names("_block_hasher block_hashes"),
            "the cache blocks of what a traced request's block may change are its own",
        ),
        Source(
            "vllm.v1.request.Request.update_block_hashes",
            ("self.block_hashes.extend(self._block_hasher(self))",),
            "the prompt has its hashes when a request comes; the method makes missing and dropped ones",
        ),
        Source(
            "vllm.v1.core.kv_cache_utils.get_request_block_hasher",
            ("request.block_hashes[-1] if request.block_hashes else None",),
            "a block's hash depends on the hash before, so that nothing behind a hash of the request's own is shared",
        ),
        Source(
            "vllm.v1.core.block_pool.BlockPool.cache_full_blocks",
            ("request.block_hashes, self.hash_block_size, block_size",),
            "other requests find a cache block by these hashes alone",
        ),
        Attributes(
            "vllm.v1.request.RequestStatus", _names("WAITING RUNNING PREEMPTED"), "whether a request has started"
        ),
        Call(
            f"{_QUEUE}.RequestQueue.remove_requests", "requests", "requests that are next go to the head of the queue"
        ),
        Call(
            f"{_QUEUE}.RequestQueue.prepend_requests", "requests", "requests that are next go to the head of the queue"
        ),
        Source(
            f"{_QUEUE}.FCFSRequestQueue.prepend_requests",
            ("self.extendleft(requests)",),
            "the first that is given comes out last, so requests are given in reverse",
        ),
        Attributes(
            "vllm.v1.core.kv_cache_manager.KVCacheManager",
            _names("block_pool coordinator empty_kv_cache_blocks"),
            "room in the cache",
        ),
        Attributes(
            "vllm.v1.core.kv_cache_manager.KVCacheBlocks", _names("blocks"), "no blocks, for each group of layers"
        ),
        Attributes(
            "vllm.v1.core.block_pool.BlockPool", _names("num_gpu_blocks get_num_free_blocks"), "room in the cache"
        ),
        Source(
            "vllm.v1.core.block_pool.BlockPool.__init__",
            ("self.null_block = self.free_block_queue.popleft()",),
            "one block of all stands for no block",
        ),
        Call(
            "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.get_num_blocks_to_allocate",
            "*, request_id, num_tokens, new_computed_blocks, num_encoder_tokens, total_computed_tokens, "
            "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap",
            "how many blocks a request may come to hold",
        ),
        Call(
            "vllm.v1.engine.detokenizer.IncrementalDetokenizer.from_new_request",
            "tokenizer, request",
            "stop strings are found with vLLM's own code",
        ),
        Call(
            "vllm.v1.engine.detokenizer.IncrementalDetokenizer.update", "new_token_ids, stop_terminated", "stop strings"
        ),
        Import("vllm.v1.engine.detokenizer.IncrementalDetokenizer", "stop strings"),
        Call("vllm.tokenizers.cached_tokenizer_from_config", "model_config", "stop strings"),
        Import("vllm.tokenizers.TokenizerLike", "its type"),
        Import("vllm.config.VllmConfig", "the type of the engine's configuration"),
    ),
)

KERNELS = Group(
    "the kernels of a traced step",
    "executor/plugin",
    (
        Attributes(
            "vllm.model_executor.custom_op.CustomOp",
            _names("_enforce_enable _forward_method enabled dispatch_forward"),
            "a module takes another kernel in a traced step",
        ),
        Call(
            "vllm.model_executor.custom_op.CustomOp.dispatch_forward",
            "*, compile_native",
            "the kernel of an engine that does not compile",
        ),
        Source(
            "vllm.model_executor.custom_op.CustomOp.forward",
            ("return self._forward_method(*args, **kwargs)",),
            "the kernel is looked up in each call",
        ),
        Call("vllm.ir.enable_torch_wrap", "enable", "ops are called directly"),
        Import("vllm.ir", "ops with several kernels"),
        Attributes("vllm.ir.op.IrOp", _names("registry"), "every op by its name"),
        Call("vllm.ir.op.IrOp.set_priority", "priority", "the order of an op's kernels, for a time"),
        Call(
            "vllm.platforms.interface.Platform.get_default_ir_op_priority",
            "vllm_config",
            "the order that an engine has that does not compile",
        ),
        Attributes(
            f"{_MOE}.runner.shared_experts.SharedExperts",
            _names("_stream"),
            "shared experts run on the step's own stream",
        ),
        Source(
            f"{_MOE}.runner.shared_experts.SharedExperts",
            ("self._stream is not None", "should_run_shared_in_aux_stream"),
            "without a stream they run after the router",
        ),
        Attributes("vllm.config.CompilationMode", _names("NONE"), "whether the engine compiles"),
        Attributes(
            "vllm.config.CompilationConfig",
            _names("mode custom_ops enabled_custom_ops disabled_custom_ops static_forward_context"),
            "the kernels that the user chose, and the layers with a cache",
        ),
        Attributes(
            "vllm.config.VllmConfig", _names("kernel_config compilation_config"), "the kernels that the user chose"
        ),
        Attributes("vllm.config.kernel.KernelConfig", _names("ir_op_priority"), "the kernels that the user chose"),
    ),
)

CONFIG = Group(
    "the configuration",
    "executor/plugin",
    (
        Import("vllm", "its version is checked when an engine starts"),
        Import("vllm.__version__", "its version is checked when an engine starts"),
        Import("vllm.platforms.current_platform", "CPUs or GPUs"),
        Attributes("vllm.platforms.interface.Platform", _names("is_cpu"), "CPUs or GPUs"),
        Attributes(
            "vllm.config.VllmConfig",
            _names(
                "model_config cache_config parallel_config scheduler_config lora_config load_config additional_config"
            )
            + _names("instance_id speculative_config structured_outputs_config"),
            "the parts of the configuration",
        ),
        Attributes(
            "vllm.config.ParallelConfig",
            _names(
                "worker_cls tensor_parallel_size pipeline_parallel_size data_parallel_size world_size placement_group"
            )
            + _names("enable_expert_parallel use_ubatching enable_batch_sharded_sampling prefill_context_parallel_size")
            + _names("decode_context_parallel_size assigned_physical_gpu_ids"),
            "options that lay rows out differently are refused",
        ),
        Attributes(
            "vllm.config.SchedulerConfig",
            _names("policy long_prefill_token_threshold max_num_scheduled_tokens max_num_batched_tokens max_num_seqs")
            + _names("scheduler_cls async_scheduling"),
            "options that order or cut traced requests are refused",
        ),
        Attributes(
            "vllm.config.CacheConfig",
            _names("cache_dtype kv_sharing_fast_prefill"),
            "caches that cannot be checked are refused",
        ),
        Attributes(
            "vllm.config.CacheConfig",
            _names("mamba_cache_mode"),
            "whether steps end at edges of cache blocks, inside of prompts",
        ),
        Attributes(
            "vllm.config.LoRAConfig",
            _names("fully_sharded_loras lora_dtype"),
            "adapters that cannot be traced are refused",
        ),
        Attributes(
            "vllm.config.ModelConfig",
            _names(
                "model served_model_name dtype max_model_len runner_type uses_mrope hf_config hf_text_config get_vocab_size"
            )
            + _names("multimodal_config")
            + _names("get_hidden_size get_head_size get_total_num_hidden_layers try_get_generation_config"),
            "what a model's description says",
        ),
        Attributes(
            "vllm.config.ModelConfig",
            _names("has_inner_state"),
            "a model that keeps a state in place of keys and values computes the whole prompt of every trace",
        ),
        Attributes(
            "vllm.config.MultiModalConfig",
            _names("language_model_only"),
            "models with several positions for each token are served for text",
        ),
        Attributes("vllm.config.LoadConfig", _names("load_format"), "each node checks that it has the model's files"),
        Attributes(
            "vllm.engine.arg_utils.AsyncEngineArgs",
            _names(
                "model tensor_parallel_size pipeline_parallel_size distributed_executor_backend worker_cls scheduler_cls"
            )
            + _names("additional_config speculative_config enforce_eager compilation_config optimization_level")
            + _names("cudagraph_capture_sizes max_cudagraph_capture_size gpu_memory_utilization kv_cache_memory_bytes")
            + _names("max_num_batched_tokens disable_log_stats enable_lora max_loras max_lora_rank"),
            "the options that are set, or whose absence is noticed",
        ),
        Variable("VLLM_TARGET_DEVICE", "a process that forks sandboxes asks no driver of GPUs"),
        Variable("VLLM_NO_USAGE_STATS", "no usage statistics leave a service"),
        Variable("VLLM_CPU_OMP_THREADS_BIND", "ranks on one machine share its cores"),
        Variable("VLLM_USE_V2_MODEL_RUNNER", "on CPUs blocks run in the V1 runner"),
        Variable("VLLM_CPU_KVCACHE_SPACE", "a user's own size of the cache counts"),
    ),
)

EXECUTOR = Group(
    "the executor",
    "executor/cluster",
    (
        Method(f"{_RAY}.RayExecutorV2._init_executor", "", "the workers are started in another way"),
        Method(f"{_RAY}.RayExecutorV2._get_actor_resource_kwargs", "", "a worker on CPUs asks for no device"),
        Method(f"{_RAY}.RayExecutorV2.start_worker_monitor", "inline=False", "lifelines tell of dead workers"),
        Method(f"{_RAY}.RayExecutorV2.shutdown", "", "lifelines end with the engine"),
        Source(
            f"{_RAY}.RayExecutorV2._init_executor",
            (
                "self._finalizer = weakref.finalize(self, self.shutdown)",
                "self.is_failed = False",
                "self.failure_callback = None",
                "self.shutting_down = False",
                "self.shutdown_lock = threading.Lock()",
                "self._get_parallel_sizes()",
                "self.rpc_broadcast_mq = MessageQueue(",
                "self.ray_worker_handles",
                ".initialize_worker.remote(",
                "assigned_physical_gpu_ids",
                ".wait_for_init.remote()",
                "handle.run()",
                "self.rpc_broadcast_mq.wait_until_ready()",
                "self.futures_queue",
                "self._post_init_executor()",
                "self.start_worker_monitor()",
                "self.output_rank = self._get_output_rank()",
            ),
            "our start sets what it sets, in its order",
        ),
        Call(
            f"{_RAY}.RayExecutorV2._get_parallel_sizes",
            "",
            "sets `world_size`, and gives the sizes for the actors' names",
        ),
        Call(f"{_RAY}.RayExecutorV2._build_runtime_env", "", "the actors' environment"),
        Call(f"{_RAY}.RayExecutorV2._is_driver_worker", "rank", "a rank's place"),
        Call(f"{_RAY}.RayExecutorV2._post_init_executor", "", "hooks of vLLM's own"),
        Call(f"{_RAY}.RayExecutorV2._get_output_rank", "", "which rank's output counts"),
        Attributes(
            f"{_RAY}.RayExecutorV2",
            _names("vllm_config parallel_config world_size is_failed failure_callback shutting_down shutdown_lock")
            + _names(
                "ray_worker_handles response_mqs rpc_broadcast_mq futures_queue output_rank _finalizer _monitor_thread"
            ),
            "what the inherited methods read",
        ),
        Source(
            f"{_RAY}.RayExecutorV2.shutdown",
            ("self.shutting_down", "self._join_monitor_thread()", "ray.kill(handle.actor)", "mq.shutdown()"),
            "it ends our thread, our actors and our queues",
        ),
        Source(
            f"{_MULTIPROC}.MultiprocExecutor.collective_rpc",
            ("mq.dequeue(timeout=", "check the stack trace above for the root cause"),
            "answers come over our queues, and a worker's error in this sentence",
        ),
        Source(
            f"{_MULTIPROC}.MultiprocExecutor.collective_rpc",
            ("Worker failed with error '",),
            "the reason of a start that failed is taken out of this sentence",
        ),
        Call(f"{_RAY}.RayWorkerHandle", "*, actor, rank, local_rank, node_id, bundle_id_idx", "one for each worker"),
        Attributes(f"{_RAY}.RayWorkerHandle", _names("actor rank local_rank run_ref run"), "one for each worker"),
        Call(
            f"{_RAY}.RayWorkerProc",
            "*, vllm_config, rank, input_shm_handle, is_driver_worker, is_driver_node",
            "the worker inside an actor",
        ),
        Call(
            f"{_RAY}.RayWorkerProc.initialize_worker",
            "*, local_rank, env_vars, distributed_init_method, assigned_physical_gpu_ids",
            "the worker gets its devices and loads the model",
        ),
        Call(f"{_RAY}.RayWorkerProc.wait_for_init", "", "the handle of the queue that the worker answers on"),
        Source(
            f"{_RAY}.RayWorkerProc.wait_for_init",
            ("'handle': self.worker_response_mq.export_handle()",),
            "the handle's name",
        ),
        Method(f"{_RAY}.RayWorkerProc.run", "", "names of shared memory go when all ranks have it"),
        Attributes(
            f"{_RAY}.RayWorkerProc",
            _names("worker_response_mq rpc_broadcast_mq"),
            "the queues of a worker: answers, and steps",
        ),
        Call(f"{_MULTIPROC}.FutureWrapper", "futures_queue, get_response", "the type of what is under way"),
        Call(
            "vllm.v1.executor.ray_utils.build_actor_name",
            "instance_id, rank, tp_size, pp_size, pcp_size",
            "actors are named as vLLM's",
        ),
        Import("vllm.v1.executor.ray_utils.WORKER_SPECIFIC_ENV_VARS", "variables that belong to one worker"),
        Call(
            "vllm.ray.ray_env.get_env_vars_to_copy",
            "*, exclude_vars, additional_vars, destination",
            "variables that workers get of the engine's",
        ),
        Call(
            f"{_MESSAGES}.MessageQueue",
            "n_reader, n_local_reader, *, max_chunk_bytes, connect_ip",
            "steps are broadcast on it",
        ),
        Call(f"{_MESSAGES}.MessageQueue.create_from_handle", "handle, rank", "the queue that a worker answers on"),
        Call(f"{_MESSAGES}.MessageQueue.export_handle", "", "workers open the queue by it"),
        Call(f"{_MESSAGES}.MessageQueue.wait_until_ready", "", "all readers are there"),
        Call(f"{_MESSAGES}.MessageQueue.dequeue", "timeout, indefinite", "an answer"),
        Call(f"{_MESSAGES}.MessageQueue.shutdown", "", "it wakes a reader"),
        Attributes(
            f"{_MESSAGES}.MessageQueue",
            _names("_is_local_reader buffer _spin_condition"),
            "who is woken by whom, its shared memory, and how a reader waits",
        ),
        Attributes(f"{_MESSAGES}.SpinCondition", _names("busy_loop_s last_read poller"), "readers on CPUs sleep soon"),
        Attributes(f"{_MESSAGES}.ShmRingBuffer", _names("is_creator shared_memory"), "names of shared memory go early"),
        Attributes(f"{_PARALLEL}.GroupCoordinator", _names("mq_broadcaster"), "names of shared memory go early"),
        Import(f"{_PARALLEL}._groups", "every process group of a worker"),
        Import("vllm.distributed.parallel_state", "every process group of a worker"),
        Source(
            "vllm.distributed.device_communicators.cpu_communicator",
            ("-cpushm",),
            "shared memory that ranks on CPUs exchange tensors through is known by its name",
        ),
        Attributes(
            "vllm.platforms.interface.Platform",
            _names("ray_device_key device_control_id_to_physical_device_id additional_env_vars"),
            "what a worker's device is called",
        ),
        Call("vllm.utils.network_utils.get_distributed_init_method", "ip, port", "the address where ranks meet"),
        Import("vllm.envs", "vLLM's variables"),
        Variable("VLLM_MQ_MAX_CHUNK_BYTES_MB", "the size of the queue"),
        Variable("VLLM_HOST_IP", "the address of this node in the cluster"),
        Variable("VLLM_RPC_BASE_PATH", "vLLM's sockets go with the service's folder"),
        Variable("VLLM_USE_MODELSCOPE", "a model that is not on the Hugging Face Hub is not looked for there"),
        Variable("VLLM_API_KEY", "it is never handed to a worker"),
        Import("vllm.v1.engine.core", "the logger of this name tells why the engine's process ended"),
        Source(
            "vllm.v1.engine.core.EngineCoreProc.run_engine_core",
            ("logger.exception('EngineCore failed to start.')",),
            "the exception is logged, and our handler notes it",
        ),
        Source(
            "vllm.v1.engine.utils",
            ("Engine core initialization failed. ",),
            "a start that failed in the engine's process is known by it",
        ),
        Source(
            "vllm.model_executor.models.registry",
            ("are not supported for now. Supported architectures:",),
            "names of architectures that are near",
        ),
    ),
)

GROUPS_OF_RANKS = Group(
    "ranks and stages",
    "executor/parallel",
    (
        Call("vllm.distributed.get_world_group", "", "all ranks of all stages compare how a block's turn ended"),
        Attributes(
            f"{_PARALLEL}.GroupCoordinator",
            _names("rank_in_group world_size is_first_rank is_last_rank cpu_group"),
            "a rank's place among the others",
        ),
        Call(f"{_PARALLEL}.GroupCoordinator.all_gather", "input_, *, dim", "whole values from shards"),
        Call(f"{_PARALLEL}.GroupCoordinator.all_reduce", "input_", "whole values from partial sums"),
        Call(f"{_PARALLEL}.GroupCoordinator.broadcast", "input_, *, src", "ranks go on with the same bits"),
        Call(
            f"{_PARALLEL}.GroupCoordinator.broadcast_tensor_dict",
            "tensor_dict, *, src",
            "what a stage tells the others",
        ),
        Call(
            f"{_PARALLEL}.GroupCoordinator.send_tensor_dict", "tensor_dict", "a stage's dummy step goes on in the next"
        ),
        Call(f"{_PARALLEL}.GroupCoordinator.recv_tensor_dict", "", "a stage's dummy step goes on in the next"),
        Import("vllm.model_executor.models.utils.PPMissingLayer", "a module that another stage has"),
    ),
)

MODEL = Group(
    "the model's layers",
    "executor/model",
    (
        Attributes(
            f"{_LINEAR}.LinearBase",
            _names("input_size output_size tp_size params_dtype quant_method"),
            "shapes of weights, and how they are cut",
        ),
        Attributes(
            f"{_LINEAR}.ColumnParallelLinear",
            _names("tp_size output_size_per_partition gather_output weight_loader weight_loader_v2"),
            "an output is cut in its last dimension",
        ),
        Attributes(
            f"{_LINEAR}.MergedColumnParallelLinear",
            _names("output_sizes weight_loader weight_loader_v2"),
            "an output of several parts",
        ),
        Attributes(
            f"{_LINEAR}.QKVParallelLinear",
            _names(
                "num_heads num_kv_heads total_num_heads total_num_kv_heads num_kv_head_replicas head_size v_head_size"
            )
            + _names("weight_loader weight_loader_v2"),
            "heads are cut over the ranks, and key and value heads repeated",
        ),
        Attributes(
            f"{_LINEAR}.RowParallelLinear",
            _names("tp_size input_size_per_partition input_is_parallel reduce_results weight_loader weight_loader_v2"),
            "an input is cut in its last dimension, and an output may be a partial sum",
        ),
        Call(f"{_LINEAR}.RowParallelLinear.forward", "input_", "a block may name the input"),
        Import(f"{_LINEAR}.ReplicatedLinear", "its weights are the same on every rank"),
        Import(f"{_LINEAR}.UnquantizedLinearMethod", "weights of other methods are not given"),
        Import(f"{_VOCABULARY}.UnquantizedEmbeddingMethod", "weights of other methods are not given"),
        Call(
            "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info",
            "layer",
            "the record of how a layer's weights were loaded",
        ),
        Attributes(
            "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",
            _names("restore_metadata"),
            "parameters before they were repacked, with their loaders",
        ),
        Source(
            "vllm.model_executor.model_loader.reload.layerwise.record_metadata_for_reloading",
            ("info.restore_metadata = capture_layer_to_meta(layer)",),
            "the record is made when the model is built",
        ),
        Source(
            f"{_LINEAR}.ColumnParallelLinear",
            ("getattr(param, 'is_sharded_weight', False)",),
            "a weight that is not cut again",
        ),
        Source(
            f"{_LAYERS}.utils",
            ("layer.cpu_linear = ",),
            "a weight that a kernel has repacked is got back through the kernel",
        ),
        Source(f"{_LAYERS}.utils", ("layer.cpu_linear(x, weight, bias)",), "the kernel takes rows, weight and bias"),
        Attributes(
            f"{_VOCABULARY}.VocabParallelEmbedding",
            _names(
                "num_embeddings embedding_dim org_vocab_size num_embeddings_padded num_embeddings_per_partition tp_size"
            ),
            "rows of the vocabulary are cut over the ranks",
        ),
        Import(f"{_VOCABULARY}.ParallelLMHead", "the unembedding"),
        Call(
            f"{_LAYERS}.logits_processor.LogitsProcessor._get_logits",
            "hidden_states, lm_head, embedding_bias",
            "the unembedding before its scale",
        ),
        Call(
            "vllm.model_executor.models.interfaces_base.VllmModelForTextGeneration.compute_logits",
            "hidden_states",
            "the whole unembedding",
        ),
        Import(f"{_LAYERS}.logits_processor.LogitsProcessor", "the unembedding, which is applied by another name"),
        Attributes(
            f"{_LAYERS}.rotary_embedding.base.RotaryEmbeddingBase",
            _names("cos_sin_cache head_size"),
            "positions that a block gives are checked",
        ),
        Import(f"{_LAYERS}.layernorm.RMSNorm", "a weight of one number in all places may still be whole"),
        Import(f"{_LAYERS}.layernorm.GemmaRMSNorm", "a weight of one number in all places may still be whole"),
        Import(f"{_MOE}.routed_experts.RoutedExperts", "its weights are as their kernel needs them"),
        Import(f"{_LAYERS}.attention_layer_base.AttentionLayerBase", "layers that keep a cache"),
        Import(f"{_LAYERS}.mamba.abstract.MambaBase", "layers that keep a state in place of keys and values"),
        Attributes(
            _ATTENTION,
            _names(
                "layer_name num_heads num_kv_heads head_size head_size_v kv_cache kv_cache_dtype kv_cache_torch_dtype impl"
            )
            + _names("attn_type sliding_window get_attn_backend"),
            "the heads and the cache of a layer",
        ),
        Source(
            f"{_RUNNER}.execute_model",
            ("slot_mapping=slot_mappings",),
            "the forward context says where each token's keys went",
        ),
        Source(
            f"{_LAYERS}.attention.attention.Attention.__init__",
            ("compilation_config.static_forward_context[prefix] = self",),
            "layers with a cache are found by their names",
        ),
        Source(
            "vllm.lora.ops.torch_ops.lora_ops.bgmv_expand",
            ("selected_loras = lora_b_weights[lora_indices_tensor]",),
            "on CPUs a row without an adapter, of index -1, takes the last place, which stays empty",
        ),
        Source(
            "vllm.model_executor.model_loader.utils.initialize_model",
            ("model = model_class(", "record_metadata_for_reloading(model)", "return model"),
            "how weights are loaded is recorded for every model, before they are",
        ),
        Import(
            "vllm.model_executor.models.transformers", "models whose modules hold no rows are known by their module"
        ),
        Source(
            "vllm.lora.layers.BaseLayerWithLoRA",
            ("get('base_layer')",),
            "the model's own layer below an adapter's wrapper",
        ),
        Attributes(
            "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",
            _names("base_layer"),
            "the model's own layer below an adapter's wrapper",
        ),
        Import("vllm.lora.layers.LogitsProcessorWithLoRA", "it looks for the adapters of the batch's rows"),
        Import("vllm.lora.layers.VocabParallelEmbeddingWithLoRA", "no adapter that is served changes it"),
        Import("vllm.config.lora.MaxLoRARanks", "the ranks that adapters may have"),
        Call("vllm.lora.request.LoRARequest", "*, lora_name, lora_int_id, lora_path", "an adapter's name in a request"),
        Attributes("vllm.lora.request.LoRARequest", _names("lora_name lora_path"), "an adapter's name in a request"),
    ),
)

VIEWS = Group(
    "canonical values",
    "executor/views",
    (
        Import(_LATENT, "a layer with latent attention has no values of heads"),
        Attributes(f"{_MOE}.runner.moe_runner.MoERunner", _names("moe_config router"), "which experts a token gets"),
        Attributes(
            f"{_MOE}.config.FusedMoEConfig",
            _names("num_logical_experts experts_per_token hidden_dim"),
            "which experts a token gets",
        ),
        Attributes(
            f"{_MOE}.runner.moe_runner.MoERunner",
            _names(
                "routed_experts shared_experts routed_scaling_factor routed_input_transform routed_output_transform"
            ),
            "what a layer adds up of its experts",
        ),
        Attributes(
            f"{_MOE}.config.FusedMoEConfig",
            _names(
                "num_experts num_local_experts intermediate_size_per_partition skip_final_all_reduce moe_parallel_config"
            )
            + _names("intermediate_size_per_partition_unpadded hidden_dim_unpadded routing_method"),
            "the sizes of single experts",
        ),
        Attributes(
            f"{_MOE}.routed_experts.RoutedExperts",
            _names("quant_method activation apply_router_weight_on_input"),
            "single experts run in their layer's kernel",
        ),
        Call(
            f"{_MOE}.routed_experts.RoutedExperts.forward_modular",
            "*, x, topk_weights, topk_ids, shared_experts, shared_experts_input",
            "single experts run in their layer's kernel",
        ),
        Call(
            f"{_MOE}.routed_experts.RoutedExperts.forward_monolithic",
            "*, x, router_logits, input_ids",
            "single experts run in a kernel that chooses the experts itself",
        ),
        Attributes(
            f"{_MOE}.config.RoutingMethodType",
            _names("Renormalize RenormalizeNaive"),
            "kernels that weigh the chosen experts by the softmax of their logits",
        ),
        Call(
            f"{_MOE}.runner.moe_runner.MoERunner.forward",
            "hidden_states, router_logits",
            "the rows and the logits that a layer's experts are given, by these names",
        ),
        Attributes(f"{_MOE}.runner.shared_experts.SharedExperts", _names("_layer"), "a layer's shared experts"),
        Attributes(
            f"{_MOE}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
            _names("moe_kernel is_monolithic topk_indices_dtype skip_forward_padding"),
            "experts' weights that are numbers as they are",
        ),
        Attributes(
            f"{_MOE}.experts.cpu_moe.CPUUnquantizedExperts",
            _names("_use_zentorch isa w1_bias"),
            "experts' hidden layers are computed by their kernel, on CPUs",
        ),
        Attributes(
            f"{_MOE}.experts.triton_moe.TritonExperts",
            _names("quant_config w1_bias w2_bias"),
            "experts' hidden layers are computed from their weights, on GPUs",
        ),
        Import(f"{_MOE}.router.zero_expert_router.ZeroExpertRouter", "a layer that adds what no expert gave"),
        Import(f"{_MOE}.activation.ApplyMoEActivationConfig", "the activation of an expert, on GPUs"),
        Call(
            f"{_MOE}.activation.ApplyMoEActivationConfig.from_configs",
            "moe_config, quant_config",
            "the activation of an expert, on GPUs",
        ),
        Call(
            f"{_MOE}.activation.apply_moe_activation",
            "activation, output, input, *, activation_config",
            "the activation of an expert, on GPUs",
        ),
        Call(
            "vllm._custom_ops.cpu_prepack_moe_weight", "weight, isa", "an identity as the kernel for experts wants it"
        ),
        Call(
            "vllm._custom_ops.cpu_fused_moe",
            "out, input, w13, w2, w13_bias, w2_bias, topk_weights, topk_ids, act, isa",
            "the hidden layer of an expert, on CPUs",
        ),
        Call(
            f"{_MOE}.router.fused_moe_router.FusedMoERouter.select_experts",
            "*, hidden_states, router_logits",
            "a layer's own router chooses from its logits",
        ),
        Source(
            f"{_BACKENDS}.cpu_attn.CPUAttentionBackendImpl.forward",
            ("if attn_metadata is None: return output",),
            "a dummy step computes no attention, on CPUs",
        ),
        Source(
            f"{_BACKENDS}.flash_attn.FlashAttentionImpl.forward",
            ("if attn_metadata is None: return output.fill_(0)",),
            "a dummy step computes no attention, on GPUs",
        ),
        Attributes(
            "vllm.v1.attention.backend.AttentionType", _names("DECODER"), "patterns are given of causal attention"
        ),
        Attributes(
            f"{_BACKENDS}.cpu_attn.CPUAttentionMetadata",
            _names("seq_lens block_table"),
            "where a request's keys are, on CPUs",
        ),
        Attributes(
            f"{_BACKENDS}.flash_attn.FlashAttentionMetadata",
            _names("seq_lens block_table"),
            "where a request's keys are, on GPUs",
        ),
        Attributes(
            f"{_BACKENDS}.cpu_attn.CPUAttentionBackendImpl",
            _names("scale logits_soft_cap alibi_slopes sinks do_kv_cache_update"),
            "the arithmetic of attention, on CPUs",
        ),
        Attributes(
            f"{_BACKENDS}.flash_attn.FlashAttentionImpl",
            _names("scale logits_soft_cap alibi_slopes sinks do_kv_cache_update"),
            "the arithmetic of attention, on GPUs",
        ),
        Call(
            f"{_BACKENDS}.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update",
            "layer, key, value, kv_cache, slot_mapping",
            "the layout of the cache is measured with it",
        ),
        Call(
            f"{_BACKENDS}.flash_attn.FlashAttentionImpl.do_kv_cache_update",
            "layer, key, value, kv_cache, slot_mapping",
            "the layout of the cache is measured with it",
        ),
    ),
)

ENGINE = Group(
    "the engine",
    "executor/engine",
    (
        Call("vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config", "vllm_config, *, stat_loggers", "the engine"),
        Import("vllm.v1.metrics.ray_wrappers.RayPrometheusStatLogger", "vLLM's own metrics go to Ray's agent"),
        Method(
            "vllm.v1.metrics.loggers.PrometheusStatLogger.record",
            "scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0",
            "one latency of a step is observed, not one for each request",
        ),
        Attributes(
            "vllm.v1.metrics.stats.IterationStats", _names("inter_token_latencies_iter"), "the latencies of a step"
        ),
        Call(
            "vllm.v1.engine.async_llm.AsyncLLM.generate",
            "prompt, sampling_params, request_id, *, lora_request",
            "one request for each invoke",
        ),
        Call(
            "vllm.v1.engine.async_llm.AsyncLLM.collective_rpc",
            "method, *, timeout, args",
            "workers are called beside steps",
        ),
        Call("vllm.v1.engine.async_llm.AsyncLLM.check_health", "", "a dead engine is noticed"),
        Call(
            "vllm.v1.engine.async_llm.AsyncLLM.add_lora", "lora_request", "adapters are loaded before the first request"
        ),
        Call("vllm.v1.engine.async_llm.AsyncLLM.get_tokenizer", "", "prompts are cut into tokens before they are sent"),
        Call("vllm.v1.engine.async_llm.AsyncLLM.shutdown", "", "the engine ends with its replica"),
        Attributes("vllm.v1.engine.async_llm.AsyncLLM", _names("vllm_config"), "the engine's configuration"),
        Attributes(
            "vllm.tokenizers.TokenizerLike", _names("encode apply_chat_template max_chars_per_token"), "prompts as text"
        ),
        Call(
            "vllm.engine.arg_utils.AsyncEngineArgs.create_engine_config",
            "",
            "the configuration of an engine's arguments",
        ),
        Call("vllm.engine.arg_utils.AsyncEngineArgs.add_cli_args", "parser", "`interpose serve` takes vLLM's flags"),
        Import("vllm.engine.arg_utils.EngineArgs", "flags are looked up in its source, without an import"),
        Call(
            "vllm.utils.argparse_utils.FlexibleArgumentParser",
            "*, prog, **kwargs",
            "`interpose serve` takes vLLM's flags",
        ),
        Import("vllm.entrypoints.launchers.api_server.app_state.init_app_state", "the OpenAI endpoint's own classes"),
        Import("vllm.entrypoints.launchers.cli_args.make_arg_parser", "the endpoint's options and their defaults"),
        Import("vllm.entrypoints.serve.create_error_response", "errors of the endpoint"),
        Import("vllm.entrypoints.serve.engine.protocol.ErrorResponse", "errors of the endpoint"),
        Import("vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest", "a request for chat"),
        Exactly(
            "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
            "fields",
            _names("messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens")
            + _names("max_completion_tokens n presence_penalty response_format seed stop stream stream_options")
            + _names("temperature top_p tools tool_choice reasoning_effort thinking_token_budget")
            + _names("include_reasoning parallel_tool_calls user use_beam_search top_k min_p")
            + _names("repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output")
            + _names("ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens")
            + _names("truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids")
            + _names("allowed_token_ids bad_words echo add_generation_prompt continue_final_message")
            + _names("add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs")
            + _names("mm_processor_kwargs structured_outputs priority request_id session_id")
            + _names("return_tokens_as_token_ids return_token_ids routed_experts_prompt_start")
            + _names("return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt")
            + _names("kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval"),
            "fields that reach beyond the request are refused (executor/engine/openai_body.py)",
        ),
        Import("vllm.entrypoints.openai.completion.protocol.CompletionRequest", "a request for a completion"),
        Exactly(
            "vllm.entrypoints.openai.completion.protocol.CompletionRequest",
            "fields",
            _names("model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty")
            + _names("seed stop stream stream_options suffix temperature top_p user use_beam_search top_k")
            + _names("min_p repetition_penalty watermarking length_penalty stop_token_ids")
            + _names("include_stop_str_in_output ignore_eos min_tokens skip_special_tokens")
            + _names("spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids")
            + _names("prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens")
            + _names("response_format structured_outputs priority request_id session_id")
            + _names("return_tokens_as_token_ids return_token_ids routed_experts_prompt_start")
            + _names("return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params")
            + _names("ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval"),
            "fields that reach beyond the request are refused (executor/engine/openai_body.py)",
        ),
        Import("vllm.exceptions.VLLMValidationError", "what vLLM looks at only when a request comes"),
        Import("vllm.v1.engine.exceptions.EngineDeadError", "the engine has ended"),
        Import("vllm.v1.engine.exceptions.EngineGenerateError", "the engine has ended"),
        Attributes("vllm.sampling_params.RequestOutputKind", _names("DELTA"), "outputs hold what is new"),
        Import("vllm.SamplingParams", "sampling parameters of a request"),
        Exactly(
            "vllm.sampling_params.SamplingParams",
            "fields",
            _names("n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k")
            + _names("min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs")
            + _names("logprob_token_ids prompt_logprob_token_ids prompt_logprob_start flat_logprobs detokenize")
            + _names("skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind")
            + _names("output_text_buffer_length stream_interval skip_clone structured_outputs logit_bias")
            + _names("allowed_token_ids extra_args bad_words thinking_token_budget skip_reading_prefix_cache")
            + _names("repetition_detection routed_experts_prompt_start trace_decode_token_ids"),
            "every parameter that is not held back in executor/model/describe.py is offered to traces",
        ),
        Call(
            "vllm.sampling_params.SamplingParams.verify",
            "model_config, speculative_config, structured_outputs_config, tokenizer",
            "parameters are judged by vLLM before anything runs",
        ),
        Import("vllm.sampling_params.StructuredOutputsParams", "grammars"),
        Import("vllm.sampling_params.RepetitionDetectionParams", "repetitions"),
        Call(
            "vllm.v1.serial_utils.MsgpackEncoder.encode",
            "obj",
            "parameters that the engine's process could not read are refused",
        ),
        Call(
            "vllm.v1.serial_utils.MsgpackDecoder.decode",
            "bufs",
            "parameters that the engine's process could not read are refused",
        ),
        Call(
            "vllm.v1.serial_utils.MsgpackDecoder",
            "t",
            "parameters that the engine's process could not read are refused",
        ),
        Import(
            "vllm.v1.serial_utils.MsgpackEncoder", "parameters that the engine's process could not read are refused"
        ),
        Attributes(
            "vllm.outputs.RequestOutput",
            _names("outputs finished prompt_token_ids prompt_logprobs"),
            "a request's output",
        ),
        Attributes(
            "vllm.outputs.CompletionOutput", _names("text token_ids logprobs finish_reason"), "a request's output"
        ),
        Attributes("vllm.logprobs.Logprob", _names("logprob rank decoded_token"), "a request's output"),
        Source(
            "vllm.v1.core.kv_cache_utils",
            ("request.cache_salt",),
            "a traced request that may change its prompt's keys and values keeps them to itself",
        ),
    ),
)

GROUPS: tuple[Group, ...] = (
    WORKER,
    RUNNERS,
    SCHEDULER,
    KERNELS,
    CONFIG,
    EXECUTOR,
    GROUPS_OF_RANKS,
    MODEL,
    VIEWS,
    ENGINE,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], GROUPS, VERSION))
