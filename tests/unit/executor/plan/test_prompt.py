"""A block of the prompt's step alone is a plan for prompts of one length."""

from __future__ import annotations

import pytest
import torch

from executor.block.fiber import run_as
from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import regions
from executor.plan.run import Member, PlannedStep
from tests.unit.executor.plan.bench import PROMPT, SOURCES, TREE, Forms, Request, Run, equal, hooked, steps_of
from tests.unit.executor.plan.test_cases import names

BLOCKS = [
    "h = model.layers[1].output[0].save()\nmodel.layers[2].mlp.output[-1] = 0\nresult = tracer.result.save()\n",
    "kept = [].save()\nfor i in range(2):\n    kept.append(model.layers[i].resid_post[:, :3] * 2)\n",
    "h = model.layers[0].mlp.output\nnorms = h.norm(dim=-1).save()\nh[:, neurons] = h.mean(-1, keepdim=True)\nlength = len(h)\n",
    "x = torch.relu(model.layers[1].mlp.output)\nx = x.flip(0)\nmodel.layers[1].mlp.output = x\n",
]


@pytest.mark.parametrize("text", BLOCKS)
def test_a_prompt_s_step_as_a_plan(text: str) -> None:
    inputs = steps_of(2, 1)
    plain = Run(text, [names(i) for i in range(2)]).go(inputs)
    context = Context(TREE, Forms(rows=PROMPT), run_as, SOURCES.get)
    requests = [Request(text, names(i), i) for i in range(2)]
    [region] = regions(requests[0].unit)
    assert region.kind == "prompt"
    live = frozenset(requests[0].writes)
    members = [
        Member(survey(region, one.names, SOURCES.get), one.names, one.registry.mark, one.registry.mark_all)
        for one in requests
    ]
    plan = compile_region(region, requests[0].names, live, 0, context)
    assert plan.rows == PROMPT
    step, rows = PlannedStep(plan, members, [0, 0]), torch.arange(2 * PROMPT)

    def visit(path: str, kind: str, value: object) -> object:
        return step.visit(value, rows) if step.wanted == (path, kind) else value

    _, logits = hooked(visit, inputs[0].clone, torch.tensor([PROMPT - 1, 2 * PROMPT - 1]))
    assert step.wanted is None
    step.finish()
    equal(plain.outputs[0], logits)
    for one, member, request in zip(plain.requests, members, requests, strict=True):
        member.deliver()
        expected = {name: value for name, value in one.saved().items() if name != "result"}
        equal(expected, request.saved())
