"""In a worker a name of the model is no value either; and what helps with errors whose own words do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.block.envoy import Envoy, Tracer
from executor.block.traceback import describe
from executor.core.errors import Refusal
from executor.model.tree import ModuleTree
from executor.saves.registry import refuse_names
from interpose.v1 import trace_pb2 as pb


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        self.lm_head = torch.nn.Linear(2, 3)


TREE = ModuleTree(Model(), 1)
ROOT: Any = Envoy(TREE, TREE.root)
USES: list[tuple[Callable[[], Any], str]] = [
    (lambda: ROOT.logits + 1, r"computed with; write model\.logits\.output"),
    (lambda: 1 @ ROOT.logits, r"computed with"),
    (lambda: torch.softmax(ROOT.logits, -1), r"torch \(softmax\); write model\.logits\.output"),
    (lambda: torch.stack([ROOT.lm_head]), r"torch \(stack\); write model\.lm_head\.output"),
    (lambda: torch.ones(2) * ROOT.logits, "torch"),
    (lambda: ROOT.logits[0], r"indexed; write model\.logits\.output\[0\]"),
    (lambda: ROOT.logits[:, -1], "indexed"),
    (lambda: ROOT.samples == 5, r"compared with numbers; write model\.samples\.output"),
    (lambda: ROOT.samples == torch.ones(1), "compared with numbers"),
    (lambda: ROOT.logits > 0, "compared"),
    (lambda: float(ROOT.logits), "made into a number"),
    (lambda: len(ROOT.logits), "len"),
    (lambda: list(ROOT.lm_head), r"gone through; write model\.lm_head\.output"),
    (lambda: ROOT.layers[1].argmax(-1), r"'argmax'; write model\.layers\[1\]\.output\.argmax"),
    (lambda: ROOT.logits.shape, r"write model\.logits\.output\.shape"),
    (lambda: ROOT.logits.save(), r"saved; write model\.logits\.output\.save\(\)"),
    (lambda: ROOT.layers.save(), r"a list of modules .* write model\.layers\[0\]\.output"),
    (lambda: setattr(ROOT, "logits", 1), r"assign its value: model\.logits\.output = …"),
    (lambda: setattr(ROOT, "lm_head", 1), r"model\.lm_head\.output = …"),
    (lambda: setattr(ROOT.lm_head, "weight", 1), r"model\.lm_head\.weight is read-only"),
    (lambda: ROOT.lm_head.wieght, "did you mean weight"),
    (lambda: ROOT.run_with_cache("x"), r"cache = tracer\.cache\(\)"),
    (lambda: ROOT.lm_head.requires_grad_(), "no gradient goes through"),
    (lambda: Tracer().next, r"modules have next\(\)"),
]


@pytest.mark.parametrize(("use", "message"), USES, ids=[message for _, message in USES])
def test_a_name_is_no_value(use: Callable[[], Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        use()


def test_names_are_compared_and_gone_through() -> None:
    first, second = ROOT.layers
    assert (
        first == ROOT.layers[0] != second and second == ROOT.layers[-1] and len(ROOT.layers) == 2 and bool(ROOT.logits)
    )
    assert ROOT.lm_head != "lm_head" and first in ROOT.layers and {first: 1}[ROOT.layers[0]] == 1


def test_names_in_what_is_saved() -> None:
    given = Envoy(TREE, TREE.nodes["lm_head"], given=True)
    refuse_names([{ROOT.lm_head: [1, torch.ones(2)]}, (given, None), {1, 2}])
    for value in (ROOT.logits, given, [[ROOT.lm_head]], {"a": (ROOT.logits,)}):
        with pytest.raises(Refusal, match="cannot be saved; write"):
            refuse_names(value)
    loop: list[Any] = [1]
    loop.append(loop)
    refuse_names(loop)


def failure(error: BaseException) -> pb.Failure:
    return describe(error, {}, "t", 0)


def test_errors_whose_own_words_do_not_help() -> None:
    try:
        hidden
    except NameError as error:
        said = failure(error)
    assert said.message.startswith("NameError: name 'hidden' is not defined. ") and "hidden = ….save()" in said.message
    assert said.exception_message == "name 'hidden' is not defined"
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        torch.ones(2).sum().backward()
    assert "No gradient goes through the served model" in failure(caught.value).message
    assert failure(RuntimeError("another")).message == "RuntimeError: another"
