"""A block that asks for the last rows of its prompt alone has those before from the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import expression
from tests.engine.harness import EVERY_STEP, Block, LocalEngine, Ran
from tests.engine.interleave.test_chunks import SHAPE, STEP, TOLERANCE, VECTOR, prompt
from tests.oracle import Edit, Oracle, difference

SIZE = 32  # of a cache block
FEW = {"max_tokens": 4, "ignore_eos": True}
PLACES = [
    "blocks.0.resid_pre",
    "blocks.0.attn.q",
    "blocks.0.attn.v",
    "blocks.0.attn.rot_k",
    "blocks.0.attn.z",
    "blocks.0.attn_out",
    "blocks.0.resid_mid",
    "blocks.0.mlp.act",
    "blocks.0.mlp_out",
    "blocks.1.resid_post",
]
READ = "values = {}\n" + "".join(f"values[{at!r}] = {expression(at)}[-1].save()\n" for at in PLACES) + "values.save()\n"
AT = "blocks.0.resid_post"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, SHAPE)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint, canonical=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    """Its steps are short."""
    engine = LocalEngine(
        checkpoint, dtype="float32", max_model_len=512, max_num_batched_tokens=STEP, block_size=SIZE, sandbox=False
    )
    yield engine
    assert engine.interleaver.idle and not engine.scheduler._traced
    engine.close()


def cached(ran: Ran) -> int:
    """How many tokens of a prompt came from the cache, as the engine and the block's account say it."""
    assert ran.failure is None, ran.failure
    assert ran.accounting is not None and ran.accounting.cached_tokens == ran.cached
    return ran.cached


def whole(tokens: int, size: int = SIZE) -> int:
    """Return how many of so many tokens are in whole cache blocks."""
    return tokens // size * size


def check_logits(ran: Ran, oracle: Oracle, ids: list[int], edits: list[Edit] | None = None) -> None:
    """A run of EVERY_STEP is what transformers says."""
    truth = oracle.run(ids, 4, edits or [])
    assert ran.failure is None and ran.token_ids == truth.tokens, ran.failure
    for mine, true in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(mine, true) <= TOLERANCE


@pytest.mark.parametrize("tokens", [20, 50, STEP, STEP + 1, 150])
def test_the_last_row_of_a_prompt_from_the_cache(engine: LocalEngine, oracle: Oracle, tokens: int) -> None:
    """Values and tokens are those of a prompt that was computed, in one step or in chunks."""
    ids, size = prompt(tokens, 31), engine.scheduler.block_size
    block = Block(ids, READ + EVERY_STEP, FEW, captured={})
    [alone] = engine.run(Block(ids, READ + EVERY_STEP, FEW, prefix=False))
    [first], [again] = engine.run(block), engine.run(block)
    assert [cached(one) for one in (alone, first, again)] == [0, 0, whole(tokens - 1, size)]
    truth = oracle.run(ids, 1)
    for ran in (alone, first, again):
        check_logits(ran, oracle, ids)
        for path, value in ran.saved["values"].items():
            assert difference(value, truth.value(path)[-1]) <= TOLERANCE, path
            assert difference(value, alone.saved["values"][path]) <= TOLERANCE, path


CHANGES: dict[str, tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "adds": ("model.blocks[0].resid_post[-1] += v", 1, lambda h: torch.cat([h[:-1], h[-1:] + VECTOR])),
    "sets": ("model.blocks[0].resid_post[-1] = v", 1, lambda h: torch.cat([h[:-1], VECTOR[None]])),
    "by a name": ("h = model.blocks[0].resid_post\nh[-1] *= 2", 1, lambda h: torch.cat([h[:-1], h[-1:] * 2])),
    "in place": ("x = model.blocks[0].resid_post[-1]\nx.mul_(2)", 1, lambda h: torch.cat([h[:-1], h[-1:] * 2])),
    "of three": ("model.blocks[0].resid_post[-3:] += v", 3, lambda h: torch.cat([h[:-3], h[-3:] + VECTOR])),
    "a column": ("model.blocks[0].resid_post[-2, 5] = 3.0", 2, lambda h: put(h, -2, 5, 3.0)),
    "by layers": (
        "for i in range(2):\n    model.blocks[i].resid_post[-1] += v * (1 - i)",
        1,
        lambda h: torch.cat([h[:-1], h[-1:] + VECTOR]),
    ),
    "if it is large": (
        "if model.blocks[0].resid_post[-1].norm() > 0:\n    model.blocks[0].resid_post[-1] += v",
        1,
        lambda h: torch.cat([h[:-1], h[-1:] + VECTOR]),
    ),
}


def put(h: torch.Tensor, row: int, column: int, number: float) -> torch.Tensor:  # [tokens, width]
    made = h.clone()
    made[row, column] = number
    return made


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_last_rows(engine: LocalEngine, oracle: Oracle, name: str) -> None:
    """It is done in a prompt from the cache, and goes to no other request: not from a whole last cache block either."""
    source, last, change = CHANGES[name]
    edits = [Edit(AT, "output", change, {0})]
    seed = 100 + list(CHANGES).index(name)
    for ids in (prompt(50, seed), prompt(STEP, seed)):
        block = Block(ids, source + "\n" + EVERY_STEP, FEW, {"v": VECTOR})
        longer = [*ids, *prompt(20, 1)]
        [beside] = engine.run(Block(longer, READ + EVERY_STEP, FEW))
        changed = [engine.run(block)[0] for _ in range(2)]
        [other] = engine.run(Block(longer, EVERY_STEP, FEW))
        [same] = engine.run(Block(ids, READ + EVERY_STEP, FEW))
        assert [cached(one) for one in changed] == [whole(len(ids) - last)] * 2
        assert [cached(one) for one in (beside, other, same)] == [0, whole(len(longer) - 1), whole(len(ids) - 1)]
        for ran in changed:
            check_logits(ran, oracle, ids, edits)
        for ran, asked in ((beside, longer), (other, longer), (same, ids)):
            check_logits(ran, oracle, asked)


def test_a_changed_prompt_leaves_its_beginning_alone(engine: LocalEngine, oracle: Oracle) -> None:
    """The cache block that ends with the changed row is found by no request, and the block before it is."""
    ids = prompt(STEP, 40)
    change = "model.blocks[0].resid_post[-1] += v\n"
    [first] = engine.run(Block(ids, change + EVERY_STEP, FEW, {"v": VECTOR}))
    longer = [*ids, *first.token_ids]
    [other] = engine.run(Block(longer, EVERY_STEP, FEW))
    assert [cached(first), cached(other)] == [0, STEP - SIZE]
    check_logits(other, oracle, longer)


def test_numbers_that_are_not_finite_stay_with_the_request(engine: LocalEngine, oracle: Oracle) -> None:
    """The guard of the cache zeroes what the changed row is in, and nothing that other requests find."""
    ids = prompt(50, 53)
    [spoilt] = engine.run(Block(ids, "model.blocks[0].resid_post[-1] = float('nan')\n" + EVERY_STEP, FEW))
    assert spoilt.failure is not None and "finite" in spoilt.failure.message
    [ran] = engine.run(Block(ids, READ + EVERY_STEP, FEW))
    assert cached(ran) == 32
    check_logits(ran, oracle, ids)


def test_steering_in_each_step(engine: LocalEngine, oracle: Oracle) -> None:
    """Beside other blocks, and the same in a prompt that comes in chunks."""
    source = (
        "rows, logits = [], []\nfor step in tracer.iter[:]:\n    model.blocks[0].resid_post[-1] += v\n"
        "    rows.append(model.blocks[1].resid_post[-1].save())\n    logits.append(model.logits.output.save())\n"
        "logits.save()\n"
    )
    edit = Edit(AT, "output", lambda h: torch.cat([h[:-1], h[-1:] + VECTOR]))
    for tokens in (50, 150):
        ids, other = prompt(tokens, 41), prompt(tokens, 42)
        engine.run(Block(ids, "", FEW))
        blocks = [Block(ids, source, FEW, {"v": VECTOR}), Block(other, READ + EVERY_STEP, FEW)]
        steered, computed, plain = engine.run_traces([[one] for one in blocks], plain=(prompt(90, 43),))
        assert [cached(steered), cached(computed)] == [whole(tokens - 1), 0]
        check_logits(steered, oracle, ids, [edit])
        check_logits(computed, oracle, other)
        assert plain.token_ids == oracle.run(prompt(90, 43), 4).tokens
        truth = oracle.run(ids, 4, [edit])
        for step, row in enumerate(steered.saved["rows"]):
            assert difference(row, truth.value("blocks.1.resid_post", "output", step)[-1]) <= TOLERANCE


def test_a_lens_over_layers(engine: LocalEngine, oracle: Oracle) -> None:
    ids = prompt(70, 44)
    source = (
        "lens = [model.unembed(model.final_norm(block.resid_post[-1:])).save() for block in model.blocks]\n"
        "logits = model.logits.output.save()\n"
    )
    first, again = (engine.run(Block(ids, source, FEW))[0] for _ in range(2))
    assert [cached(first), cached(again)] == [0, whole(69)]
    truth = oracle.run(ids, 1).logits[0]
    for ran in (first, again):
        assert difference(ran.saved["logits"], truth) <= TOLERANCE
        assert difference(ran.saved["lens"][-1], truth) <= TOLERANCE


@pytest.mark.parametrize(("key", "first"), [("-18:", 32), ("-19:", 31), ("40", 40), ("3:5", 3), ("-100:", 0), ("0", 0)])
def test_the_cache_is_used_up_to_the_first_row(engine: LocalEngine, oracle: Oracle, key: str, first: int) -> None:
    ids = prompt(50, 45)
    engine.run(Block(ids, "", FEW))
    [ran] = engine.run(Block(ids, f"x = model.blocks[1].resid_post[{key}].save()\n{EVERY_STEP}", FEW))
    assert cached(ran) == whole(first)
    check_logits(ran, oracle, ids)
    truth = oracle.run(ids, 1).value("blocks.1.resid_post")
    assert difference(ran.saved["x"], eval(f"truth[{key}]")) <= TOLERANCE


def test_several_last_rows_of_a_prompt_in_chunks(engine: LocalEngine, oracle: Oracle) -> None:
    """The last chunk may have one row alone, so the prompt is computed whole."""
    ids = prompt(2 * STEP + 1, 46)
    engine.run(Block(ids, "", FEW))
    [ran] = engine.run(Block(ids, f"x = model.blocks[1].resid_post[-3:].save()\n{EVERY_STEP}", FEW))
    assert cached(ran) == 0
    check_logits(ran, oracle, ids)
    assert difference(ran.saved["x"], oracle.run(ids, 1).value("blocks.1.resid_post")[-3:]) <= TOLERANCE


def test_an_index_past_the_end_is_the_blocks_own_error(engine: LocalEngine) -> None:
    for key in ("-70", "60"):
        [ran] = engine.run(Block(prompt(50, 47), f"x = model.blocks[1].resid_post[{key}].save()\n"))
        assert ran.failure is not None and ran.failure.exception_type == "IndexError", ran.failure


def test_outputs_and_inputs_of_the_engines_own_modules(engine: LocalEngine, oracle: Oracle) -> None:
    """A tuple's items each have rows, in which the last is changed."""
    layers, out = "model.model.layers", "output[0]"
    if engine.describe().class_name.startswith("GPT2"):
        layers, out = "model.transformer.h", "output"
    source = (
        f"a = {layers}[0].mlp.input[-1].save()\nb = {layers}[0].mlp.output[-1].save()\n{layers}[0].{out}[-1] += v\n"
        f"{EVERY_STEP}"
    )
    ids = prompt(50, 52)
    first, again = (engine.run(Block(ids, source, FEW, {"v": VECTOR}))[0] for _ in range(2))
    assert [cached(first), cached(again)] == [0, 32]
    edit = Edit(AT, "output", lambda h: torch.cat([h[:-1], h[-1:] + VECTOR]), {0})
    truth = oracle.run(ids, 1)
    for ran in (first, again):
        check_logits(ran, oracle, ids, [edit])
        for name, path in (("a", "blocks.0.mlp_in"), ("b", "blocks.0.mlp_out")):
            assert difference(ran.saved[name], truth.value(path)[-1]) <= TOLERANCE


SHOWN = "model.blocks[1].resid_post"


@pytest.mark.parametrize(
    "source",
    [
        f"x = {SHOWN}[-2].save()",
        f"x = {SHOWN}[0].save()",
        f"x = {SHOWN}[:].save()",
        f"x = {SHOWN}[:-1].save()",
        f"x = {SHOWN}[[-1]].save()",
        f"x = {SHOWN}[..., 0].save()",
        f"x = {SHOWN}.mean(0).save()",
        f"x = ({SHOWN} + 1).save()",
        f"x = torch.stack([{SHOWN}]).save()",
        f"x = torch.relu({SHOWN}).save()",
        f"x = [row for row in {SHOWN}]",
        f"{SHOWN}[-2:] += v",
        f"{SHOWN}[:] = 0",
        f"{SHOWN} = v",
        f"{SHOWN} += v",
        "x = model.blocks[1].attn.pattern[-1].save()",
        "x = model.model.layers[1].mlp.output[-2].save()",
        "x = model.model.layers[1].mlp.input[:].save()",
        "x = model.model.layers[1].mlp.inputs[0][0].save()",
        "model.model.layers[1].mlp.output = v",
        "model.model.layers[1].mlp.skip(v)",
        "cache = tracer.cache()",
    ],
)
def test_other_rows_are_refused(engine: LocalEngine, source: str) -> None:
    """It does not matter whether the cache has them: no row that was not computed is read, and none is changed."""
    if "layers" in source and engine.describe().class_name.startswith("GPT2"):
        source = source.replace("model.model.layers", "model.transformer.h")
    for ids in (prompt(50, 48), prompt(55, len(source))):
        engine.run(Block(prompt(50, 48), "", FEW))
        [ran] = engine.run(Block(ids, "import torch\n" + source, FEW, {"v": VECTOR}, prefix=True, last=1))
        assert ran.failure is not None and ran.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT, ran.failure
        assert "may have come from the prefix cache" in ran.failure.message
        assert ran.failure.frames[-1].line == 2


def test_the_shape_is_that_of_the_whole_prompt(engine: LocalEngine) -> None:
    """No proof is made of it, yet it is never that of the rows which are there."""
    ids = prompt(50, 49)
    source = f"h = {SHOWN}\nx = [tuple(h.shape), len(h), str(h.dtype)].save()\n"
    for _ in range(2):
        [ran] = engine.run(Block(ids, source, prefix=True, last=1))
        assert ran.failure is None, ran.failure
        assert ran.saved["x"] == [(50, SHAPE.hidden), 50, "torch.float32"]


def test_invokes_of_one_trace_and_standing_edits(engine: LocalEngine, oracle: Oracle) -> None:
    ids = prompt(50, 50)
    row = f"row = {SHOWN}[-1].save()\n"
    engine.run(Block(ids, row))
    one, other = engine.run(
        Block(ids, row + EVERY_STEP, FEW), Block(ids, f"late = {SHOWN}[-2].save()\n" + EVERY_STEP, FEW)
    )
    assert [cached(one), cached(other)] == [32, 32]
    engine.applied = [engine.edit("zero", "model.blocks[0].resid_post[:] = 0\n")]
    try:
        [edited] = engine.run(Block(ids, row + EVERY_STEP, FEW))
    finally:
        engine.applied = []
    assert cached(edited) == 0
    truth = oracle.run(ids, 1).value("blocks.1.resid_post")
    assert difference(one.saved["row"], truth[-1]) <= TOLERANCE
    assert difference(other.saved["late"], truth[-2]) <= TOLERANCE
    check_logits(edited, oracle, ids, [Edit(AT, "output", lambda h: h * 0, {0})])
