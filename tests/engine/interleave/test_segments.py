"""Blocks that run between the segments of a pass give what they give between the modules of an eager pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor.core.ended import Ended
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import LocalEngine
from tests.engine.in_two_ways import in_two_ways
from tests.engine.interleave.test_loops_in_tables import KEEP, PROMPTS, block, check_same, loop

STEPS = 12
LOOK = "if float(model.model.layers[1].output[0].sum()) > 1e9:\n    print(step)"  # no plan can decide on a value
GUARD = "if float(model.model.layers[0].input_layernorm.output.sum()) > 1e9:\n    print(step)\n"

# Blocks that are no plans. Most of them ask for the same in each step; others ask for what no step before asked for.
BLOCKS = {
    "reads one layer": loop(KEEP + "\n" + LOOK),
    "reads every layer": loop(
        GUARD + "for layer in model.model.layers:\n    kept.append([layer.mlp.input.save(), layer.output[0].save()])"
    ),
    "steers in place": loop("model.model.layers[0].output[0][:] += vector\n" + KEEP + "\n" + LOOK),
    "assigns an output": loop(
        GUARD + "x = model.model.layers[0].mlp.output\nmodel.model.layers[0].mlp.output = x * 0.5 + vector\n" + KEEP
    ),
    "assigns an item": loop(
        "h = model.model.layers[0].output\nmodel.model.layers[0].output = (h[0] + vector, h[1])\n" + KEEP + "\n" + LOOK
    ),
    "assigns what other code holds": loop(
        "x = model.model.layers[0].input_layernorm.input\nif x.sum().tolist() < 1e9:\n"
        "    model.model.layers[0].input_layernorm.input = x + vector\n" + KEEP
    ),
    "assigns an input at times": loop(
        "x = model.model.layers[1].mlp.input\nif x.sum().tolist() < 1e9 and step % 3 == 2:\n"
        "    model.model.layers[1].mlp.input = x + vector\n" + KEEP
    ),
    "reads the stream and the heads": loop(
        GUARD + "kept.append(model.blocks[0].attn.z.save())\nmodel.blocks[1].resid_mid[:] += vector\n"
        "kept.append(model.blocks[1].resid_post.save())"
    ),
    "reads the pattern": loop(GUARD + "kept.append(model.blocks[1].attn.pattern.save())\n" + KEEP),
    "asks for another location later": loop(
        "h = model.model.layers[0].mlp.output\nh[:] += vector\nif h.sum().tolist() < 1e9 and step == 7:\n"
        "    kept.append(model.model.layers[1].self_attn.output.save())\n" + KEEP
    ),
    "assigns, then asks for another location": loop(
        "h = model.model.layers[0].mlp.output\nmodel.model.layers[0].mlp.output = h + vector\n"
        "if h.sum().tolist() < 1e9 and step == 8:\n    model.model.layers[1].self_attn.output[:] *= 0.5\n" + KEEP
    ),
    "asks for a location that has passed": loop(
        KEEP + "\nif step == 6:\n    try:\n        model.model.layers[0].output\n"
        "    except Exception as error:\n        kept.append(str(error))"
    ),
    "skips a module": loop(GUARD + "model.model.layers[1].mlp.skip(model.model.layers[1].mlp.input)\n" + KEEP),
    "applies a module": loop(
        "h = model.model.norm.output[0]\nkept.append(model.lm_head(h).topk(3)[1].tolist())\n"
        "kept.append(model.logits.output.argmax(-1).tolist())"
    ),
    "looks at the logits": loop("kept.append(model.logits.output.max().tolist())"),
    "sets the samples": loop(
        GUARD + "tokens = model.samples.output\ntokens[:] = (int(tokens[0]) * 7 + 3) % 400\nkept.append(int(tokens[0]))"
    ),
    "is for the prompt alone": "kept = [model.model.layers[i].output[0].save() for i in range(2)].save()\n",
}
MISSES = {"asks for another location later", "assigns, then asks for another location"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """Two engines of one model: eager steps, and steps in segments beside loops in the tables."""
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    eager, segments = ({"graphs": on, "segments": on} for on in (False, True))
    with in_two_ways(checkpoint, eager, segments, at_once=False, max_num_seqs=8) as made:
        yield made


def counts(engine: LocalEngine) -> tuple[int, int]:
    """Return how many steps have begun in segments so far, and how many of these ended eager."""
    assert engine.segments is not None
    found = engine.segments.dispatcher.counts
    return found.steps["in segments of captured graphs"], found.missed


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_what_it_gives_in_eager_steps(engines: tuple[LocalEngine, LocalEngine], name: str) -> None:
    before = counts(engines[1])
    rans = [
        engine.run_traces(
            [[block(BLOCKS[name], i, max_tokens=STEPS)] for i in range(2)], plain=(PROMPTS[2],), plain_tokens=STEPS
        )
        for engine in engines
    ]
    for one, other in zip(rans[0][:2], rans[1][:2], strict=True):
        check_same(one, other)
    assert rans[0][2].token_ids == rans[1][2].token_ids
    steps, missed = (now - then for now, then in zip(counts(engines[1]), before, strict=True))
    if "alone" not in name:
        assert steps >= 4
    assert missed <= 3 and (missed > 0 or name not in MISSES)


def test_blocks_of_all_kinds_that_come_and_go(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """More requests than the batch has room for, with loops in the tables among them: they join and leave in any step."""
    texts = [*BLOCKS.values(), loop(KEEP), loop("model.model.layers[0].output[0][:] += vector\n" + KEEP)]
    before = counts(engines[1])
    rans = []
    for engine in engines:
        blocks = [block(text, i % 3, max_tokens=9 + (5 * i) % 13) for i, text in enumerate([*texts, *reversed(texts)])]
        rans.append(engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],) * 3, plain_tokens=30))
    for i, (one, other) in enumerate(zip(*rans, strict=True)):
        assert (i, one.token_ids) == (i, other.token_ids)
        if one.state is not None:
            check_same(one, other)
    assert counts(engines[1])[0] - before[0] > 10


def test_a_block_that_fails_between_segments_fails_alone(engines: tuple[LocalEngine, LocalEngine]) -> None:
    failing = loop("h = model.model.layers[0].output[0]\nif h.sum().tolist() < 1e9 and step == 6:\n    1 / 0\n" + KEEP)
    misfit = loop(
        "h = model.model.layers[0].output[0]\nif step == 6:\n    model.model.layers[0].output = h.sum()\n" + KEEP
    )
    spoiling = loop(
        "h = model.model.layers[0].output[0]\nif h.sum().tolist() < 1e9 and step == 6:\n    h[:] = float('nan')"
    )
    rans = []
    for engine in engines:
        texts = [BLOCKS["steers in place"], failing, misfit, spoiling]
        rans.append(engine.run_traces([[block(text, i % 3, max_tokens=STEPS)] for i, text in enumerate(texts)]))
    check_same(rans[0][0], rans[1][0])
    for one, other in zip(rans[0][1:], rans[1][1:], strict=True):
        assert one.state is Ended.FAILED and other.state is Ended.FAILED
        assert one.failure is not None and other.failure is not None
        assert (one.failure.message, one.failure.code) == (other.failure.message, other.failure.code)
        assert one.token_ids == other.token_ids


def test_a_block_that_is_given_up_between_segments_leaves_nothing(engines: tuple[LocalEngine, LocalEngine]) -> None:
    engine = engines[1]
    for steps in (1, 4, 7):
        engine.give_up(block(BLOCKS["assigns an output"], 0), steps)
        assert engine.interleaver.idle
