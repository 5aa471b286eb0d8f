"""The same blocks of the tiny model in the worker and in a sandbox, beside other requests: equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from executor.plugin import processes
from executor.sandbox import pool
from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import EVERY_STEP, Block, LocalEngine, Ran, check_failed
from tests.engine.notebook import notebook

BLOCKS = {
    "saved": "h = model.model.layers[1].output[0].save()",
    "steered": "model.model.layers[0].output[0][:] *= 3\nlogits = model.logits.output.save()",
    "assigned": (
        "o = model.model.layers[1].mlp.output\nmodel.model.layers[1].mlp.output = o * 2 + 1\nlogits = model.logits.output.save()"
    ),
    "every step": EVERY_STEP,
    "a list": "kept = []\nfor step in tracer.iter[:]:\n    kept.append(model.model.layers[1].output[0].save())",
    "a module applied": "h = model.model.layers[1].output[0]\nx = model.model.layers[0].mlp(h).save()",
    "a lens": "h = model.blocks[1].resid_post\nx = model.unembed(model.final_norm(h)).save()",
    "a module applied wrongly": "h = model.model.layers[1].output[0]\nx = model.model.layers[0].mlp(h[:, :3]).save()",
    "a weight": "w = model.model.layers[0].mlp.down_proj.weight.save()",
    "a canonical value": (
        "model.blocks[1].resid_post[:] += 1\nx = model.blocks[1].resid_post.save()\nlogits = model.logits.output.save()"
    ),
    "a pattern": "p = model.blocks[0].attn.pattern.save()",
    "a token replaced": "model.samples.output[:] = 7",
    "a token that is none": "model.samples.output[:] = 10**7",
    "a skip": "model.model.layers[1].mlp.skip(model.model.layers[1].mlp.input * 0)\nlogits = model.logits.output.save()",
    "a stop": (
        "for step in tracer.iter[:]:\n    h = model.model.layers[0].output[0].save()\n    if step == 1:\n        tracer.stop()"
    ),
    "an error": "x = model.model.layers[0].output[0]\ny = x.nothing",
    "a misfit": "h = model.model.layers[0].mlp.output\nh.resize_(1, 2)\nmodel.logits.output",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    made = LocalEngine(checkpoint, sandbox=True, dtype="float32")
    yield made
    assert made.interleaver.idle, "a trace left something behind"
    made.close()


def same(one: Any, other: Any) -> bool:
    """Return whether two saved values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one == other) or repr(one) == repr(other)


def both(engine: LocalEngine, source: str) -> tuple[list[Ran], list[Ran]]:
    """Run a block in the worker and in a sandbox, with another request beside it each time."""
    ran = []
    for trusted in (True, False):
        engine.trusted = trusted
        block = Block([1, 2, 3, 4, 5], source + "\n", sampling={"max_tokens": 3})
        ran.append(engine.run(block, plain=([4, 5, 6],)))
    return ran[0], ran[1]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_in_a_sandbox_what_it_gives_in_the_worker(engine: LocalEngine, name: str) -> None:
    (here, beside), (there, beside_it) = both(engine, BLOCKS[name])
    assert same(here.saved, there.saved)
    assert (here.token_ids, here.state, here.logs) == (there.token_ids, there.state, there.logs)
    assert beside.token_ids == beside_it.token_ids
    assert (here.failure is None) == (there.failure is None), (here.failure, there.failure)
    if here.failure is not None and there.failure is not None:
        assert (here.failure.code, here.failure.message) == (there.failure.code, there.failure.message)
        assert list(here.failure.frames) == list(there.failure.frames)
    assert there.accounting is not None and {tier.tier for tier in there.accounting.tiers} == {"block"}


ONE, TWO, LONG = [5, 400, 17, 99], [3, 77], {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}


def invokes_that_share_a_list(model: Any) -> list[Any]:
    mlp = model.model.layers[1].mlp
    with model.trace(**LONG) as tracer:
        rows, total = [].save(), {"sum": 0}.save()  # type: ignore[attr-defined]
        for prompt in (ONE, TWO):
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    seen = mlp.output.sum()
                    rows.append((step, mlp.output[-1]))
                    total["sum"] = total["sum"] + seen
    return [rows, total]


def a_patch_from_prompt_to_prompt(model: Any) -> list[Any]:
    mlp = model.model.layers[1].mlp
    with model.trace(temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ONE):
            clean = mlp.output
            barrier()
            given = model.logits.output.save()
        with tracer.invoke(TWO):
            barrier()
            mlp.output[-1] = clean[-1]
            logits = model.logits.output.save()
    return [given, logits]


def both_change_where_they_wait(model: Any) -> list[Any]:
    mlp = model.model.layers[1].mlp
    with model.trace(temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ONE):
            mine = mlp.output
            barrier()
            mine[-1] += yours[0]  # type: ignore[used-before-def, name-defined]  # noqa: F821
            first = model.logits.output.save()
        with tracer.invoke(TWO):
            yours = mlp.output
            barrier()
            yours[:] *= 2
            second = model.logits.output.save()
    return [first, second]


def an_invoke_that_reads_another(model: Any) -> list[Any]:
    mlp = model.model.layers[1].mlp
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(ONE):
            taken = mlp.output[-1].clone()

            def twice(value: Any) -> Any:
                return value * 2

        with tracer.invoke(TWO):
            mlp.output[-1] = twice(taken)
            logits = model.logits.output.save()
    return [logits]


def an_invoke_without_a_prompt(model: Any) -> list[Any]:
    mlp = model.model.layers[1].mlp
    with model.trace(**LONG) as tracer:
        with tracer.invoke(ONE):
            one = model.logits.output.save()
        with tracer.invoke():
            mlp.output[:] += 1
            rows = mlp.output.save()
            results = tracer.result.save()
        with tracer.invoke(TWO):
            two = model.logits.output.save()
    return [one, rows, two, [result.token_ids for result in results]]


def a_cache(model: Any) -> list[Any]:
    with model.trace(ONE, **LONG) as tracer:
        cache = tracer.cache(modules=[model.model.layers[0], model.model.layers[1].mlp], include_inputs=True)
        model.model.layers[0].output[0][:] *= 2
    with model.trace(TWO, **LONG) as tracer:
        every = tracer.cache(dtype=torch.bfloat16)
    kept = [cache["model.layers.0"].output, cache["model.layers.1.mlp"].inputs, every["model.layers.1"].output]
    return [kept, sorted(every)]


def a_scan(model: Any) -> list[Any]:
    with model.scan(ONE):
        hidden = model.model.layers[1].output[0].save()
        logits = model.lm_head(model.model.norm(hidden)).save()
    return [list(hidden.shape), str(hidden.dtype), list(logits.shape)]


def several_errors(model: Any) -> list[Any]:
    errors = []
    for wrong in ("gone", "passed", "barrier"):
        try:
            with model.trace(**LONG) as tracer:
                barrier = tracer.barrier(3)
                with tracer.invoke(ONE):
                    if wrong == "barrier":
                        barrier()
                    model.logits.output.save()
                with tracer.invoke(TWO):
                    late = model.model.layers[1].output
                    if wrong == "gone":
                        late.nothing
                    if wrong == "passed":
                        model.model.layers[0].output
                    if wrong == "barrier":
                        barrier()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    assert len(errors) == 3
    return errors


TRACES = [
    invokes_that_share_a_list,
    a_patch_from_prompt_to_prompt,
    both_change_where_they_wait,
    an_invoke_that_reads_another,
    an_invoke_without_a_prompt,
    a_cache,
    a_scan,
    several_errors,
]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
def test_a_trace_gives_in_a_sandbox_what_it_gives_in_the_worker(
    engine: LocalEngine, trace: Callable[[Any], list[Any]]
) -> None:
    made = []
    for trusted in (True, False):
        engine.trusted = trusted
        made.append(trace(notebook(engine)))
    assert same(*made), made


def test_edits_run_in_the_process_of_the_trace_that_names_them(engine: LocalEngine) -> None:
    at = "model.model.layers[1].mlp"
    steer = engine.edit("steer", f"print('edit')\nfor step in tracer.iter[:]:\n    {at}.output[:] += 1\n")
    double = engine.edit("double", f"for step in tracer.iter[:]:\n    {at}.output = {at}.output * factor\n", factor=2.0)
    block = Block(ONE, f"seen = {at}.output.save()\nlogits = model.logits.output.save()\n", sampling={"max_tokens": 3})
    made: dict[bool, list[Ran]] = {}
    for trusted in (True, False):
        engine.trusted = trusted
        made[trusted] = []
        for edits in ([steer, double], [double, steer]):
            engine.applied = edits
            made[trusted] += engine.run(block)
            made[trusted] += engine.run(block, Block(TWO, block.source, sampling={"max_tokens": 2}))
    engine.applied = []
    for here, there in zip(made[True], made[False], strict=True):
        assert here.failure is None and same(here.saved, there.saved)
        assert (here.token_ids, here.logs, here.state) == (there.token_ids, there.logs, there.state)
    assert not same(made[False][0].saved, made[False][3].saved), "the order of the edits makes no difference"


def test_an_edit_that_fails_fails_the_request_with_its_name(engine: LocalEngine) -> None:
    engine.trusted = False
    engine.applied = [engine.edit("wrong", "model.model.layers[1].output\nmodel.model.layers[0].output\n")]
    [ran] = engine.run(Block(ONE, "logits = model.logits.output.save()\n"))
    engine.applied = []
    check_failed(ran, pb.ERROR_CODE_OUT_OF_ORDER, "in the edit 'wrong'", None)


def test_a_block_that_loses_the_process_fails_the_invokes_of_its_trace_alone(engine: LocalEngine) -> None:
    engine.trusted = False
    source = "import ctypes\nmodel.model.layers[0].output\nctypes.string_at(0)\n"
    good = "h = model.model.layers[1].output[0].save()\n"
    first, second, plain = engine.run(Block(ONE, source), Block(TWO, good), plain=(ONE,))
    check_failed(first, pb.ERROR_CODE_INTERVENTION, "was ended", None)
    check_failed(second, pb.ERROR_CODE_INTERVENTION, "another block of the trace", None)
    engine.trusted = True
    [_, beside] = engine.run(Block(TWO, good), plain=(ONE,))
    assert plain.token_ids == beside.token_ids


def test_an_explanation_says_that_a_sandboxed_block_runs_as_it_is(engine: LocalEngine) -> None:
    engine.trusted = False
    found = notebook(engine).explain("for step in tracer.iter[:]:\n    model.logits.output[:] += 1\n")
    assert [part.tier for part in found.parts] == ["block"]
    assert found.parts[0].why == "the tenant's blocks run in a sandbox"


def test_a_trace_that_is_given_up_ends_its_process(engine: LocalEngine) -> None:
    engine.trusted = False
    engine.give_up(Block([1, 2, 3], "for step in tracer.iter[:]:\n    model.model.layers[0].output\n"), steps=3)
    assert engine.interleaver.idle


def watched(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[str]]]:
    """Return, for each step to come, how many traced requests wait after its choice, and the requests in it."""
    steps: list[tuple[int, set[str]]] = []
    schedule = engine.scheduler.schedule

    def record(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(
            (len(engine.scheduler._room.waiting), {one.partition("-")[0] for one in output.num_scheduled_tokens})
        )
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", record)
    return steps


def many(count: int) -> list[list[Block]]:
    """Return traces, each with a prompt and a factor of its own."""
    source = "h = model.model.layers[1].output[0] * {0}\nh.save()\n"
    return [[Block([5 + one, 400 - one, 17], source.format(one + 1))] for one in range(count)]


def test_strangers_wait_for_a_process_while_other_requests_go_on(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.trusted = True
    truth = [ran.saved["h"] for ran in engine.run_traces(many(40))]
    engine.trusted = False
    monkeypatch.setattr(engine.worker.interpose_sandboxes, "_ready", 2)
    monkeypatch.setattr(pool, "_NEXT_SECONDS", 0.0)  # no step waits for a process
    steps = watched(engine, monkeypatch)
    rans = engine.run_traces(many(40), plain=(ONE, TWO), plain_tokens=20)
    plain = {f"r{engine.count - 1}", f"r{engine.count}"}
    for ran, value in zip(rans, truth, strict=False):
        assert ran.failure is None, ran.failure
        torch.testing.assert_close(ran.saved["h"], value, rtol=1e-4, atol=1e-5)
    with_plain = [number for number, (_, inside) in enumerate(steps) if plain <= inside]
    assert [len(ran.token_ids) for ran in rans[40:]] == [20, 20]
    assert with_plain == list(range(with_plain[0], with_plain[0] + 20)), "a step had to wait"
    assert sum(waiting > 0 for waiting, _ in steps) > 5, "there was a process for every trace"


def test_traces_wait_for_the_next_zygote(engine: LocalEngine) -> None:
    engine.trusted = False
    zygote = engine.worker.interpose_sandboxes._zygote
    zygote.kill()
    zygote.wait()
    # No step has told the scheduler that the processes, which were ready, have ended with their zygote.
    rans = engine.run_traces(many(2 * pool.READY))
    assert [ran.failure for ran in rans if ran.failure is not None] == []


def test_a_trace_that_waits_too_long_fails_with_the_reason(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.trusted = False
    sandboxes = engine.worker.interpose_sandboxes
    monkeypatch.setattr(processes, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(pool, "_NEXT_SECONDS", 0.0)
    monkeypatch.setattr(sandboxes, "_ask", lambda: None)
    rans = engine.run_traces(many(8))
    failed = [ran.failure for ran in rans if ran.failure is not None]
    assert failed and all(one.code == pb.ERROR_CODE_UNAVAILABLE and "submit it again" in one.message for one in failed)


def test_a_prompt_comes_from_the_cache_and_none_of_its_rows_does(engine: LocalEngine) -> None:
    """A block in a sandbox that asks for a row after all is told so at its line."""
    engine.trusted = False
    ids = [5 + 37 * i % 480 for i in range(150)]
    first, again = (engine.run(Block(ids, EVERY_STEP, sampling=LONG), plain=([4, 5, 6],))[0] for _ in range(2))
    assert (first.cached, again.cached) == (0, 128) and again.accounting is not None
    assert again.accounting.cached_tokens == 128
    assert first.failure is None and first.token_ids == again.token_ids
    for one, other in zip(first.saved["logits"], again.saved["logits"], strict=True):
        assert (one - other).abs().max() <= 1e-4
    last = "x = model.blocks[0].resid_post[-1].save()\n"
    [row] = engine.run(Block(ids, last, sampling=LONG))
    assert row.failure is None and row.cached == 0, "a sandboxed block has its whole prompt computed for a row"
    [ran] = engine.run(Block(ids, "y = 1\n" + last, sampling=LONG, prefix=True, last=1))
    check_failed(ran, pb.ERROR_CODE_INVALID_ARGUMENT, "may have come from the prefix cache", line=2)
    [ran] = engine.run(Block(ids, "x = 1\n" + BLOCKS["steered"], sampling=LONG, prefix=True))
    check_failed(ran, pb.ERROR_CODE_INVALID_ARGUMENT, "may have come from the prefix cache", line=2)
    assert engine.run(Block(ids, EVERY_STEP, sampling=LONG))[0].token_ids == first.token_ids
