"""What a model's description says of a location is what a block at that location is told, for every location."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from interpose.contract.names import written
from interpose.modules.serves import verdict
from interpose.modules.tree import Node, tree_of
from tests.engine.harness import Block, LocalEngine

SHAPE = Shape(layers=1, hidden=128, context=256)


@pytest.fixture(scope="module", params=sorted({"llama", "gpt2", "gptj", "gpt_neox", "mixtral"} & set(ARCHITECTURES)))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, SHAPE)
    engine = LocalEngine(checkpoint, dtype="float32")
    yield engine
    engine.close()


def locations(tree: Node) -> Iterator[str]:
    roots = [tree, *tree.pseudo.values()]
    for node in (node for root in roots for node in root.walk()):
        names = [*node.values, *node.lacking] if node.canonical else ["output", "input", "inputs", *node.weights]
        yield from (f"{written(node.path)}.{name}" for name in names)


def test_every_location(engine: LocalEngine) -> None:
    tree = tree_of(engine.describe())
    verdicts = {place: verdict(tree, place) for place in locations(tree)}
    refused = 0
    for place, said in verdicts.items():
        [ran] = engine.run(Block([5, 400, 17], f"x = {place}", {"max_tokens": 1}))
        assert bool(said) == (ran.failure is None), (place, said, ran.failure)
        if ran.failure is not None:
            refused += 1
            assert said.reason in ran.failure.message, place
    assert refused > 3 and sum(map(bool, verdicts.values())) > 20
