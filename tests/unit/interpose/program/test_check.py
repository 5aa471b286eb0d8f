"""A block that was found right is not looked at again for the same modules, and is for others."""

from __future__ import annotations

import ast

import pytest

from interpose.contract.errors import UnknownLocation
from interpose.modules.envoy import Envoy
from interpose.modules.tree import tree_of
from interpose.program import check
from interpose.program.check import check_locations
from interpose.v1 import model_pb2


def model(*paths: str) -> Envoy:
    modules = [model_pb2.Module(path=path, class_name="M") for path in ("", *paths)]
    tree = tree_of(model_pb2.ModelDescription(name="m", modules=modules))
    return Envoy(tree, tree)


def test_a_block_is_checked_for_each_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    whole = check._check

    def counting(*args: object) -> None:
        looked.append(args)
        whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "_check", counting)
    body = ast.parse("x = model.a.output").body
    has, lacks = model("a"), model("b")
    for _ in range(3):
        check_locations(body, "<block>", {"model": has}, frozenset())
    assert len(looked) == 1
    for _ in range(2):
        with pytest.raises(UnknownLocation):
            check_locations(body, "<block>", {"model": lacks}, frozenset())
    assert len(looked) == 3
    check_locations(ast.parse("x = model.a.output").body, "<block>", {"model": has}, frozenset())
    assert len(looked) == 4


def test_few_blocks_are_remembered() -> None:
    tree = model("a")
    for number in range(2 * check._MOST_CHECKED):
        check_locations(ast.parse(f"x{number} = model.a.output").body, "<block>", {"model": tree}, frozenset())
    assert len(check._checked) <= check._MOST_CHECKED
