"""In which order the scheduler lets traced requests start: by tenant and session, and past those that wait for the cache.

The scheduler is vLLM's with ours in front of it; there is no model, and each step gives every request a token.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from executor.core.fairness import Flow
from executor.core.request import InvokeRequest
from executor.plugin.scheduler import EndedModelRunnerOutput, InterposeScheduler
from executor.plugin.waiting_room import MOST_PASSES
from interpose.cli.demo_model import write_demo_model

PLACES = 6
BLOCKS = 16  # of 32 tokens each, without vLLM's own


class Steps:
    """A scheduler whose requests come to nothing.

    Attributes:
        started: the requests in the order in which they started, by name.
        most: requests of each tenant that ran at a time.
        tokens: tokens that the requests of each tenant have generated.
        stats: what the scheduler counted in the last step.
        inside: the tenants that were in each step.
        now: the time, if a test has put this clock on the scheduler.
        seconds: how long a step takes by that clock, without blocks.
        blocks: how long the blocks of each tenant take in a step.
    """

    def __init__(self, config: Any, log_stats: bool = False) -> None:
        spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = InterposeScheduler(
            vllm_config=config, kv_cache_config=cache, block_size=32, log_stats=log_stats,
            structured_output_manager=StructuredOutputManager(config),
        )  # fmt: skip
        self.started: list[str] = []
        self.most: dict[str, int] = {}
        self.tokens: Counter[str] = Counter()
        self.stats: Any = None
        self.inside: list[set[str]] = []
        self.now, self.seconds = 0.0, 0.001
        self.blocks: dict[str, float] = {}

    def add(self, name: str, flow: Flow, tokens: int = 8, max_tokens: int = 3, gang: int = 0) -> None:
        """Have a traced request come, which holds its part of the cache to its end."""
        args = InvokeRequest(name.partition("/")[0], 0, gang, flow).to_args()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=args)
        self.scheduler.add_request(Request(name, [5] * tokens, params, None, cache_salt=name))

    def step(self) -> None:
        """One step of the engine."""
        output = self.scheduler.schedule()
        self.started.extend(one.req_id for one in output.scheduled_new_reqs)
        running: dict[str, int] = {}
        for request in self.scheduler.running:
            tenant = self.scheduler._flow_of(request).tenant
            running[tenant] = running.get(tenant, 0) + 1
        self.most |= {tenant: max(count, self.most.get(tenant, 0)) for tenant, count in running.items()}
        names = list(output.num_scheduled_tokens)
        tenants = [self.scheduler._flow_of(self.scheduler.requests[name]).tenant for name in names]
        self.tokens.update(tenants)
        self.inside.append(set(tenants))
        spent = {tenant: seconds for tenant, seconds in self.blocks.items() if tenant in tenants}
        self.now += self.seconds + sum(spent.values())
        made = EndedModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, [[7] for _ in names], spent=spent
        )
        outputs = self.scheduler.update_from_output(output, made)
        self.stats = next((one.scheduler_stats for one in outputs.values()), None)
        assert not any(one.sampling_params.extra_args for one in self.scheduler.waiting), "they wait in the room"

    def plain(self, name: str, tokens: int = 8, max_tokens: int = 3) -> None:
        """Have a plain request come."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, [5] * tokens, params, None))

    def run(self) -> list[str]:
        """Run to the end of all that has come; return what `started` then is."""
        for _ in range(2000):
            if not self.scheduler.requests:
                assert not self.scheduler._traced and not self.scheduler._room.gangs
                return self.started
            self.step()
        raise AssertionError(f"waiting for ever: {list(self.scheduler.requests)}")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = str(write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama"))
    return EngineArgs(
        model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        block_size=32,
        max_num_seqs=PLACES,
        max_num_batched_tokens=256,
        max_model_len=256,
    ).create_engine_config()


@pytest.fixture
def steps(config: Any) -> Steps:
    config.cache_config.num_gpu_blocks = BLOCKS + 1
    return Steps(config)


def before(started: list[str], name: str, kind: str) -> int:
    """How many requests whose names begin so had started before another one did."""
    return sum(one.startswith(kind) for one in started[: started.index(name)])


def test_a_tenant_with_two_hundred_jobs_does_not_keep_another_waiting(steps: Steps) -> None:
    red, blue = Flow("red", "s1", 0.75), Flow("blue", "s2", 0.75)
    for number in range(200):
        steps.add(f"red{number}", red, max_tokens=20)
    for _ in range(5):
        steps.step()
    assert len(steps.started) == 5, "a tenant leaves a place to others, also when nobody is there"
    for number in range(3):
        steps.add(f"blue{number}", blue)
    steps.run()
    assert before(steps.started, "blue2", "red") <= 5 + 3, "blue waited for red's jobs"
    assert steps.started == sorted(steps.started, key=steps.started.index) and len(steps.started) == 203
    of_red = [name for name in steps.started if name.startswith("red")]
    assert of_red == [f"red{number}" for number in range(200)], "the order within a session"


def test_a_single_tenant_may_use_all_places_and_its_sessions_take_turns(steps: Steps) -> None:
    for number in range(40):
        steps.add(f"one{number}", Flow("class", "one"))
    steps.step()
    assert len(steps.started) == PLACES
    for number in range(2):
        steps.add(f"other{number}", Flow("class", "other"))
    steps.run()
    assert before(steps.started, "other1", "one") <= 2 * PLACES


def test_many_sessions_are_no_larger_share(steps: Steps) -> None:
    """Of two tenants, each has half of what starts, whatever they spread it over."""
    for number in range(30):
        steps.add(f"many{number}", Flow("many", f"s{number}", 0.9))
    for number in range(10):
        steps.add(f"one{number}", Flow("one", "s", 0.9))
    steps.run()
    assert 7 <= before(steps.started, "one9", "many") <= 13


def test_tokens_follow_the_weights(steps: Steps) -> None:
    """Long requests of one tenant beside short requests of another: places, and with them tokens, as 1 to 2."""
    red, blue = Flow("red", "s"), Flow("blue", "s", 1.0, 2.0)
    for number in range(60):
        steps.add(f"red{number}", red, tokens=1, max_tokens=50)
        for part in range(20):
            steps.add(f"blue{number}-{part}", blue, tokens=1)
    for _ in range(300):
        steps.step()
    assert steps.tokens["blue"] / steps.tokens["red"] == pytest.approx(2, rel=0.1)


def test_a_large_request_of_a_tenant_that_has_much_keeps_nobody_else_waiting(timed: Steps) -> None:
    """It waits for its own tenant's requests; another tenant's small ones go on, and then it starts."""
    timed.seconds, timed.blocks = 0.02, {}
    red, blue = Flow("red", "s"), Flow("blue", "s")
    for number in range(2):
        timed.add(f"red-long{number}", red, tokens=60, max_tokens=126)  # 6 of 16 blocks each
    timed.step()
    timed.add("large", red, tokens=60, max_tokens=196)  # 8 blocks
    for number in range(300):
        timed.add(f"blue{number}", blue)
    timed.run()
    assert before(timed.started, "large", "blue") > 4 * MOST_PASSES
    assert before(timed.started, "blue299", "large") == 1, "nor does it wait until all others have run"


def test_one_that_waits_for_the_cache_is_passed_by_so_many(steps: Steps) -> None:
    """Smaller ones need not wait for it to start, and it does not wait for all of them."""
    flow = Flow("class", "s")
    steps.add("long", flow, tokens=60, max_tokens=126)  # 6 of 16 blocks
    steps.step()
    steps.add("large", flow, tokens=60, max_tokens=196)
    steps.add("larger", flow, tokens=60, max_tokens=196)
    for number in range(60):
        steps.add(f"small{number}", flow)
    steps.run()
    assert before(steps.started, "large", "small") == 0, "it fits beside the first"
    assert PLACES <= before(steps.started, "larger", "small") <= MOST_PASSES + PLACES


@pytest.fixture
def timed(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """A scheduler whose steps take 1 ms, and 100 ms more with a block of the tenant red."""
    monkeypatch.setattr("executor.plugin.scheduler.time", SimpleNamespace(monotonic=lambda: steps.now))
    steps.blocks = {"red": 0.1}
    return steps


def test_a_tenant_with_slow_blocks_sits_out_while_a_short_trace_runs(timed: Steps) -> None:
    """Its requests keep their places and their cache, and none of them starts."""
    red, blue = Flow("red", "s", 0.75), Flow("blue", "s", 0.75)
    for number in range(40):
        timed.add(f"red{number}", red, max_tokens=20)
    for _ in range(10):
        timed.step()
    for number in range(5):
        timed.inside.clear()
        timed.add(f"blue{number}", blue, max_tokens=8)
        began = timed.now
        while f"blue{number}" in timed.scheduler.requests:
            timed.step()
        assert timed.inside == [{"blue"}] * 8 and timed.now - began == pytest.approx(0.008), number
        timed.inside.clear()
        for _ in range(5):
            timed.step()
        assert timed.inside == [{"red"}] * 5
    timed.run()
    assert [name for name in timed.started if name.startswith("red")] == [f"red{number}" for number in range(40)]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_tenants_with_slow_and_quick_blocks_have_time_by_weight(timed: Steps, weight: float) -> None:
    red, blue = Flow("red", "s"), Flow("blue", "s", 1.0, weight)
    timed.blocks["blue"] = 0.02
    for number in range(200):
        timed.add(f"red{number}", red, tokens=1, max_tokens=20)
        timed.add(f"blue{number}", blue, tokens=1, max_tokens=20)
    for _ in range(100):
        timed.step()
    timed.inside.clear()
    for _ in range(500):
        timed.step()
    seconds = {name: sum(name in one for one in timed.inside) * timed.blocks[name] for name in timed.blocks}
    assert seconds["blue"] / seconds["red"] == pytest.approx(weight, rel=0.1)


def test_a_tenant_does_not_sit_out_for_a_request_that_cannot_start(timed: Steps) -> None:
    """It holds the cache for which the other waits, and must come to its end."""
    for number in range(2):
        timed.add(f"red{number}", Flow("red", "s"), tokens=60, max_tokens=196)  # half of the cache
    timed.step()
    timed.add("blue", Flow("blue", "s"))
    timed.inside.clear()
    timed.run()
    assert timed.inside[:195] == [{"red"}] * 195 and timed.started[2:] == ["blue"]


def test_a_tenant_does_not_sit_out_when_the_cache_is_full(timed: Steps) -> None:
    """A plain request would be evicted for its own next token, over and over."""
    timed.add("blue", Flow("blue", "s"), tokens=4, max_tokens=8)
    timed.add("red", Flow("red", "s"), tokens=4, max_tokens=20)
    timed.step()
    timed.scheduler._shares._clocks["red"] += 1.0
    pool = timed.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks())
    timed.inside.clear()
    timed.step()
    pool.free_blocks(held)
    timed.step()
    assert timed.inside == [{"blue", "red"}, {"blue"}]
    timed.run()


def test_one_tenants_steps_are_not_timed(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        steps.add(f"red{number}", Flow("red", f"s{number}"))
        steps.plain(f"plain{number}")
    for name in ("over", "charge"):
        monkeypatch.setattr(f"executor.core.step_shares.StepShares.{name}", None)
    steps.run()


def test_one_beyond_its_tenants_share_is_passed_by_so_many(steps: Steps) -> None:
    """Also by its own tenant's; then these wait, and nobody else does."""
    red, blue = Flow("red", "s", 0.5), Flow("blue", "s", 0.5)
    steps.add("red-long", red, tokens=20, max_tokens=100)
    steps.step()
    steps.add("large", red, tokens=60, max_tokens=196)
    for number in range(60):
        steps.add(f"small{number}", red)
        steps.add(f"blue{number}", blue)
    steps.run()
    assert before(steps.started, "large", "small") <= MOST_PASSES + PLACES
    assert before(steps.started, "large", "blue") > 2 * MOST_PASSES, "blue need not wait for red's"
    assert steps.most["red"] <= 3 and steps.most["blue"] <= 3


def test_one_larger_than_a_share_runs_when_its_tenant_runs_nothing_else(steps: Steps) -> None:
    red = Flow("red", "s", 0.25)
    for number in range(3):
        steps.add(f"large{number}", red, tokens=60, max_tokens=196)
    assert steps.run() == ["large0", "large1", "large2"] and steps.most["red"] == 1


def test_a_group_starts_together_whatever_the_share(steps: Steps) -> None:
    red = Flow("red", "s", 0.25)
    steps.add("busy", red, max_tokens=30)
    steps.step()
    for number in range(3):
        steps.add(f"group/{number}", red, gang=3)
    steps.step()
    steps.step()
    assert {one.request_id for one in steps.scheduler.running if one.status == RequestStatus.RUNNING} >= {
        f"group/{number}" for number in range(3)
    }
    steps.run()


def test_steps_in_which_nothing_changes_order_nothing(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        steps.add(f"a{number}", Flow("a", "s"), max_tokens=50)
        steps.add(f"b{number}", Flow("b", "s"), max_tokens=50)
    steps.step()
    steps.step()
    calls: list[int] = []
    monkeypatch.setattr("executor.plugin.waiting_room.in_turn", lambda *args: calls.append(1))
    for _ in range(10):
        steps.step()
    assert not calls


def test_groups_do_not_keep_a_large_request_waiting_for_ever(steps: Steps) -> None:
    flow = Flow("class", "s")
    steps.add("long", flow, tokens=60, max_tokens=126)
    steps.step()
    steps.add("large", flow, tokens=60, max_tokens=196)
    steps.add("larger", flow, tokens=60, max_tokens=196)
    for number in range(30):
        for member in range(2):
            steps.add(f"group{number}/{member}", flow, gang=2)
    steps.run()
    assert before(steps.started, "larger", "group") <= MOST_PASSES + PLACES


def test_plain_and_traced_requests_start_by_turns(steps: Steps) -> None:
    for number in range(30):
        steps.plain(f"plain{number}")
    for number in range(10):
        steps.add(f"red{number}", Flow("red", "s"))
    steps.run()
    assert 7 <= before(steps.started, "red9", "plain") <= 13
    of_plain = [name for name in steps.started if name.startswith("plain")]
    assert of_plain == [f"plain{number}" for number in range(30)]


def test_requests_in_the_room_keep_the_engine_going_and_leave_when_given_up(steps: Steps) -> None:
    scheduler = steps.scheduler
    steps.add("gang/0", Flow("red", "s"), gang=2)
    steps.add("one", Flow("red", "s"))
    assert scheduler.has_requests() and scheduler.get_num_unfinished_requests() == 2
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    steps.step()
    assert not steps.started and not scheduler.has_unfinished_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    steps.step()
    assert steps.started == ["one"] and scheduler.get_num_unfinished_requests() == 2
    assert [one.request_id for one in scheduler.finish_requests("gang/0", RequestStatus.FINISHED_ABORTED)] == ["gang/0"]
    assert not scheduler._room.waiting and "gang/0" not in scheduler.requests
    steps.add("gang/1", Flow("red", "s"), gang=2)
    assert steps.run() == ["one", "gang/1"] and not scheduler.has_unfinished_requests()


def test_requests_in_the_room_are_counted_as_waiting(config: Any) -> None:
    config.cache_config.num_gpu_blocks = BLOCKS + 1
    steps = Steps(config, log_stats=True)
    for number in range(PLACES + 4):
        steps.add(f"red{number}", Flow("red", "s"), max_tokens=20)
    steps.step()
    assert steps.stats is not None
    assert (steps.stats.num_running_reqs, steps.stats.num_waiting_reqs) == (PLACES, 4)


def test_a_request_goes_back_into_the_room_when_vllm_evicts_in_its_step(steps: Steps) -> None:
    """Four plain requests fill the cache; the next block that one of them needs is another's."""
    for number in range(4):
        steps.plain(f"plain{number}", tokens=32 * 4 - 1, max_tokens=10)
    steps.step()
    steps.step()
    assert len(steps.started) == 4 and not steps.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    steps.add("red", Flow("red", "s"), tokens=4, max_tokens=2)
    steps.step()
    assert [one.request_id for one in steps.scheduler.waiting] == ["plain3"], "it was not evicted"
    assert "red" not in steps.started and list(steps.scheduler._room.waiting) == ["red"]
    steps.run()
    assert steps.started[-1] == "red"
