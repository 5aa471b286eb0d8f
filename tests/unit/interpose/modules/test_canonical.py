"""Canonical values in the notebook: their names are known there, and what a model does not have is refused there."""

from __future__ import annotations

import ast

import pytest

import interpose
from interpose.modules.envoy import Envoy
from interpose.modules.tree import tree_of
from interpose.program.check import check_locations
from interpose.v1 import model_pb2

PARALLEL = "this architecture runs attention and MLP in parallel"


@pytest.fixture
def tree():
    described = model_pb2.ModelDescription(name="tiny", class_name="GPTJForCausalLM")
    described.modules.add(path="", class_name="GPTJForCausalLM")
    described.modules.add(path="transformer", class_name="GPTJModel")
    described.canonical.add(path="blocks", title="Blocks")
    for i in range(2):
        block = described.canonical.add(path=f"blocks.{i}", title="Block")
        block.values.add(name="resid_pre", shape="[tokens, 8]")
        block.values.add(name="resid_mid", refusal=PARALLEL)
        attention = described.canonical.add(path=f"blocks.{i}.attn", title="Attention")
        attention.values.add(name="q", shape="[tokens, 2, 4]")
    embed = described.canonical.add(path="embed", title="Embedding")
    embed.values.add(name="output", shape="[tokens, 8]")
    return tree_of(described)


def check(tree, source):
    check_locations(ast.parse(source).body, "<block>", {"model": Envoy(tree, tree)}, frozenset())


def test_printing(tree):
    assert repr(Envoy(tree, tree)).splitlines()[3:15] == [
        "  (samples): Location()",
        "  (blocks): Blocks(",
        "    (0-1): 2 x Block(",
        "      (resid_pre): [tokens, 8]",
        f"      (resid_mid): refused: {PARALLEL}",
        "      (attn): Attention(",
        "        (q): [tokens, 2, 4]",
        "      )",
        "    )",
        "  )",
        "  (embed): Embedding(",
        "    (output): [tokens, 8]",
    ]


def test_values_are_no_modules(tree):
    model = Envoy(tree, tree)
    assert "q" in dir(model.blocks[0].attn) and "blocks" in dir(model) and "output" not in tree.child("blocks").words
    assert [block.path for block in model.blocks] == ["blocks.0", "blocks.1"]
    with pytest.raises(interpose.InvalidArgument, match=r"blocks\.1\.attn\.q exists only while the model runs"):
        _ = model.blocks[1].attn.q
    with pytest.raises(interpose.InvalidArgument, match="exists only while the model runs"):
        model.blocks[1].resid_pre = 0


@pytest.mark.parametrize(
    "source",
    [
        "model.blocks[1].attn.q[:, 0] = 0",
        "x = model.blocks[0].resid_pre.shape",
        "model.blocks[0].next().resid_pre += 1",
        "for block in model.blocks:\n    block.attn.q",
        "model.embed.output[:] = 0",
    ],
)
def test_values_pass_the_check(tree, source):
    check(tree, source)


@pytest.mark.parametrize(
    "source, said",
    [
        ("x = model.blocks[0].resid_mid", PARALLEL),
        ("model.blocks[0].resid_mid = 0", PARALLEL),
        ("x = model.blocks[2].resid_pre", "has 2 modules, 0 to 1"),
        ("x = model.blocks[0].resid_pree", "resid_pre"),
        ("x = model.blocks[0].output", "has no value 'output'"),
        ("x = model.blocks[0].q", r"blocks\.0\.attn\.q"),
        ("x = model.block[0].resid_pre", "blocks"),
    ],
)
def test_what_there_is_not_is_refused_with_the_line(tree, source, said):
    with pytest.raises(interpose.UnknownLocation, match=said) as caught:
        check(tree, source)
    assert caught.value.frames[0].line == 1


def test_a_module_of_the_same_name_is_kept():
    described = model_pb2.ModelDescription(name="tiny")
    described.modules.add(path="blocks", class_name="ModuleList")
    described.canonical.add(path="blocks", title="Blocks")
    assert Envoy(tree_of(described), tree_of(described)).blocks._node.class_name == "ModuleList"
