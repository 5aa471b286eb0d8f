"""vLLM's scheduler with what traced requests need.

A traced request has its whole prompt in one step if a step can hold it, is evicted last, and ends when its block ends it.

Plain requests keep the stock policy: their prompts are cut into chunks, and they are evicted and computed anew when the cache
is full. A traced request cannot be treated so. The value of a location covers the whole prompt, so only a prompt that is longer
than any step is cut (`executor.interleave.chunks`). The changes of a block are not in the request's tokens, so computing the
request anew after its prompt would be wrong. Therefore

- a traced request waits in a room of its own (`executor.plugin.waiting_room`), which chooses the step in which it starts; then
  it enters vLLM's queue;
- plain requests are evicted first. A traced request whose prompt comes in chunks has what the others leave of a step, and is
  evicted before them: its block has not begun;
- a request whose block has ended and changed nothing is a plain request from then on;
- a block that fails or calls `tracer.stop()` ends its request in the same step, whatever `min_tokens` or `ignore_eos` say; a
  stop string does the same, so no block sees a step whose token is not in the result;
- a traced request whose block asks for none of its prompt's rows, or for the last rows alone, may have what is before them from
  the prefix cache, and leaves it there (`executor.plugin.published`); any other traced request neither reads nor leaves anything;
- a traced request whose block needs a sandboxed process waits until there is one (`executor.plugin.processes`);
- a tenant whose blocks have taken more than its share of the steps sits out while other tenants have work
  (`executor.core.step_shares`), with all its requests;
- with async scheduling, a step is scheduled before the step ahead of it has ended: a traced request whose token may decide
  whether it goes on sits out until the token is known (`executor.plugin.ahead`), while the other requests go on.

Without traced requests it is the stock scheduler: each override looks whether there are traced requests and goes on in vLLM's
method.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from executor.core.ended import Ended
from executor.core.fairness import NOBODY, Flow
from executor.core.request import InvokeRequest, step_tokens
from executor.core.step_shares import StepShares
from executor.plugin.ahead import may_run_ahead
from executor.plugin.processes import Processes
from executor.plugin.published import publish_prompt_alone
from executor.plugin.waiting_room import Left, Limits, Start, Traced, Used, WaitingRoom

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs


@dataclass
class EndedModelRunnerOutput(ModelRunnerOutput):
    """A step's output with what blocks did in the step: which ended, and how long they took.

    Attributes:
        ended: how each block ended, by request id. With `Ended.READ_ONLY` the request goes on as a plain request; with any
            other member the request ends too.
        spent: the seconds that each tenant's blocks took since the step before. Empty if all blocks are of one tenant.
        processes: how many sandboxed processes wait for a trace; None: as many as before.
    """

    ended: dict[str, Ended] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    processes: int | None = None


class InterposeScheduler(Scheduler):
    """The stock scheduler with a waiting room for traced requests."""

    running: list[Request]
    max_num_active_reqs: int

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> InterposeScheduler:
        """Make the scheduler for async scheduling if that is on.

        vLLM gets the class before it decides about async scheduling.
        """
        return super().__new__(InterposeAsyncScheduler if vllm_config.scheduler_config.async_scheduling else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        all_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # One block stands for "no block".
        limits = Limits(step_tokens(self.scheduler_config), self.max_num_running_reqs, all_blocks)
        self._limits = limits
        self._traced: dict[str, Traced] = {}  # those that wait, and those that run and whose block lives
        self._room = WaitingRoom(limits, self._handle_blocked_waiting_request, self._flow_of)
        self._own_step = False  # whether the running requests sat the last step out
        self._flows: dict[str, Flow] = {}  # of requests that came with a block, whether or not it lives
        self._several = False  # whether traces of more than one tenant have come
        self._shares = StepShares()
        settings = self.vllm_config.additional_config.get("interpose", {})
        self._processes = Processes(bool(settings.get("sandbox")), self._room.waiting)
        self._since = 0.0  # the time that is charged begins here
        if self._blocks(self.max_model_len) > all_blocks:
            raise ValueError(
                f"the KV cache has room for less than one request of max_model_len ({self.max_model_len}) tokens, and a "
                "traced request is never evicted; raise kv_cache_memory_bytes or lower max_model_len"
            )

    # Requests come and go.

    def _enqueue_waiting_request(self, request: Request) -> None:
        """Let a traced request wait in the room, and any other request in vLLM's queue."""
        params = request.sampling_params
        invoke = InvokeRequest.from_args(params.extra_args) if params is not None else None
        if invoke is None:
            super()._enqueue_waiting_request(request)
        else:
            self._enter(request, invoke)

    def _enter(self, request: Request, invoke: InvokeRequest) -> None:
        rows, params = request.num_prompt_tokens, request.sampling_params
        assert params is not None
        entry = Traced(
            request,
            invoke.flow,
            rows,
            prompt_blocks=self._blocks(rows),
            blocks=self._blocks(rows + request.max_tokens),
            fits=rows <= self._limits.rows,
            ahead=may_run_ahead(params, invoke, self.vllm_config),
            sandboxed=self._processes.needed(request.request_id, invoke, idle=not self.requests),
        )
        if invoke.prefix:
            publish_prompt_alone(request, rows - invoke.last, self.hash_block_size)
        if params.stop:
            entry.text = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        if not self._traced:
            self._since = time.monotonic()
        self._remember(request.request_id, invoke.flow)
        self._traced[request.request_id] = entry
        self._room.enter(entry, invoke.trace, invoke.gang)

    def _remember(self, request_id: str, flow: Flow) -> None:
        """Know the flow of a request as long as the request is here."""
        if self._flows and not self._several:
            self._several = next(iter(self._flows.values())).tenant != flow.tenant
            self._shares.over(map(self._flow_of, self.running))  # they were here before
            self._since = time.monotonic()
        if len(self._flows) > 64 + 2 * len(self.requests):
            self._flows = {one: flow for one, flow in self._flows.items() if one in self.requests}
        self._flows[request_id] = flow

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        if self._traced:
            self._forget_finished()
        return finished

    def _forget_finished(self) -> None:
        for entry in [one for one in self._traced.values() if one.request.is_finished()]:
            del self._traced[entry.request.request_id]
            self._room.leave(entry)

    @cached_property
    def _tokenizer(self) -> TokenizerLike:
        return cached_tokenizer_from_config(self.vllm_config.model_config)

    def _blocks(self, tokens: int) -> int:
        """Return the number of cache blocks that a new request needs for so many tokens."""
        tokens = min(tokens, self.max_model_len)
        return self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=tokens,
            new_computed_blocks=self.kv_cache_manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
        )

    def _flow_of(self, request: Request) -> Flow:
        """Return the flow of a request, also when its block has ended."""
        return self._flows.get(request.request_id, NOBODY)

    def get_num_unfinished_requests(self) -> int:
        """Count the requests in the room too, so that the engine goes on with its steps."""
        if not self._traced:
            return super().get_num_unfinished_requests()
        waiting = len(self._room.waiting) if self.pause_state == PauseState.UNPAUSED else 0
        return super().get_num_unfinished_requests() + waiting

    # A step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self._traced:
            return super().schedule(throttle_prefills)
        # vLLM evicts from the end, so it evicts a traced request only when no plain request is left.
        self.running.sort(key=self._order)
        in_flight = list(filter(self._in_flight, self.running))
        start, waits = self._in_turn(in_flight) if self._several else (self._next(in_flight), in_flight)
        self._own_step = start.own
        sitting_out = list(self.running) if start.own else waits
        seats = self.max_num_active_reqs
        if sitting_out:
            out = set(sitting_out)
            self.running = [one for one in self.running if one not in out]
            self.max_num_active_reqs -= len(sitting_out)
        if start.closed:
            held = len(self.running) + self.num_waiting_for_streaming_input
            self.max_num_active_reqs = min(self.max_num_active_reqs, held + len(start.requests))
        self._hand_over(start)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = seats
            self.running = sitting_out + self.running
        self._take_back(start)
        self._processes.give(output, start.traced, self._traced.values())
        for entry in start.passed:
            entry.passed += len(output.scheduled_new_reqs)
        return output

    def _order(self, request: Request) -> int:
        """Return the order of a running request: the last has what others leave, and is evicted."""
        if request.request_id not in self._traced:
            return 1
        return 2 if request.num_computed_tokens < request.num_prompt_tokens else 0

    def _in_flight(self, request: Request) -> bool:
        """Return whether a traced request must sit out, because its last step has not ended.

        Its token may end the request in that step.
        """
        if not request.num_output_placeholders:
            return False
        entry = self._traced.get(request.request_id)
        return entry is not None and not entry.ahead

    def _in_turn(self, in_flight: list[Request]) -> tuple[Start, list[Request]]:
        """Return which requests start in the step, and which running requests sit it out.

        Tenants over their share do neither if another tenant has work in the step.
        """
        if not self.running:
            self._since = time.monotonic()
        flows = [self._flow_of(request) for request in self.running]
        over = self._shares.over([*flows, *(entry.flow for entry in self._room.waiting.values())]) - {NOBODY.tenant}
        if over:
            held = {one for one, flow in zip(self.running, flows, strict=True) if flow.tenant in over}
            waits = [one for one in self.running if one in held or self._in_flight(one)]
            start = self._next(waits, over)
            able = len(self.running) - len(held)
            if (able or start.requests) and self._has_room(able):
                return start, waits
        return self._next(in_flight), in_flight

    def _has_room(self, requests: int) -> bool:
        """Return whether the cache has free blocks for another token of so many requests.

        If not, vLLM evicts a request, and must not find only the requests of the tenants that are next.
        """
        return self.kv_cache_manager.block_pool.get_num_free_blocks() >= requests * self._blocks(1)

    def _next(self, sitting_out: Sequence[Request], over: Collection[str] = ()) -> Start:
        """Return which requests start in the step.

        Args:
            sitting_out: the running requests that sit the step out.
            over: the tenants whose traced requests do not start in the step.
        """
        seats = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        if not self._room.waiting or seats <= 0 or self.pause_state != PauseState.UNPAUSED:
            return Start()
        evicted = [request for request in self.waiting if request.status == RequestStatus.PREEMPTED]
        queued = {request.request_id for request in self.waiting}.difference(one.request_id for one in evicted)
        queued |= self._room.waiting.keys()
        used, out = Used(), set(sitting_out)
        for request in self.running:
            entry = self._traced.get(request.request_id)
            used.seats[self._flow_of(request).tenant] += 1
            if entry is not None:
                used.blocks[entry.flow.tenant] += entry.blocks
        return self._room.next(
            [*self.kv_holding_waiting, *evicted],
            [request for request in self.requests.values() if request.request_id in queued],
            self.running,
            used,
            Left(
                rows=self._limits.rows - sum(_rows_of(one) for one in self.running if one not in out),
                seats=seats,
                blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
                may_own=not (self._own_step and self.running),
                processes=self._processes.free,
                served=self._processes.served(self._traced.values()),
            ),
            over,
        )

    def _hand_over(self, start: Start) -> None:
        """Put the traced requests that start into the queue, behind the requests before them."""
        if not start.traced:
            return
        last = start.requests.index(start.traced[-1].request)
        holding = set(self.kv_holding_waiting)
        first = [request for request in start.requests[: last + 1] if request not in holding]
        self.waiting.remove_requests(request for request in first if request.request_id not in self._room.waiting)
        self.waiting.prepend_requests(reversed(first))

    def _take_back(self, start: Start) -> None:
        """Take the traced requests that vLLM did not start back into the room.

        vLLM starts no request if it evicts a running request, and starts a request later if too many adapters run.
        """
        left = [entry.request for entry in start.traced if entry.request.status == RequestStatus.WAITING]
        if left:
            self.waiting.remove_requests(left)
            self.deferred_waiting.difference_update(left)
        for entry in start.traced:
            if entry.request not in left:
                self._room.leave(entry)

    # The end of a step.

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take over guessed tokens, but for requests whose blocks live.

        A block would see the rows of the guesses.
        """
        super().update_draft_token_ids(draft_token_ids)
        for request_id in self._traced.keys() & set(draft_token_ids.req_ids):
            self._traced[request_id].request.spec_token_ids = []

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if not (self._traced or self._processes.given or model_runner_output.__class__ is EndedModelRunnerOutput):
            return super().update_from_output(scheduler_output, model_runner_output)
        self._processes.tell(scheduler_output, getattr(model_runner_output, "processes", None))
        if not self._traced:
            return super().update_from_output(scheduler_output, model_runner_output)
        if self._several:
            self._charge(scheduler_output, getattr(model_runner_output, "spent", {}))
        if isinstance(model_runner_output, EndedModelRunnerOutput):
            for request_id, how in model_runner_output.ended.items():
                request = self.requests.get(request_id)
                if how is Ended.READ_ONLY:
                    self._traced.pop(request_id, None)
                elif request is not None:
                    request.max_tokens = request.num_output_tokens + 1
        self._stop_at_strings(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._forget_finished()
        for one in outputs.values():
            if one.scheduler_stats is not None:
                one.scheduler_stats.num_waiting_reqs += len(self._room.waiting)
        return outputs

    def _charge(self, scheduler_output: SchedulerOutput, spent: dict[str, float]) -> None:
        """Charge the tenants of a step with its time."""
        now = time.monotonic()
        rows: Counter[str] = Counter()
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            rows[self._flows.get(request_id, NOBODY).tenant] += tokens
        self._shares.charge(rows, now - self._since, spent)
        self._since = now

    def _stop_at_strings(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """End traced requests at a stop string, in the step that completes the string.

        vLLM finds stop strings in another process, a step or two later, and a block would see those steps. vLLM still finds
        the string with the same code, and reports it as the reason.
        """
        for request_id, entry in self._traced.items():
            request = entry.request
            if entry.text is None or request_id not in scheduler_output.num_scheduled_tokens or request.is_finished():
                continue
            if request.num_stale_output_tokens > 0 and request.drop_stale_output:
                continue  # vLLM drops these tokens.
            tokens = output.sampled_token_ids[output.req_id_to_index[request_id]] if output.sampled_token_ids else []
            if tokens and entry.text.update(list(tokens), False):
                request.max_tokens = request.num_output_tokens + len(tokens)


class InterposeAsyncScheduler(InterposeScheduler, AsyncScheduler):
    """`InterposeScheduler` over vLLM's scheduler that is a step ahead of the workers."""


def _rows_of(request: Request) -> int:
    """Return the number of rows that a running request needs in a step."""
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
