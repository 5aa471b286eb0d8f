"""An explanation says which tier a loop has, and what to write for a better one."""

from __future__ import annotations

from executor.plan.eligible import regions
from executor.plan.explain import Explanation, explain, explain_region
from tests.unit.executor.plan.bench import Request, context, unit
from tests.unit.executor.plan.test_cases import block, names


def explained(body: str) -> Explanation:
    request = Request(block(body), names(0), 0)
    request.begin()
    [region] = regions(request.unit)
    return explain_region(region, request.names, frozenset(request.writes), 1, context)


def test_a_plan_names_its_locations() -> None:
    found = explained("model.layers[1].mlp.output[:] = 0\nkept.append(model.logits.output.save())")
    assert (found.tier, found.batched, found.why) == ("plan", True, "")
    assert found.reads == ("layers.1.mlp.output", "logits.output") and found.writes == ("layers.1.mlp.output",)
    assert str(found) == "line 2: a plan, which runs once for all requests"


def test_a_plan_names_what_keeps_it_from_a_batch() -> None:
    found = explained("kept.append((model.layers[1].mlp.output @ w).save())")
    assert str(found) == "line 2: a plan, which runs for each request, because of mm"


def test_a_refusal_names_the_line() -> None:
    found = explained("h = model.layers[1].mlp.output\nif h.sum() > 0:\n    h[:] = 0")
    assert (found.tier, found.line, found.at) == ("general", 2, 4)
    assert "torch.where" in found.instead and "line 4" in str(found)


def test_a_text_alone_is_explained() -> None:
    assert [one.tier for one in explain(unit("for step in tracer.iter[:]:\n    h = model.logits.output\n"))] == ["plan"]
    [found] = explain(unit("for step in tracer.iter[:]:\n    print(step)\n"))
    assert (found.tier, found.at) == ("general", 2)
