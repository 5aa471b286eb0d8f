"""Traced requests under the scheduler's whole freedom: chunked prefill, a prefix cache, eviction, steps of their own."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from executor.core.fairness import Flow
from executor.core.request import InvokeRequest
from executor.core.step_shares import StepShares
from executor.engine.options import engine_options
from executor.plugin.config import STEP_TOKENS, check_config, leave_untraced, why_untraced
from executor.plugin.scheduler import InterposeScheduler
from executor.plugin.worker_plain import PlainWorker
from interpose.cli.demo_model import write_demo_model, write_model
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import ModelSettings
from tests.engine.harness import Block, LocalEngine, Ran, watch
from tests.fidelity.architectures import ALL, SHAPE
from tests.oracle import Edit, Oracle, difference

STEP = 64  # tokens of a step
BLOCKS = 12  # of 32 tokens each; one of them is vLLM's own
# Of a configuration with several ranks that nothing is started with: unless it says how, vLLM wants a GPU for each of them.
RANKS: dict[str, Any] = {"distributed_executor_backend": "mp"}
EDIT = "model.model.layers[1].mlp.output[:] = 0\n"
READ = "hidden = model.model.layers[2].mlp.output.save()\n"
EVERY = "logits = []\nfor step in tracer.iter[:]:\n    logits.append(model.logits.output.save())\n"
SLOW = "import time\n" + EVERY.replace("    logits", "    time.sleep(0.03)\n    logits")


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{tokens} {seed}")
    return [rng.randrange(5, 500) for _ in range(tokens)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    """An engine whose steps are short and whose cache is small."""
    engine = LocalEngine(
        checkpoint,
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=6,
        max_num_batched_tokens=STEP,
    )
    yield engine
    assert engine.interleaver.idle
    assert not engine.scheduler._traced
    assert not engine.scheduler._room.waiting and not engine.scheduler._room.gangs
    engine.close()


class Watched:
    """What the scheduler did: the tokens of every request in every step, and who was evicted."""

    def __init__(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[dict[str, int]] = []
        self.evicted: list[str] = []
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                self.steps.append(dict(output.num_scheduled_tokens))
            return output

        def watched_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.evicted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        watch(monkeypatch, scheduler, "schedule", watched_schedule)
        watch(monkeypatch, scheduler, "_preempt_request", watched_preempt)

    def first_steps(self) -> dict[str, int]:
        """The number of the step in which each request first ran."""
        first: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            for request in step:
                first.setdefault(request, number)
        return first

    def chunks(self) -> dict[str, list[int]]:
        """The tokens of each request in its steps."""
        chunks: dict[str, list[int]] = {}
        for step in self.steps:
            for request, tokens in step.items():
                chunks.setdefault(request, []).append(tokens)
        return chunks


@pytest.fixture
def watched(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(engine.scheduler, monkeypatch)


def check(ran: Ran, oracle: Oracle, ids: list[int], tokens: int, edits: list[Edit] | None = None) -> None:
    """A run of READ and EVERY, with the edits before them, is what transformers says."""
    assert ran.failure is None, ran.failure
    truth = oracle.run(ids, tokens, edits or [])
    assert ran.token_ids == truth.tokens
    assert difference(ran.saved["hidden"], truth.value("model.layers.2.mlp")) <= 1e-4
    assert len(ran.saved["logits"]) == tokens
    for mine, true in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(mine, true) <= 1e-4


ZERO = Edit("model.layers.1.mlp", "output", lambda value: value * 0, steps={0})


def test_traced_prompts_stay_whole_beside_prompts_in_chunks(
    engine: LocalEngine, oracle: Oracle, watched: Watched
) -> None:
    traced = [prompt(60), prompt(33), prompt(64), prompt(7)]
    plain = (prompt(150), prompt(90))
    blocks = [
        [Block(ids, (EDIT if i % 2 else "") + READ + EVERY, {"max_tokens": 3, "ignore_eos": True})]
        for i, ids in enumerate(traced)
    ]
    rans = engine.run_traces(blocks, plain=plain)
    for i, (ids, ran) in enumerate(zip(traced, rans, strict=False)):
        check(ran, oracle, ids, 3, [ZERO] if i % 2 else [])
    for ids, ran in zip(plain, rans[len(traced) :], strict=True):
        assert ran.token_ids == oracle.run(ids, 4).tokens
    firsts = sorted(chunks[0] for chunks in watched.chunks().values())
    assert {len(ids) for ids in traced} <= set(firsts)
    assert any(chunks[0] < 90 and sum(chunks) > 90 for chunks in watched.chunks().values()), "no prompt was cut"
    assert all(sum(step.values()) <= STEP for step in watched.steps)


def test_a_prompt_longer_than_a_step_comes_in_chunks(engine: LocalEngine, oracle: Oracle, watched: Watched) -> None:
    fine, ids = prompt(20), prompt(STEP + 1)
    long, other = engine.run_traces([[Block(ids, READ + EVERY)], [Block(fine, READ + EVERY)]])
    check(long, oracle, ids, 1)
    check(other, oracle, fine, 1)
    assert any(len(chunks) > 1 and sum(chunks[:2]) == STEP + 1 for chunks in watched.chunks().values())


def test_traced_prompts_and_a_long_plain_one_take_turns(engine: LocalEngine, watched: Watched) -> None:
    """Neither waits for the other's end: traced prompts that fill a step get every second one."""
    plain = prompt(250)
    blocks = [[Block(prompt(60, seed), READ, {"max_tokens": 1})] for seed in range(4)]
    engine.llm.llm_engine.add_request("long", {"prompt_token_ids": plain}, _sampling(max_tokens=2))
    engine.llm.llm_engine.step()
    engine.run_traces(blocks)
    took = [next(iter(key for key in step if step[key] > 1), "") for step in watched.steps]
    long = [number for number, request in enumerate(took) if request.startswith("long")]
    others = [number for number, request in enumerate(took) if request and not request.startswith("long")]
    assert len(long) >= 4
    assert len(others) == 4
    assert min(others) < max(long), "the traced prompts waited for the whole long one"
    between = [number for number in long if number < max(others)]
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(between))


def _sampling(**values: Any) -> Any:
    return SamplingParams(temperature=0.0, ignore_eos=True, **values)


def test_a_traced_prompt_is_computed_whole_and_others_hit_the_cache(engine: LocalEngine, oracle: Oracle) -> None:
    ids = prompt(64, 9)
    run = lambda: engine.llm.generate([{"prompt_token_ids": ids}], _sampling(max_tokens=3), use_tqdm=False)[0]  # noqa: E731
    truth = oracle.run(ids, 3).tokens
    assert run().outputs[0].token_ids == truth
    [edited] = engine.run_traces([[Block(ids, EDIT + READ + EVERY, {"max_tokens": 3, "ignore_eos": True})]])
    check(edited, oracle, ids, 3, [ZERO])
    assert edited.token_ids != truth
    again = run()
    assert again.num_cached_tokens >= 32
    assert again.outputs[0].token_ids == truth


def test_plain_requests_are_evicted_and_traced_ones_are_not(
    engine: LocalEngine, oracle: Oracle, watched: Watched
) -> None:
    """The cache holds a fraction of what is asked for; everything comes out right, in the end."""
    traced = [prompt(58, seed) for seed in range(2)]
    plain = tuple(prompt(57, seed) for seed in range(4))
    blocks = [[Block(ids, EDIT + READ + EVERY, {"max_tokens": 12, "ignore_eos": True})] for ids in traced]
    rans = engine.run_traces(blocks, plain=plain, plain_tokens=12)
    assert watched.evicted, "the cache should have been too small"
    numbers = {int(request.partition("-")[0].removeprefix("r")) for request in watched.evicted}
    assert not numbers & set(_traced_numbers(engine, len(traced), len(plain)))
    for ids, ran in zip(traced, rans, strict=False):
        check(ran, oracle, ids, 12, [ZERO])
    for ids, ran in zip(plain, rans[len(traced) :], strict=True):
        assert ran.token_ids == oracle.run(ids, 12).tokens


def test_a_block_that_has_ended_and_changed_nothing_leaves_a_plain_request(
    engine: LocalEngine, oracle: Oracle, watched: Watched
) -> None:
    ids = [prompt(58, seed) for seed in range(5)]
    tokens = {"max_tokens": 12, "ignore_eos": True}
    blocks = [
        [Block(one, READ + ("result = tracer.result.token_ids.save()" if i % 2 else ""), tokens)]
        for i, one in enumerate(ids)
    ]
    rans = engine.run_traces(blocks)
    assert watched.evicted, "the cache should have been too small"
    for i, (one, ran) in enumerate(zip(ids, rans, strict=True)):
        assert ran.failure is None, ran.failure
        truth = oracle.run(one, 12)
        assert ran.token_ids == truth.tokens
        assert difference(ran.saved["hidden"], truth.value("model.layers.2.mlp")) <= 1e-4
        assert ran.saved.get("result", truth.tokens) == truth.tokens
        assert len(ran.saved) == 1 + i % 2


def _traced_numbers(engine: LocalEngine, traced: int, plain: int) -> range:
    """The harness numbers traces and requests with one count: a trace and its request, for each; then the plain ones."""
    last = engine.count - plain
    return range(last - 2 * traced + 2, last + 1, 2)


def test_a_request_as_long_as_the_cache_is_not_passed_for_ever(
    engine: LocalEngine, oracle: Oracle, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reserves the most of the cache; once enough have passed it, traced requests behind it wait, plain ones do not."""
    monkeypatch.setattr("executor.plugin.waiting_room.MOST_PASSES", 0)
    big, small = prompt(60), [prompt(64), prompt(50), prompt(40)]
    stop = "    if step == 2:\n        tracer.stop()\n"
    blocks = [
        [Block(small[0], READ + EVERY, {"max_tokens": 34, "ignore_eos": True})],
        [Block(big, READ + EVERY + stop, {"max_tokens": 196, "ignore_eos": True})],
        [Block(small[1], READ + EVERY, {"max_tokens": 5, "ignore_eos": True})],
    ]
    rans = engine.run_traces(blocks, plain=(small[2],))
    for ran, ids, tokens in zip(rans, (small[0], big, small[1]), (34, 3, 5), strict=False):
        check(ran, oracle, ids, tokens)
    order = [name for name, _ in sorted(watched.first_steps().items(), key=lambda item: item[1])]
    assert len(order) == 4
    first = {name.partition("-")[0]: step for name, step in watched.first_steps().items()}
    one, two, three, four = (first[f"r{number}"] for number in (*_traced_numbers(engine, 3, 1), engine.count))
    assert one < two < three
    assert four < two


def test_an_engine_told_to_forget_everything_fails_what_would_be_wrong(engine: LocalEngine, oracle: Oracle) -> None:
    """An operator can reset the cache under running requests; they are computed anew, without what blocks changed."""
    core = engine.llm.llm_engine
    reset = iter([False] * 4 + [True])
    step = core.step

    def stepping() -> Any:
        outputs = step()
        if next(reset, False):
            assert core.reset_prefix_cache(reset_running_requests=True)
        return outputs

    core.step = stepping
    ids = prompt(12)
    tokens = {"max_tokens": 10, "ignore_eos": True}
    try:
        edited, read = engine.run_traces([[Block(ids, EDIT + READ + EVERY, tokens)], [Block(ids, READ, tokens)]])
    finally:
        core.step = step
    assert edited.failure is not None
    assert edited.failure.code == pb.ERROR_CODE_UNAVAILABLE
    assert "evicted" in edited.failure.message
    assert read.failure is None
    assert read.token_ids == oracle.run(ids, 10).tokens


def test_a_seeded_prompt_in_chunks_samples_what_it_samples_whole(engine: LocalEngine, watched: Watched) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    ids = {"prompt_token_ids": prompt(50, 7)}
    [alone] = engine.llm.generate([ids], seeded, use_tqdm=False)
    before = {"prompt_token_ids": prompt(60, 8)}
    _, beside = engine.llm.generate([before, ids], seeded, use_tqdm=False)
    assert list(beside.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    assert [tokens for tokens in watched.chunks().values() if len(tokens) == 7], "it should have been cut"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scheduling_policy", "priority"),
        ("long_prefill_token_threshold", 16),
        ("kv_sharing_fast_prefill", True),
    ],
)
def test_what_traces_cannot_work_with_is_refused_at_start(checkpoint: Path, option: str, value: object) -> None:
    config = EngineArgs(model=str(checkpoint), **{option: value}).create_engine_config()
    with pytest.raises(ValueError, match=option):
        check_config(config)


def test_the_second_runner_is_refused_on_cpus(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(model=str(checkpoint)).create_engine_config()
    disable_envs_cache()  # An engine of this process has read the environment.
    # vLLM itself refuses the variable without Triton, and with Triton chooses this runner by itself.
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=1 .* set it to 0"):
        check_config(config)


@pytest.mark.parametrize("amx", [False, True])
def test_latent_attention_is_served_without_traces_on_cpus_with_amx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amx: bool
) -> None:
    model = write_model(tmp_path / "deepseek", ALL["deepseek_v2"](), SHAPE)
    config = EngineArgs(model=str(model)).create_engine_config()
    check_config(config)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert ("latent attention" in why_untraced(config)) == (amx and current_platform.is_cpu())


def test_expert_parallelism_is_served_without_traces(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "olmoe", "olmoe")
    config = EngineArgs(
        model=str(model), enable_expert_parallel=True, **RANKS, tensor_parallel_size=2
    ).create_engine_config()
    check_config(config)
    assert re.search("enable_expert_parallel is not supported .* spread over ranks", why_untraced(config))
    leave_untraced(config, "why")
    assert config.scheduler_config.scheduler_cls is None
    assert issubclass(resolve_obj_by_qualname(config.parallel_config.worker_cls), PlainWorker)


def test_adapters_over_pipeline_stages_are_refused_at_start(checkpoint: Path) -> None:
    def config(**options: Any) -> Any:
        return EngineArgs(model=str(checkpoint), **RANKS, pipeline_parallel_size=2, **options).create_engine_config()

    with pytest.raises(ValueError, match="lora_modules .* use tensor_parallel_size"):
        check_config(config(enable_lora=True))
    check_config(config())


def test_pipeline_stages_are_refused_with_adapters_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    check_config(EngineArgs(model=str(checkpoint), **RANKS, pipeline_parallel_size=2).create_engine_config())
    config = EngineArgs(
        model=str(checkpoint), **RANKS, pipeline_parallel_size=2, enable_lora=True
    ).create_engine_config()
    with pytest.raises(ValueError, match="lora_modules .* pipeline_parallel_size > 1"):
        check_config(config)


@pytest.mark.parametrize("kind", ["int8_per_token_head", "nvfp4", "fp8_ds_mla"])
def test_caches_that_cannot_be_looked_at_are_served_without_traces(checkpoint: Path, kind: str) -> None:
    config = EngineArgs(model=str(checkpoint)).create_engine_config()
    config.cache_config.cache_dtype = "fp8"
    check_config(config)
    assert not why_untraced(config)
    config.cache_config.cache_dtype = kind
    check_config(config)
    assert re.search("kv_cache_dtype .* cannot be checked", why_untraced(config))


def test_what_only_gpus_can_be_configured_for_is_refused_at_start(checkpoint: Path) -> None:
    config = EngineArgs(model=str(checkpoint)).create_engine_config()
    config.parallel_config.enable_batch_sharded_sampling = True
    with pytest.raises(ValueError, match="enable_batch_sharded_sampling .* some requests only"):
        check_config(config)


def test_a_draft_model_is_served_without_traces(checkpoint: Path) -> None:
    draft = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2}
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    for guessing in (draft, ngram):
        assert engine_options(ModelSettings(model=str(checkpoint), engine={"speculative_config": guessing}))
    config = EngineArgs(model=str(checkpoint), speculative_config=draft).create_engine_config()
    check_config(config)
    assert re.search("speculative_config is not supported .* a model of its own", why_untraced(config))
    config = EngineArgs(model=str(checkpoint), speculative_config=ngram).create_engine_config()
    check_config(config)
    assert not why_untraced(config)


def test_the_length_of_a_step_has_a_default(checkpoint: Path) -> None:
    assert engine_options(ModelSettings(model=str(checkpoint)))["max_num_batched_tokens"] == STEP_TOKENS


@pytest.mark.parametrize(
    ("given", "on_cpus", "on_gpus"),
    [
        ({}, True, None),
        ({"enforce_eager": None}, True, None),
        ({"enforce_eager": True}, True, True),
        ({"enforce_eager": False}, False, False),
        ({"compilation_config": {"mode": 3}}, None, None),
        ({"optimization_level": 2}, None, None),
    ],
)
def test_on_cpus_an_engine_compiles_when_it_is_asked_to(
    checkpoint: Path, given: dict[str, object], on_cpus: bool | None, on_gpus: bool | None
) -> None:
    options = engine_options(ModelSettings(model=str(checkpoint), engine=given))
    assert options.get("enforce_eager") is (on_gpus if torch.cuda.is_available() else on_cpus)


def test_a_cache_for_less_than_one_whole_request_is_refused_at_start(engine: LocalEngine) -> None:
    config = copy.deepcopy(engine.llm.llm_engine.vllm_config)
    cache = dataclasses.replace(engine.scheduler.kv_cache_config, num_blocks=8)
    config.cache_config.num_gpu_blocks = 8
    with pytest.raises(ValueError, match="less than one request of max_model_len"):
        InterposeScheduler(config, cache, engine.scheduler.structured_output_manager, block_size=32)


def test_invokes_start_together_when_they_must(engine: LocalEngine, oracle: Oracle, watched: Watched) -> None:
    ids = [prompt(20), prompt(30), prompt(14)]
    busy = tuple(prompt(100, seed) for seed in range(2))
    blocks = [Block(one, READ + EVERY, {"max_tokens": 4, "ignore_eos": True}, gang=3) for one in ids]
    rans = engine.run_traces([[Block(prompt(60, 5), READ)], blocks], plain=busy)
    for ran, one in zip(rans[1:], ids, strict=False):
        check(ran, oracle, one, 4)
    together = [step for step in watched.steps if set(map(len, ids)) <= set(step.values())]
    assert len(together) == 1
    members = {request for request, tokens in together[0].items() if tokens in map(len, ids)}
    decoding = [members & set(step) for step in watched.steps[watched.steps.index(together[0]) + 1 :]]
    assert all(one in (set(), members) for one in decoding), "the group was torn apart"


def refused_apart(ran: Any) -> bool:
    """Whether an invoke ended at once because those it was to start with did not."""
    return ran.failure is not None and "could not start in one step" in ran.failure.message


def test_a_group_that_fits_no_step_is_refused_and_holds_nobody_up(engine: LocalEngine, oracle: Oracle) -> None:
    """The engine refuses such a trace beforehand (`TraceEngine`); the scheduler lets what reaches it start apart."""
    blocks = [Block(one, READ + EVERY, gang=2) for one in (prompt(40), prompt(41))]
    beside = prompt(12)
    *grouped, other = engine.run_traces([blocks, [Block(beside, READ + EVERY)]])
    assert all(map(refused_apart, grouped)), grouped
    check(other, oracle, beside, 1)


def test_a_group_does_not_wait_for_a_member_that_left(engine: LocalEngine, oracle: Oracle) -> None:
    ids = [prompt(10), prompt(11)]
    blocks = [Block(one, READ + EVERY, gang=3) for one in ids]
    core = engine.llm.llm_engine
    trace_id = f"t{engine.count + 1}"  # that of the trace below
    params = _sampling(max_tokens=1)
    params.extra_args = InvokeRequest(trace_id, 2, gang=3).to_args()
    core.add_request("left", {"prompt_token_ids": prompt(5), "cache_salt": "left"}, params)
    core.abort_request(["left"])
    beside = prompt(12)
    *grouped, other = engine.run_traces([blocks, [Block(beside, READ + EVERY)]])
    assert all(map(refused_apart, grouped)), grouped
    check(other, oracle, beside, 1)


# Prompts from the prefix cache.

FEW = {"max_tokens": 3, "ignore_eos": True}
LOGITS = "first = model.logits.output.save()\n"
IN_LATER_STEPS = "for step in tracer.iter[1:]:\n    model.model.layers[1].mlp.output[:] = 0\n"


def zero_later(tokens: int) -> list[Edit]:
    """What IN_LATER_STEPS does."""
    return [Edit("model.layers.1.mlp", "output", lambda value: value * 0, steps=set(range(1, tokens)))]


def cached(ran: Ran) -> int:
    """How many tokens of a prompt came from the cache, as the engine and the block's account say it."""
    assert ran.accounting is not None and ran.accounting.cached_tokens == ran.cached
    return ran.cached


def all_logits(ran: Ran, oracle: Oracle, ids: list[int], tokens: int, edits: list[Edit] | None = None) -> None:
    """A run of EVERY is what transformers says."""
    assert ran.failure is None, ran.failure
    truth = oracle.run(ids, tokens, edits or [])
    assert ran.token_ids == truth.tokens
    assert len(ran.saved["logits"]) == tokens
    for mine, true in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(mine, true) <= 1e-4


def test_a_block_that_asks_for_nothing_of_its_prompt_has_it_from_the_cache(engine: LocalEngine, oracle: Oracle) -> None:
    """The logits, values of later steps and changes there are those of a prompt that was computed, beside other requests."""
    ids = prompt(60, 21)
    [first] = engine.run(Block(ids, EVERY, FEW))
    assert cached(first) == 0
    other = ids[:40] + prompt(20, 22)
    blocks = [
        [Block(ids, EVERY, FEW)],
        [Block(other, LOGITS + IN_LATER_STEPS, FEW)],
        [Block(ids, "result = tracer.result.save()", FEW), Block(other, EVERY, FEW)],
        [Block(prompt(33, 23), READ + EVERY, FEW)],
    ]
    again, changed, empty, beside, whole, plain = engine.run_traces(blocks, plain=(prompt(90, 24),))
    assert [cached(one) for one in (again, changed, empty, beside, whole)] == [32, 32, 32, 32, 0]
    all_logits(first, oracle, ids, 3)
    all_logits(again, oracle, ids, 3)
    all_logits(beside, oracle, other, 3)
    assert changed.failure is None
    truth = oracle.run(other, 3, zero_later(3))
    assert changed.token_ids == truth.tokens != oracle.run(other, 3).tokens
    assert difference(changed.saved["first"], truth.logits[0]) <= 1e-4
    assert empty.token_ids == oracle.run(ids, 3).tokens
    check(whole, oracle, prompt(33, 23), 3)
    assert plain.token_ids == oracle.run(prompt(90, 24), 4).tokens


def test_prompts_that_begin_alike(engine: LocalEngine, oracle: Oracle) -> None:
    """They come at once: the second takes what the first fills, and the third changes its own prompt."""
    ids = prompt(40, 20)
    blocks = [Block(ids[:34], EVERY, FEW), Block(ids, EVERY, FEW), Block(ids, EDIT + EVERY, FEW)]
    first, second, third = engine.run_traces([[one] for one in blocks])
    assert [cached(one) for one in (first, second, third)] == [0, 32, 0]
    all_logits(first, oracle, ids[:34], 3)
    all_logits(second, oracle, ids, 3)
    all_logits(third, oracle, ids, 3, [ZERO])


def test_the_rest_of_a_long_prompt_comes_in_chunks(engine: LocalEngine, oracle: Oracle, watched: Watched) -> None:
    ids = prompt(200, 25)
    [short] = engine.run(Block(ids[:70], EVERY, FEW))
    beside = Block(prompt(20, 30), EDIT + READ + EVERY, {"max_tokens": 8, "ignore_eos": True})
    long, other = engine.run_traces([[Block(ids, EVERY, FEW)], [beside]])
    [streamed] = engine.run_streamed(Block(ids, EVERY, FEW))
    assert [cached(one) for one in (short, long, streamed, other)] == [0, 64, 192, 0]
    all_logits(short, oracle, ids[:70], 3)
    all_logits(long, oracle, ids, 3)
    check(other, oracle, beside.prompt, 8, [ZERO])
    assert streamed.token_ids == oracle.run(ids, 3).tokens and not streamed.failure
    assert any(len(chunks) > 4 and sum(chunks[:-2]) == 136 for chunks in watched.chunks().values())


def test_values_of_later_steps_behind_a_cached_prompt(engine: LocalEngine, oracle: Oracle) -> None:
    """Attention patterns too, which are computed from the keys in the cache."""
    ids = prompt(50, 26)
    engine.run(Block(ids, "", FEW))
    block = "for step in tracer.iter[1:]:\n    h = model.model.layers[2].mlp.output.save()\n"
    ran, seen = engine.run(
        Block(ids, block, FEW), Block(ids, block + "    p = model.blocks[3].attn.pattern.save()", FEW)
    )
    assert cached(ran) == cached(seen) == 32 and ran.failure is None and seen.failure is None
    truth = oracle.run(ids, 3).value("model.layers.2.mlp", step=2)
    assert difference(ran.saved["h"], truth) <= 1e-4
    pattern = seen.saved["p"]
    assert pattern.shape[1:] == (1, 52)
    assert difference(pattern.sum(-1), torch.ones_like(pattern[..., 0])) <= 1e-4


def test_what_a_block_changes_in_later_steps_goes_to_no_other_request(engine: LocalEngine, oracle: Oracle) -> None:
    """Whole cache blocks of changed tokens are behind the prompt; a request with the same tokens computes them."""
    ids = prompt(40, 27)
    many = {"max_tokens": 60, "ignore_eos": True}
    [changed] = engine.run(Block(ids, IN_LATER_STEPS, many))
    assert changed.failure is None and changed.token_ids == oracle.run(ids, 60, zero_later(60)).tokens
    longer = ids + changed.token_ids
    [ran] = engine.run(Block(longer, EVERY, FEW))
    assert cached(ran) == 32
    all_logits(ran, oracle, longer, 3)
    shared = {"prompt_token_ids": longer, "cache_salt": "\n"}
    [plain] = engine.llm.generate([shared], _sampling(max_tokens=3), use_tqdm=False)
    assert plain.num_cached_tokens == 96, "what the last trace left of its prompt"
    assert plain.outputs[0].token_ids == oracle.run(longer, 3).tokens


@pytest.mark.parametrize(
    "source",
    [
        READ + EVERY,
        EDIT + EVERY,
        "cache = tracer.cache(modules=[model.model.layers[0]])\n" + EVERY,
        "m = [model]\n" + EVERY.replace("model.", "m[0]."),
        EVERY.replace("    logits", "    h = model.model.layers[0].output[0].sum()\n    logits"),
    ],
    ids=["reads", "changes", "records", "another name", "in the loop"],
)
def test_any_other_block_reads_and_leaves_nothing(engine: LocalEngine, oracle: Oracle, source: str) -> None:
    ids = prompt(50, len(source))
    edits = [ZERO] if source.startswith(EDIT) else []
    [before, after, empty] = [engine.run(Block(ids, text, FEW))[0] for text in (source, source, EVERY)]
    assert cached(before) == cached(after) == cached(empty) == 0
    all_logits(before, oracle, ids, 3, edits)
    all_logits(after, oracle, ids, 3, edits)
    all_logits(empty, oracle, ids, 3)
    [again] = engine.run(Block(ids, source, FEW))
    assert cached(again) == 0
    all_logits(again, oracle, ids, 3, edits)


def test_other_blocks_in_the_request_have_its_prompt_computed(engine: LocalEngine, oracle: Oracle) -> None:
    """Standing edits, invokes that start together, names of another invoke, and another tenant."""
    ids = prompt(50, 28)
    engine.run(Block(ids, EVERY, FEW))
    engine.applied = [engine.edit("zero", EDIT)]
    try:
        [edited] = engine.run(Block(ids, EVERY, FEW))
    finally:
        engine.applied = []
    first, later = engine.run(Block(ids, "x = 1", FEW), Block(ids, EVERY + "y = x\n", FEW, after=(0,)))
    [foreign] = engine.run_traces([[Block(ids, EVERY, FEW)]], flows=[Flow("another tenant")])
    [own] = engine.run(Block(ids, EVERY, FEW))
    assert [cached(one) for one in (edited, first, later, foreign, own)] == [0, 32, 0, 0, 32]
    all_logits(edited, oracle, ids, 3, [ZERO])
    for one in (later, foreign, own):
        all_logits(one, oracle, ids, 3)


HOSTILE = {
    "reads": READ,
    "changes": EDIT + EVERY,
    "skips": "model.model.layers[1].mlp.skip(torch.zeros(50, 128))\n" + EVERY,
    "records": "cache = tracer.cache(modules=[model.model.layers[0]])\n" + EVERY,
    "catches": "try:\n    h = model.model.layers[1].mlp.output\n    h[:] = 0\nexcept Exception:\n    pass\n" + EVERY,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_block_of_which_a_wrong_proof_was_believed_gets_no_rows(
    engine: LocalEngine, oracle: Oracle, name: str
) -> None:
    """Whether or not the cache has rows; beside a block of the same kind; and it leaves nothing that is wrong."""
    ids = prompt(50, 29 + len(name))
    bad = [Block(ids, HOSTILE[name], FEW, prefix=True)]
    for expected in (0, 32):
        one, two, good = engine.run_traces([bad, bad, [Block(ids, EVERY, FEW)]])
        for ran in (one, two):
            if name == "catches":
                all_logits(ran, oracle, ids, 3)
                continue
            assert ran.failure is not None and ran.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT, ran.failure
            assert "may have come from the prefix cache; ask for the value in a statement" in ran.failure.message
            assert name == "records" or ran.failure.frames[-1].line == 1
        all_logits(good, oracle, ids, 3)
        assert good.cached >= expected
    assert good.cached == 32


# Engines of their own: the one of the tests before cannot be used any more.


@pytest.mark.parametrize("options", [{}, {"graphs": True}, {"sandbox": True}], ids=["hooks", "tables", "sandboxed"])
def test_requests_that_sit_out_for_another_tenant_get_what_they_get_alone(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The tenant whose blocks are slow pays for them, and a quick tenant's steps are its own."""
    engine = LocalEngine(checkpoint, dtype="float32", block_size=32, num_gpu_blocks_override=24, **options)
    spent: list[dict[str, float]] = []
    inside: list[set[str]] = []
    charge = StepShares.charge

    def watched_charge(shares: StepShares, rows: Any, seconds: float, given: dict[str, float]) -> None:
        spent.append(dict(given))
        inside.append(set(rows))
        charge(shares, rows, seconds, given)

    monkeypatch.setattr(StepShares, "charge", watched_charge)
    red, blue = Flow("red", "s"), Flow("blue", "s")
    slow = [Block(prompt(20 + one, one), READ + SLOW, {"max_tokens": 20, "ignore_eos": True}) for one in range(3)]
    quick = [Block(prompt(30, 7), READ + EVERY, {"max_tokens": 30, "ignore_eos": True})]
    blocks = [*slow, *quick]
    try:
        rans = engine.run_traces([[one] for one in blocks], flows=[red] * 3 + [blue])
        for block, ran in zip(blocks, rans, strict=True):
            assert ran.failure is None, ran.failure
            truth = oracle.run(block.prompt, block.sampling["max_tokens"], [])
            assert ran.token_ids == truth.tokens
            assert difference(ran.saved["hidden"], truth.value("model.layers.2.mlp")) <= 1e-4
            assert difference(torch.cat(ran.saved["logits"]), torch.cat(list(truth.logits))) <= 1e-3
        assert engine.interleaver.idle
    finally:
        engine.close()
    total = {tenant: sum(one.get(tenant, 0.0) for one in spent) for tenant in ("red", "blue")}
    at_once = 3 if "sandbox" in options else 1  # the engine waits once for processes that sleep at the same time
    assert total["red"] >= 3 * 20 * 0.03 / at_once and total["red"] > total["blue"] > 0
    assert inside.count({"blue"}) >= 15, "the quick tenant had few steps of its own"
