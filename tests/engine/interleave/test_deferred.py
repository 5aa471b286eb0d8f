"""Requests whose blocks do not run give what the blocks give, and their blocks run after all where they have to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from executor.core.ended import Ended
from executor.saves import rows
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import Block, Limits, LocalEngine, Ran, lone_request
from tests.engine.interleave.test_loops_in_tables import HIDDEN, KEEP, LOOPS, STEPS, block, check_same, loop

# Of the loops of that test, those whose blocks need not run the second time.
DEFERRED = {
    *("reads one layer", "reads every layer", "reads the stream", "begins later"),
    *("adds a vector", "adds to the stream", "sets some columns", "scales before and after", "ablates a head"),
    *("makes a tensor", "assigns an output", "assigns an input"),
    *("keeps values on the host", "keeps some columns, wider", "keeps a difference"),
    *("an autoencoder", "computes the last row", "two layers computed"),
    *("keeps the last row", "keeps rows of its prompt", "changes the last row"),
}
STEERS = loop("model.model.layers[0].output[0][:] += vector\n" + KEEP)
UNLIKE = "other = [1]\n"  # a block with this line runs


@pytest.fixture
def tables(engines: tuple[LocalEngine, LocalEngine]) -> LocalEngine:
    """The engine with loops in the tables."""
    return engines[1]


def ended(engine: LocalEngine) -> int:
    """Return how many requests have ended without their blocks so far."""
    count: int = engine.interleaver._deferral.ended
    return count


def finished_at_once(
    engine: LocalEngine, blocks: list[Block], before_step: Callable[[int, list[str]], None] = lambda step, keys: None
) -> list[Ran]:
    """Run each block as a trace of its own; all are finished by one call when the last request has ended.

    Args:
        before_step: called with the number of each step and the requests' ids.
    """
    from vllm import SamplingParams

    core, rans, calls = engine.llm.llm_engine, [Ran() for _ in blocks], []
    traces = [engine.trace([one], {}) for one in blocks]
    keys = [f"at-once-{trace.id}" for trace in traces]
    for key, trace, one in zip(keys, traces, blocks, strict=True):
        params = SamplingParams(temperature=0.0, **one.sampling, extra_args=lone_request(trace).to_args())
        core.add_request(key, {"prompt_token_ids": one.prompt, "cache_salt": key}, params)
    step = 0
    while core.has_unfinished_requests():
        before_step(step, keys)
        step += 1
        for output in core.step():
            if output.finished:
                at = keys.index(output.request_id)
                rans[at].token_ids = list(output.outputs[0].token_ids)
                result = Result(
                    token_ids=rans[at].token_ids, finish_reason="length", prompt_token_ids=blocks[at].prompt
                )
                calls.append((traces[at].id, 0, result.to_plain()))
    for (trace_id, _, _), ending in zip(calls, engine.worker.interpose_finish_all(calls), strict=True):
        ran = rans[[trace.id for trace in traces].index(trace_id)]
        ran.state, ran.events, _ = ending
        engine.take(ran, ran.events)
    return rans


def counted(ran: Ran) -> pb.Accounting:
    """Return a run's accounting without its seconds."""
    assert ran.accounting is not None
    found = pb.Accounting()
    found.CopyFrom(ran.accounting)
    found.ClearField("block_seconds")
    found.ClearField("seconds")
    return found


def told(ran: Ran) -> list[pb.Event]:
    """Return a run's events without the seconds of its accounting."""
    events = [pb.Event.FromString(data) for data in ran.events]
    for event in events:
        if event.WhichOneof("kind") == "accounting":
            event.accounting.CopyFrom(counted(ran))
    return events


@pytest.mark.parametrize("name", LOOPS)
def test_a_block_that_does_not_run_gives_what_it_gives(engines: tuple[LocalEngine, LocalEngine], name: str) -> None:
    text, tables = LOOPS[name][0], engines[1]
    [expected] = engines[0].run(block(text, 0))
    [first] = tables.run(block(text, 0))
    before = ended(tables)
    [second] = tables.run(block(text, 0))
    assert ended(tables) - before == (name in DEFERRED)
    check_same(expected, second)
    assert counted(first) == counted(second)
    if name in DEFERRED and all(len(event) < Limits.inline_bytes for event in first.events):
        assert told(first) == told(second)


def test_each_request_has_its_own_constants(engines: tuple[LocalEngine, LocalEngine]) -> None:
    expected, rans = ([engine.run(block(STEERS, number))[0] for number in (0, 1, 2, 0)] for engine in engines)
    before = ended(engines[1])
    rans = [engines[1].run(block(STEERS, number))[0] for number in (0, 1, 2, 0)]
    # The block runs once more for a length of prompt whose taps come from the plans of other lengths.
    assert ended(engines[1]) - before == 3
    for one, other in zip(expected, rans, strict=True):
        check_same(one, other)
    assert not torch.equal(rans[0].saved["kept"][-1], rans[1].saved["kept"][-1])


def test_constants_of_another_form_are_not_taken_for_the_same(engines: tuple[LocalEngine, LocalEngine]) -> None:
    text = loop("kept.append(model.model.layers[1].output[0] - vector)")
    vectors = [torch.linspace(-1, 1, HIDDEN), torch.linspace(-1, 1, HIDDEN, dtype=torch.float64), torch.ones(1)]
    for vector in (*vectors, *vectors):
        one, other = (engine.run(replace(block(text, 0), captured={"vector": vector}))[0] for engine in engines)
        check_same(one, other)


def test_requests_that_end_together_end_each_in_its_own_way(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """Blocks that did not run, blocks that did, and loops that spoil the cache."""
    prints = loop(KEEP, after="print(len(kept))")
    spoils = loop("model.model.layers[0].output[0][:] *= 1e39")
    texts = [STEERS, prints, spoils, loop(KEEP), STEERS, spoils]
    blocks = [block(text, i % 3, max_tokens=3 + i, ignore_eos=True) for i, text in enumerate(texts)]
    for _ in range(2):
        before = ended(engines[1])
        one, other = (finished_at_once(engine, blocks) for engine in engines)
        for mine, theirs in zip(one, other, strict=True):
            assert mine.state is theirs.state
            if mine.state is Ended.DONE:
                check_same(mine, theirs)
            else:
                assert mine.failure is not None and theirs.failure is not None and "finite" in theirs.failure.message
                assert mine.failure.code == theirs.failure.code
        assert [ran.state for ran in other].count(Ended.FAILED) == 2
    assert ended(engines[1]) - before == 3


@pytest.mark.parametrize("body", [KEEP, "model.model.layers[0].output[0][:] += vector\n" + KEEP])
def test_a_request_that_is_evicted_ends_as_its_block_does(tables: LocalEngine, body: str) -> None:
    def evict(step: int, keys: list[str]) -> None:
        if step == 4:  # as the runner does when the engine computes a request anew
            tables.interleaver.preempted(keys[0])

    rans = []
    for before in ("", UNLIKE):
        for _ in range(2):
            [ran] = finished_at_once(tables, [block(loop(body, before=before), 0)], evict)
        rans.append(ran)
    one, other = rans
    assert one.state is other.state
    if one.state is Ended.DONE:
        check_same(one, other)
        assert counted(one) == counted(other)
    else:
        assert one.failure is not None and other.failure is not None and one.failure.message == other.failure.message


def test_values_that_no_stack_takes_are_sent_as_the_block_would(
    engines: tuple[LocalEngine, LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = engines[1]
    [expected] = engines[0].run(block(loop(KEEP), 0))
    tables.run(block(loop(KEEP), 0))
    monkeypatch.setattr(rows, "MAX_ARRAY_BYTES", 100)
    before = ended(tables)
    [ran] = tables.run(block(loop(KEEP), 0))
    assert ended(tables) == before
    check_same(expected, ran)
    assert ran.accounting is not None and ran.accounting.steps == STEPS
    for one in finished_at_once(tables, [block(loop(KEEP), 0)] * 2):
        check_same(expected, one)
    assert ended(tables) == before


def test_what_is_saved_is_bounded(tables: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.run(block(loop(KEEP), 0))
    interleaver = tables.interleaver
    small = replace(interleaver._deferral._host.limits, max_saved_bytes=1000)
    monkeypatch.setattr(interleaver._deferral, "_host", replace(interleaver._deferral._host, limits=small))
    monkeypatch.setattr(interleaver._endings, "_limits", small)
    before = ended(tables)
    [deferred] = tables.run(block(loop(KEEP), 0))
    assert ended(tables) - before == 1
    [other] = tables.run(block(loop(KEEP, before=UNLIKE), 0))
    for ran in (deferred, other):
        assert ran.failure is not None and not ran.saved
        assert ran.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    assert deferred.failure is not None and other.failure is not None
    assert (deferred.state, deferred.failure.message) == (other.state, other.failure.message)


@pytest.mark.parametrize("tokens", [1, 2])
def test_short_generations(engines: tuple[LocalEngine, LocalEngine], tokens: int) -> None:
    for text in (loop(KEEP), loop(KEEP, "tracer.iter[1:]"), loop(KEEP, "tracer.iter[2:]")):
        for _ in range(2):
            one, other = (engine.run(block(text, 0, max_tokens=tokens))[0] for engine in engines)
            check_same(one, other)


def test_a_request_that_is_given_up_leaves_nothing(tables: LocalEngine) -> None:
    tables.run(block(STEERS, 0))
    for steps in (1, 4):
        tables.give_up(block(STEERS, 0), steps)
        assert tables.interleaver.idle and not tables.interleaver.loops


def test_large_values_are_in_blobs_of_the_trace(tables: LocalEngine) -> None:
    text = loop("for layer in model.model.layers:\n    kept.append(layer.output[0].save())")
    large = replace(block(text, 0), prompt=list(range(5, 105)))  # 50 KiB for each layer
    before = ended(tables)
    [first], [second] = (tables.run(large) for _ in range(2))
    assert ended(tables) - before == 1
    check_same(first, second)
    assert any(b"/0/0" in event for event in second.events), "no blob"
