"""LoRA adapters by name: each request computes with its own, and blocks see the model's tree as without any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from executor.model.describe import describe_model
from executor.model.lora import Adapters, modules_of
from executor.plugin.config import check_config
from interpose.cli.demo_model import write_demo_model
from interpose.v1.model_pb2 import ModelDescription
from tests.engine.harness import Block, LocalEngine, close
from tests.engine.notebook import notebook
from tests.fidelity.adapters import ADAPTERS
from tests.fidelity.lora import Adapted, over_two_ranks
from tests.fidelity.measure import PROMPTS, Cells
from tests.oracle import Edit, Oracle, difference

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    """The model as it is described without adapters."""
    engine = LocalEngine(write_demo_model(tmp_path_factory.mktemp("plain") / "llama"), dtype="float32")
    try:
        return describe_model(engine.llm.llm_engine.vllm_config, engine.worker.interpose_tree)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def adapted(without: ModelDescription, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    made = Adapted(tmp_path_factory.mktemp("lora"), "llama", 1)
    yield made
    assert made.engine.interleaver.idle
    made.engine.close()


def check(cells: Cells, adapted: Adapted, ranks: int) -> None:
    """Compare what was measured with what may be refused: what is refused without adapters too."""
    refused = {place.row for place in adapted.places if place.truth is None}
    assert sum(isinstance(found, float) for row in cells.values() for found in row.values()) > 150
    for row, conditions in cells.items():
        assert set(conditions) == {
            f"{phase}, {name}" for phase in ("prefill", "decode") for name in ("no adapter", *ADAPTERS)
        }
        for condition, found in conditions.items():
            if isinstance(found, str):
                split = ranks > 1 and "split over the tensor-parallel ranks" in found
                assert row in refused or split, f"{row}, {condition}: {found}"
            else:
                assert found <= TOLERANCE, f"{row}, {condition}: {found}"


def test_every_location_is_that_of_the_merged_weights(adapted: Adapted) -> None:
    """Three requests in one batch: without an adapter, and with each of two."""
    check(adapted.cells(), adapted, 1)
    by_adapter = [truth.raw.logits[0] for truth in adapted.truth]
    assert min(difference(by_adapter[0], other) for other in by_adapter[1:]) > 1e-2, "the adapters must show"


def test_a_scan_after_a_step_of_several_requests(adapted: Adapted) -> None:
    """The adapters' kernels know the rows of the step before, which are others."""
    ran, *_ = adapted.engine.run(Block([5, 9, 2], "x = model.logits.output.save()"), plain=([4, 5, 6], [7, 8]))
    assert ran.failure is None
    model = notebook(adapted.engine)
    with model.scan([5, 9, 2, 7, 1, 3, 8, 4]):
        logits = model.logits.output.save()
    assert logits.shape == ran.saved["x"].shape


def test_every_location_over_two_ranks(adapted: Adapted, tmp_path: Path) -> None:
    check(over_two_ranks(tmp_path), adapted, 2)


def test_blocks_see_the_tree_as_without_adapters(adapted: Adapted, without: ModelDescription) -> None:
    found = describe_model(adapted.engine.llm.llm_engine.vllm_config, adapted.engine.worker.interpose_tree)

    def seen(tree: ModelDescription) -> dict[str, object]:
        return {module.path: (module.class_name, module.detail, list(module.parameters)) for module in tree.modules}

    assert seen(found) == seen(without) and list(found.execution_order) == list(without.execution_order)
    refusals = [
        {(node.path, value.name): value.refusal for node in tree.canonical for value in node.values}
        for tree in (found, without)
    ]
    assert refusals[0] == refusals[1]
    applied = {module.path for module in without.modules if not module.not_applied}
    refused = {
        module.path.rpartition(".")[2] for module in found.modules if module.path in applied and module.not_applied
    }
    assert refused == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "mlp"}


def test_an_edit_in_one_request_and_none_in_the_others(adapted: Adapted) -> None:
    path = "model.layers.1.mlp.down_proj"
    source = "model.model.layers[1].mlp.down_proj.input[:, ::2] = 0.25\nlogits = model.logits.output.save()"
    blocks = [[Block(PROMPTS[1], source, lora=lora)] for lora in adapted.requests]
    quiet = [[Block(PROMPTS[1], "logits = model.logits.output.save()", lora=lora)] for lora in adapted.requests]
    rans = adapted.engine.run_traces([*blocks, *quiet])
    base = Path(adapted.engine.llm.llm_engine.vllm_config.model_config.model)

    def strided(value: torch.Tensor) -> torch.Tensor:
        value[:, ::2] = 0.25
        return value

    for i, checkpoint in enumerate((base, *(base.parent / name / "merged" for name in ADAPTERS))):
        oracle = Oracle(checkpoint)
        assert rans[i].failure is None
        edited = oracle.run(PROMPTS[1], 1, [Edit(path, "input", strided)]).logits[0]
        assert difference(rans[i].saved["logits"], edited) <= TOLERANCE
        assert difference(rans[3 + i].saved["logits"], oracle.run(PROMPTS[1], 1).logits[0]) <= TOLERANCE


def test_what_is_applied_has_no_adapter_in_it_or_is_refused(adapted: Adapted) -> None:
    lora = adapted.requests[1]
    source = """
        h = model.model.layers[3].output
        lens = model.lm_head(model.model.norm(h[0] + h[1])[-1]).save()
        last = model.logits.output.save()
    """
    [ran] = adapted.engine.run(Block(PROMPTS[0], source, lora=lora))
    assert ran.failure is None and close(ran.saved["lens"], ran.saved["last"][0])
    embedded = "e = model.model.embed_tokens(torch.tensor([5, 6])).save()"
    [ran] = adapted.engine.run(Block([5, 6], embedded + "\nown = model.model.embed_tokens.output.save()", lora=lora))
    assert ran.failure is None and close(ran.saved["e"], ran.saved["own"])
    for call, words in (
        ("model.model.layers[1].mlp(h)", "adapters of the batch's rows"),
        ("model.model.layers[1].self_attn.o_proj(h)", "adapters of the batch's rows"),
        ("model.logits(h)", r"write model.lm_head\(h\)"),
        ("model.unembed(h)", r"write model.lm_head\(h\)"),
    ):
        [ran] = adapted.engine.run(Block([5, 6], f"h = model.model.embed_tokens.output\nx = {call}", lora=lora))
        assert ran.failure is not None, call
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(ran.failure.message)


def test_the_paths_are_those_of_the_model(adapted: Adapted) -> None:
    paths = [path for path, _ in modules_of(adapted.engine.worker.model_runner.get_model())]
    assert not any("base_layer" in path for path in paths) and "model.layers.0.mlp.down_proj" in paths


def test_adapters_whose_shards_would_be_cut_in_another_way(adapted: Adapted) -> None:
    model = adapted.engine.llm.llm_engine.vllm_config.model_config.model
    config = EngineArgs(model=model, enable_lora=True, fully_sharded_loras=True).create_engine_config()
    with pytest.raises(ValueError, match="fully_sharded_loras"):
        check_config(config)
    check_config(EngineArgs(model=model, enable_lora=True).create_engine_config())


def test_what_is_wrong_with_an_adapter_is_said_at_start(tmp_path: Path) -> None:
    def adapter(name: str, **config: object) -> dict[str, str]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": 4, **config}))
        return {name: str(tmp_path / name)}

    for folders, words in (
        ({"gone": str(tmp_path / "nowhere")}, "gone: there is no .*adapter_config.json"),
        (adapter("head", target_modules=["q_proj", "lm_head"]), "head changes lm_head"),
        (adapter("saved", target_modules=["q_proj"], modules_to_save=["embed_tokens"]), "saved changes embed_tokens"),
        (adapter("dora", target_modules=["q_proj"], use_dora=True), "no DoRA"),
        (adapter("none", r="many"), "is no adapter's configuration"),
    ):
        with pytest.raises(ValueError, match=words):
            Adapters(folders)
    both = Adapters(adapter("a", target_modules=["q_proj"]) | adapter("b", r=20, target_modules="down_proj"))
    assert both.names == ["a", "b"] and both.options({}) == {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32}
    assert both.options({"max_lora_rank": 64})["max_lora_rank"] == 64 and Adapters({}).options({}) == {}
    for given, words in (
        ({"enable_lora": False}, "need enable_lora"), ({"max_loras": 2}, "2 adapters need 3"), ({"max_lora_rank": 16}, "has 20"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            both.options(given)
    found = both.request("b")
    assert found is not None and found.lora_int_id == 2 and both.request("") is None
    with pytest.raises(ValueError, match="there is no LoRA adapter 'c'; it has a, b"):
        both.request("c")


def test_prompts_from_the_cache_are_of_the_same_adapter(adapted: Adapted) -> None:
    ids = [5 + 37 * i % 480 for i in range(150)]
    source, sampling = "x = model.logits.output.save()", {"max_tokens": 3, "ignore_eos": True}
    for cached in (0, 128):
        blocks = [[Block(ids, source, sampling, lora=lora)] for lora in adapted.requests]
        rans = adapted.engine.run_traces(blocks)
        assert [ran.cached for ran in rans] == [cached] * len(rans)
        for ran, weights in zip(rans, adapted.weights, strict=True):
            truth = Oracle(weights).run(ids, 3)
            assert ran.failure is None and ran.token_ids == truth.tokens
            assert difference(ran.saved["x"], truth.logits[0]) <= TOLERANCE


def test_loops_in_the_tables_give_what_their_blocks_give(adapted: Adapted, tmp_path: Path) -> None:
    """Requests of the base model and of each adapter in one batch, in taps and in programs.

    It closes the second engine and with it the process groups, so no test of the first may follow.
    """
    from tests.engine.interleave.test_loops_in_tables import LOOPS, PROMPTS, STEPS, block, check_same

    names = ("reads every layer", "adds a vector", "assigns an input", "ablates a head", "an autoencoder")
    model = adapted.engine.llm.llm_engine.vllm_config.model_config.model
    adapters = Adapters({name: str(Path(model).parent / name) for name in ADAPTERS})
    loops = LocalEngine(Path(model), dtype="float32", graphs=True, **adapters.options({}))
    try:
        rans = []
        for engine in (adapted.engine, loops):
            blocks = [
                replace(block(LOOPS[name][0], i), lora=lora)
                for name in names
                for i, lora in enumerate(adapted.requests)
            ]
            rans.append(engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],), plain_tokens=STEPS))
        for one, other in zip(*(some[:-1] for some in rans), strict=True):
            check_same(one, other)
        tokens = [ran.token_ids for ran in rans[0][:3]]
        assert tokens[0] != tokens[1] != tokens[2]
        # Of the three prompts of a text, the first shows its length alone. The others are the shortest and the longest since
        # then, so that their steps are in the tables too.
        count = (STEPS - 1) + 2 * STEPS
        assert loops.interleaver.loops.steps == count * len(names), loops.interleaver.loops.refused
    finally:
        loops.close()
