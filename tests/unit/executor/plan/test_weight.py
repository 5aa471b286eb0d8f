"""Programs that take too much memory or time are no plans."""

from __future__ import annotations

import pytest

from executor.block.fiber import run_as
from executor.plan.compile import Context, compile_region
from executor.plan.eligible import regions
from executor.plan.refuse import Refused
from tests.unit.executor.plan.bench import HIDDEN, SOURCES, TREE, Forms, Request

READ = "    h = model.layers[1].mlp.output\n"
HEAVY = {
    f"{READ}    h @ torch.ones({HIDDEN}, 1 << 23)\n    kept.append(h)\n": None,  # nothing needs it
    f"{READ}    kept.append(h[:, :1].expand(-1, 1 << 23) * 2)\n": "large tensors",
    f"{READ}    w = torch.ones(1 << 11, 1 << 11)\n    kept.append(w @ w @ w)\n": "from constants",
    f"{READ}    kept.append(torch.ones(1 << 27))\n": "from constants",
    f"{READ}    for i in range(9):\n        h = h @ torch.ones({HIDDEN}, {HIDDEN})\n    kept.append(h)\n": None,
}


@pytest.mark.parametrize("body", HEAVY)
def test_what_a_plan_may_take(body: str) -> None:
    text = f"kept = []\nfor step in tracer.iter[:]:\n{body}"
    request = Request(text, {"kept": []}, 0)
    [region] = regions(request.unit)

    def make() -> object:
        context = Context(TREE, Forms(), run_as, SOURCES.get)
        return compile_region(region, request.names, frozenset(), 3, context)

    why = HEAVY[body]
    if why is None:
        assert make()
        return
    with pytest.raises(Refused, match=why) as refused:
        make()
    assert refused.value.line == 3 + body.count("\n", 0, body.index("kept"))
