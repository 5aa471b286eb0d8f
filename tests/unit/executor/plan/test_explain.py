"""An explanation says which tier a loop has, and what to write for a better one."""

from __future__ import annotations

from executor.plan.eligible import regions
from executor.plan.explain import Explanation, explain_region
from tests.unit.executor.plan.bench import Request, context
from tests.unit.executor.plan.test_cases import block, names


def explained(body: str) -> Explanation:
    request = Request(block(body), names(0), 0)
    request.begin()
    [region] = regions(request.unit)
    return explain_region(region, request.names, frozenset(request.writes), 1, context())


def test_a_plan_names_its_locations() -> None:
    found = explained("model.layers[1].mlp.output[:] = 0\nkept.append(model.logits.output.save())")
    assert (found.tier, found.why, found.at) == ("plan", "", 0) and found.plan is not None
    assert found.reads == ("layers.1.mlp.output", "logits.output") and found.writes == ("layers.1.mlp.output",)


def test_a_decision_on_a_value_is_a_plan() -> None:
    found = explained("h = model.layers[1].mlp.output\nif h.sum() > 0:\n    h[:] = 0")
    assert (found.tier, found.why, found.writes) == ("plan", "", ("layers.1.mlp.output",))


def test_a_refusal_names_the_line() -> None:
    found = explained("h = model.layers[1].mlp.output\nx = not h.sum()\nh[:] = 0")
    assert (found.tier, found.line, found.at, found.plan) == ("block", 2, 4, None)
    assert "torch.where" in found.instead
