"""vLLM's scheduler with what traced requests need.

A traced request has its whole prompt in one step, is never evicted, and ends when its block ends it.

Plain requests keep the stock policy: their prompts are cut into chunks, and they are evicted and computed anew when the cache
is full. A traced request cannot be treated so. The value of a location covers the whole prompt, so the prompt is never cut. The
changes of a block are not in the request's tokens, so computing the request anew would be wrong. Therefore

- a traced prompt that does not fit beside the running requests gets a step of its own, at most every second step;
- a traced request starts when the cache can hold all traced requests to their ends, and plain requests are evicted first;
- tenants take turns in starting requests, and so do the sessions of a tenant (`executor.core.fairness`); if there are several
  tenants, each leaves a share of the places and of the cache to the others;
- some smaller requests may start while a large request waits for the cache; then all wait until the large request has started;
- a request whose block has ended and changed nothing is a plain request from then on;
- invokes that must be together start in one step, and sit out together;
- a block that fails or calls `tracer.stop()` ends its request in the same step, whatever `min_tokens` or `ignore_eos` say; a
  stop string does the same, so no block sees a step whose token is not in the result;
- with async scheduling, a step is scheduled before the step ahead of it has ended: a traced request then sits out until its
  token is known, while the other requests go on.

Without traced requests it is the stock scheduler, with one more test where a request arrives. The scheduler has the class for
traced requests only as long as it has traced requests: a method that only calls vLLM's method costs as much as many of vLLM's
methods do, for each request in every step.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from executor.core.ended import Ended
from executor.core.fairness import NOBODY, Flow, in_turn
from executor.core.request import Placement, step_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


# How many requests may start while a larger request waits for the cache.
MOST_PASSES = 16


@dataclass
class EndedModelRunnerOutput(ModelRunnerOutput):
    """A step's output that also names the requests whose blocks ended in the step.

    Attributes:
        ended: how each block ended, by request id. With `Ended.READ_ONLY` the request goes on as a plain request; with any
            other member the request ends too.
    """

    ended: dict[str, Ended] = field(default_factory=dict)


class Closed(enum.Enum):
    """Which waiting requests may not start in this step."""

    NOBODY = enum.auto()
    TRACED = enum.auto()
    EVERYBODY = enum.auto()


@dataclass(eq=False)
class Group:
    """Requests of one trace that start in the same step.

    Attributes:
        expected: how many requests the group has; a request that ends before it starts counts no longer.
        members: the requests that have arrived and have not started.
    """

    expected: int
    members: list[Traced] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.members) >= self.expected and all(
            one.request.status == RequestStatus.WAITING for one in self.members
        )


@dataclass(eq=False)
class Traced:
    """A traced request that the scheduler has.

    Attributes:
        blocks: the number of cache blocks that the request may come to hold.
        whole: whether the prompt fits into a step, so that it is never cut. A longer prompt fails in the worker with a reason.
        group: the requests with which this request must start, until it has started.
        text: the generated text, if stop strings end the request.
        flow: the tenant and session of the request.
        passed: how many requests have started while this request waited for the cache.
        released: whether the request starts with others of its group in this step.
    """

    request: Request
    blocks: int
    whole: bool
    flow: Flow
    group: Group | None = None
    text: IncrementalDetokenizer | None = None
    passed: int = 0
    released: bool = False


class InterposeScheduler(Scheduler):
    """The stock scheduler, which changes its class when a traced request comes.

    Attributes:
        tracing: the class for the time with traced requests.
    """

    tracing: ClassVar[type[Scheduler]]

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> InterposeScheduler:
        """Make the scheduler for async scheduling if that is on.

        vLLM gets the class before it decides about async scheduling.
        """
        return super().__new__(InterposeAsyncScheduler if vllm_config.scheduler_config.async_scheduling else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._traced: dict[str, Traced] = {}
        self._groups: dict[str, Group] = {}  # by trace
        self._own_step = False  # whether the last step belonged to one traced prompt alone
        self._out_of_turn = False  # whether the order of the waiting requests may have changed
        self._usage_seen: tuple[int, int, int] | None = None
        self._usage_found: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._closed_tenants: set[str] = set()  # tenants of which no request starts in this step
        self._passed: set[Traced] = set()  # requests that wait for the cache while others may start, in this step
        if self._blocks(self.max_model_len) > self._all_blocks:
            raise ValueError(
                f"the KV cache has room for less than one request of max_model_len ({self.max_model_len}) tokens, and a "
                "traced request is never evicted; raise kv_cache_memory_bytes or lower max_model_len"
            )

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        placement = Placement.from_args(params.extra_args) if params is not None else None
        if placement is None:
            return
        prompt = request.num_prompt_tokens
        blocks = self._blocks(prompt + request.max_tokens)
        entry = Traced(request, blocks, prompt <= self._step_tokens, placement.flow)
        self._traced[request.request_id] = entry
        self._out_of_turn = True
        self.__class__ = self.tracing
        assert params is not None
        if params.stop:
            entry.text = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        if placement.together > 1:
            entry.group = self._groups.setdefault(placement.trace, Group(placement.together))
            entry.group.members.append(entry)

    @cached_property
    def _tokenizer(self) -> TokenizerLike:
        return cached_tokenizer_from_config(self.vllm_config.model_config)

    # Room.

    @property
    def _step_tokens(self) -> int:
        return step_tokens(self.scheduler_config)

    @property
    def _all_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # One block stands for "no block".

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


class _Tracing(InterposeScheduler):
    """What traced requests need, while there are any.

    Attributes:
        plain: the class of the scheduler without traced requests.
    """

    running: list[Request]
    plain: ClassVar[type[InterposeScheduler]]
    _closed = Closed.NOBODY

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        if isinstance(model_runner_output, EndedModelRunnerOutput):
            for request_id, how in model_runner_output.ended.items():
                request = self.requests.get(request_id)
                if how is Ended.READ_ONLY:
                    self._traced.pop(request_id, None)
                elif request is not None:
                    request.max_tokens = request.num_output_tokens + 1
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._out_of_turn = True
        entry = self._traced.pop(request.request_id, None)
        if entry is not None and entry.group is not None:
            entry.group.members.remove(entry)
            entry.group.expected -= 1
            self._groups = {trace: group for trace, group in self._groups.items() if group.expected}
        return super()._free_request(request, delay_free_blocks)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Also end a traced request at a stop string, in the step that completes the string.

        vLLM finds stop strings in another process, a step or two later, and a block would see those steps. vLLM still finds
        this string with the same code, and reports it as the reason.
        """
        entry = self._traced.get(request.request_id)
        if entry is not None and entry.text is not None and entry.text.update(list(new_token_ids), False):
            request.max_tokens = request.num_output_tokens + len(new_token_ids)
        return super()._update_request_with_output(request, new_token_ids, is_stale)

    # A step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self._traced:
            # The class changes back here and not where the last traced request leaves: that code still runs methods of this
            # class.
            plain = self.__class__ = self.plain
            return plain.schedule(self, throttle_prefills)
        # vLLM evicts from the end, so it evicts a traced request only when no plain request is left.
        self.running.sort(key=lambda request: request.request_id not in self._traced)
        self._closed = Closed.NOBODY
        self._passed.clear()
        self._closed_tenants.clear()
        if self._out_of_turn and len(self.waiting) > 1:
            self._put_in_turn()
        self._own_step = self._make_room()
        sitting_out = self.running if self._own_step else list(filter(self._in_flight, self.running))
        if not sitting_out:
            return self._counted(super().schedule(throttle_prefills))
        self.running = [] if self._own_step else [one for one in self.running if not self._in_flight(one)]
        self.max_num_active_reqs -= len(sitting_out)
        try:
            return self._counted(super().schedule(throttle_prefills))
        finally:
            self.max_num_active_reqs += len(sitting_out)
            self.running = sitting_out + self.running

    def _counted(self, output: SchedulerOutput) -> SchedulerOutput:
        """Count the requests that started in a step before the requests that wait for the cache."""
        started = len(output.scheduled_new_reqs)
        if started:
            self._out_of_turn = True
            for entry in self._passed:
                entry.passed += started
        return output

    def _put_in_turn(self) -> None:
        """Order the waiting requests: evicted requests first, then new requests in turn."""
        self._out_of_turn = False
        new = [request for request in self.waiting if request.status != RequestStatus.PREEMPTED]
        if len({self._flow_of(request) for request in new}) < 2:
            return
        ordered = in_turn(new, self._flow_of, map(self._flow_of, self.running))
        if ordered != new:
            self.waiting.remove_requests(new)
            for request in ordered:
                self.waiting.add_request(request)

    def _in_flight(self, request: Request) -> bool:
        """Return whether a request is traced and its last step has not ended.

        Its block or its token may end the request in that step.
        """
        return request.num_output_placeholders > 0 and request.request_id in self._traced

    def _make_room(self) -> bool:
        """Return whether all running requests sit this step out for the next request in the queue.

        Two such steps never follow each other, so the running requests keep at least half their pace.
        """
        head = next(self._ready(), None)
        entry = self._traced.get(head.request_id) if head is not None else None
        if entry is None or not entry.whole:
            return False
        together = entry.group.members if entry.group is not None else [entry]
        tokens = sum(one.request.num_tokens for one in together)
        if entry.group is None and tokens <= self._step_tokens - self._running_tokens():
            return False
        possible = (
            self._reserved() + sum(one.blocks for one in together) <= self._all_blocks
            and len(self.running) + len(together) <= self.max_num_active_reqs
            and sum(self._blocks(one.request.num_tokens) for one in together) <= self._unused_blocks
        )
        if possible and not (self._own_step and self.running):
            if entry.group is not None:
                self._release(entry.group)
            return True
        if entry.group is not None:  # A request that passed it would take the room that it waits for.
            self._closed = Closed.EVERYBODY
        return False

    def _ready(self) -> Iterator[Request]:
        """Yield the waiting requests that could start now, in their order."""
        for request in list(self.waiting):
            entry = self._traced.get(request.request_id)
            if self._is_blocked_waiting_status(request.status):
                continue
            if entry is not None and entry.group is not None:
                if not entry.group.complete:
                    continue
                if self._never_fits(entry.group):
                    self._release(entry.group)
            elif entry is not None and self._waits_aside(entry):
                self._passed.add(entry)
                continue
            yield request

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Also skip, for this step, a traced request that must not start yet."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self._closed is Closed.EVERYBODY:
            return False
        entry = self._traced.get(request.request_id)
        if entry is None or request.status == RequestStatus.PREEMPTED:
            return True
        if self._closed is Closed.TRACED or entry.group is not None:
            return False
        if entry.flow.tenant in self._closed_tenants:
            return False
        if self._over_share(entry):
            if entry.passed >= MOST_PASSES:
                self._closed_tenants.add(entry.flow.tenant)
            self._passed.add(entry)
            return False
        if self._reserved() + entry.blocks > self._all_blocks:
            if entry.passed >= MOST_PASSES:
                self._closed = Closed.TRACED
            self._passed.add(entry)
            return False
        return True

    def _waits_aside(self, entry: Traced) -> bool:
        """Return whether a request cannot start now and lets other requests pass."""
        if self._over_share(entry):
            return True
        return entry.passed < MOST_PASSES and self._reserved() + entry.blocks > self._all_blocks

    def _over_share(self, entry: Traced) -> bool:
        """Return whether one more request would put a tenant over its share.

        A tenant may always run one request.
        """
        share = entry.flow.share
        if share >= 1 or entry.released:
            return False
        count, blocks = self._used_by(entry.flow.tenant)
        return count > 0 and (
            count >= share * self.max_num_running_reqs or blocks + entry.blocks > share * self._all_blocks
        )

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Also never cut a traced prompt.

        0 leaves the prompt, and the requests behind it, for the next step.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if num_computed_tokens + num_new_tokens < request.num_prompt_tokens:
            entry = self._traced.get(request.request_id)
            if entry is not None and entry.whole:
                return 0
        return num_new_tokens

    def _flow_of(self, request: Request) -> Flow:
        """Return the flow of a request, also when its block has ended."""
        entry = self._traced.get(request.request_id)
        if entry is not None:
            return entry.flow
        params = request.sampling_params
        placement = Placement.from_args(params.extra_args) if params is not None else None
        return placement.flow if placement is not None else NOBODY

    # Groups.

    def _release(self, group: Group) -> None:
        """Let a group's members start next, one after the other."""
        requests = [one.request for one in group.members]
        self.waiting.remove_requests(requests)
        self.waiting.prepend_requests(reversed(requests))
        for one in group.members:
            one.group, one.released = None, True
        self._groups = {trace: other for trace, other in self._groups.items() if other is not group}

    def _never_fits(self, group: Group) -> bool:
        """Return whether no step has room for all members of a group.

        The members then start apart, and a block that needs the others fails with a message.
        """
        members = group.members
        return (
            sum(one.request.num_tokens for one in members) > self._step_tokens
            or sum(one.blocks for one in members) > self._all_blocks
            or len(members) > self.max_num_active_reqs
        )

    # Room.

    @property
    def _unused_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def _running_tokens(self) -> int:
        """Return the number of tokens that the running requests need in this step."""
        return sum(
            request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            for request in self.running
        )

    def _reserved(self) -> int:
        """Return the number of cache blocks that the running traced requests may come to hold."""
        return sum(self._usage()[1].values())

    def _used_by(self, tenant: str) -> tuple[int, int]:
        """Return a tenant's running requests, and the cache blocks its traced requests may hold."""
        counts, blocks = self._usage()
        return counts[tenant], blocks[tenant]

    def _usage(self) -> tuple[Counter[str], Counter[str]]:
        """Return the two numbers of `_used_by` for all tenants.

        They are counted anew when a request has started, ended, or become a plain request.
        """
        seen = (self.current_step, len(self.running), len(self._traced))
        if self._usage_seen != seen:
            running = [one for one in self._traced.values() if one.request.status == RequestStatus.RUNNING]
            counts, blocks = Counter[str](), Counter[str]()
            for entry in running:
                blocks[entry.flow.tenant] += entry.blocks
            counts.update(
                self._flow_of(request).tenant
                for request in self.requests.values()
                if request.status == RequestStatus.RUNNING
            )
            self._usage_seen, self._usage_found = seen, (counts, blocks)
        return self._usage_found


class InterposeAsyncScheduler(InterposeScheduler, AsyncScheduler):
    """`InterposeScheduler` over vLLM's scheduler that is a step ahead of the workers."""


class TracingScheduler(_Tracing):
    """`InterposeScheduler` while there are traced requests."""

    plain = InterposeScheduler


class TracingAsyncScheduler(_Tracing, InterposeAsyncScheduler):
    """`InterposeAsyncScheduler` while there are traced requests."""

    plain = InterposeAsyncScheduler


InterposeScheduler.tracing = TracingScheduler
InterposeAsyncScheduler.tracing = TracingAsyncScheduler
