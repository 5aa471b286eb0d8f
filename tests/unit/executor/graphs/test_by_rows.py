"""A plan for a prompt is taken for the plan for one row only where each row gets what that plan gives it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from executor.block.fiber import run_as
from executor.graphs.by_rows import ByRows, between, by_rows
from executor.graphs.operations import Refused
from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import regions
from executor.plan.functional import interpret
from executor.plan.ir import Plan
from executor.plan.refuse import Refused as Unplanned
from executor.plan.run import Member, inputs_of
from tests.unit.executor.plan.bench import HIDDEN, SOURCES, TREE, Forms, Run

ROWS, FEATURES = 6, 5
X = "model.layers[1].output[0]"
CONSTANTS = {
    "W": torch.randn(HIDDEN, FEATURES),
    "D": torch.randn(FEATURES, HIDDEN),
    "b": torch.randn(FEATURES),
    "v": torch.randn(HIDDEN),
    "some": torch.tensor([3, 0, 7]),
    "each": torch.randn(ROWS, 1),
}

# A loop's body on the rows `h`, and the rows for which the plan for one row runs.
BODIES = {
    "f = torch.relu(h @ W + b)\nh[:] += 0.1 * (f @ D - h)": (0, 6),
    "kept.append(torch.relu(h @ W).topk(2).values.save())": (0, 6),
    "kept.append((h @ W).topk(2).indices[-1])": (5, 6),
    "kept.append((h @ W)[-1].save())": (5, 6),
    "kept.append((h[-1] @ W).softmax(-1))": (5, 6),
    "kept.append((h[-1:] @ W).norm())": (5, 6),
    "kept.append((h[0] @ W).sum())": (0, 1),
    "kept.append((h[:3] @ W).tanh().save())": (0, 3),
    "f = torch.tanh(h @ W)\nkept.append(f[:2])\nkept.append(f[0])": (0, 2),
    "h[-1] += torch.tanh(h[-1] @ W) @ D\nkept.append(h[-1].save())": (5, 6),
    "h[-1:] = h[-1:] * h[-1:].norm()\nkept.append(h[-1:].save())": (5, 6),
    "h[:3] = torch.tanh(h[:3])\nkept.append(h[:3].save())": (0, 3),
    "h[:3] = torch.tanh(h[:3])\nkept.append(h[0].save())": (0, 3),
    "h[-1] = torch.tanh(h[-1])\nh[-1] *= 2": (5, 6),
    "h[:] = torch.where(h.norm(dim=-1, keepdim=True) > 3, h * 0.5, h)": (0, 6),
    "h[:] = torch.nn.functional.layer_norm(h, (19,), v)": (0, 6),
    "h[:, 3:9] = torch.tanh(h[:, 3:9])": (0, 6),
    "h[:, 3] = torch.tanh(h[:, 4])": (0, 6),
    "kept.append(torch.stack([h.tanh(), h.exp()], 1).sum(1))": (0, 6),
    "kept.append(torch.cat([h.tanh(), h], -1)[:, some])": (0, 6),
    "kept.append(torch.nn.functional.linear(h, D).exp().unsqueeze(1).expand(-1, 3, -1).transpose(0, 1))": (0, 6),
    "kept.append((h.unflatten(1, (19, 1)).tanh().flatten(1) @ W).argmax(-1))": (0, 6),
    "kept.append(D[(h @ W).topk(2).indices].sum(1))": (0, 6),
    "f = h @ W\nt = f.topk(2)\nkept.append(torch.zeros_like(f).scatter(1, t.indices, t.values) @ D)": (0, 6),
    "f = h @ W\nkept.append(f.gather(1, f.topk(2).indices))": (0, 6),
    "kept.append(v)\nkept.append(h.tanh().unbind(1)[3])": (0, 6),
    "kept.append((W.mT @ h.mT).mT)": (0, 6),
    # Rows are mixed, or a constant has a row for each.
    "h[:] *= torch.tanh(h.norm())": None,
    "kept.append(h.tanh().mean(0))": None,
    "kept.append(h.tanh().flip(0))": None,
    "kept.append(h.tanh().topk(1, 0).values)": None,
    "kept.append(h.exp() - h.exp()[-1])": None,
    "kept.append(h.exp().cumsum(0))": None,
    "kept.append(h.softmax(0))": None,
    "kept.append(h.T @ h)": None,
    "kept.append(h.exp().reshape(-1))": None,
    "kept.append(h.exp().squeeze())": None,
    "kept.append(h.exp().sum())": None,
    "kept.append(h.exp().argmax())": None,
    "kept.append((h[-1] * h).exp())": None,
    "h[-1] = torch.tanh(h[0])": None,
    "h[0] = torch.tanh(h[-1])": None,
    "f = torch.tanh(h)\nh[-1] = f[-1]\nkept.append(f)": None,  # rows are kept beside those that change
    "h[-1] = torch.tanh(h[-1])\nkept.append(h.save())": None,
    "h[-1] = torch.tanh(h[-1])\nmodel.layers[1].mlp.output = h": None,
    "kept.append(h.exp()[::2])": None,
    "kept.append(h.exp() * each)": None,
    "if h[-1, 3] > 0:\n    h *= 2\nkept.append(h.exp())": None,
}


@dataclass(frozen=True)
class Made:
    """A plan, and its inputs that are no locations."""

    plan: Plan
    constants: dict[int, torch.Tensor]

    def run(self, rows: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for rows of the locations, [rows, hidden] each."""
        given = {**self.constants, **rows}
        return interpret(self.plan.functional.graph, [given[i] for i in range(len(self.plan.inputs))])


def made(body: str, rows: int) -> Made:
    """Return the plan of a loop's body for so many rows."""
    text = f"for step in tracer.iter[:]:\n    h = {X}\n" + "".join(f"    {line}\n" for line in body.splitlines())
    request = Run(text, [{"kept": [], "torch": torch, **CONSTANTS}]).requests[0]
    [region] = regions(request.unit)
    environment = survey(region, request.names, SOURCES.get)
    plan = compile_region(
        region, request.names, frozenset(["kept"]), 0, Context(TREE, Forms(rows=rows), run_as, SOURCES.get)
    )
    return Made(plan, inputs_of(plan, Member(environment, request.names, lambda *_: None, lambda *_: None)))


def check(prompt: Made, one: Made, how: ByRows) -> None:
    """Compare a plan with the plan for one row, run for each row."""
    plan, generator = prompt.plan, torch.Generator().manual_seed(prompt.plan.rows)
    rows = {
        i: torch.randn(plan.rows, HIDDEN, generator=generator)
        for i, name in enumerate(plan.inputs)
        if name.startswith("at")
    }
    expected = prompt.run(rows)
    each = [one.run({i: value[k : k + 1] for i, value in rows.items()}) for k in range(plan.rows)]
    for write in plan.writes:
        mine = rows[plan.reads[write.read].inputs[write.leaf]].clone()
        for k in range(how.first, how.after):
            mine[k] = each[k][write.output][0]
        torch.testing.assert_close(mine, expected[write.output])
    for output, of in how.outputs.items():
        assert how.first <= of.first < of.after <= how.after
        values = [each[k][output] for k in range(of.first, of.after)]
        torch.testing.assert_close(values[0] if of.dim is None else torch.cat(values, of.dim), expected[output])


@pytest.mark.parametrize("body", BODIES)
def test_each_row_gets_what_the_plan_for_one_row_gives(body: str) -> None:
    wanted = BODIES[body]
    try:
        prompt, one = made(body, ROWS), made(body, 1)
        how = by_rows(prompt.plan, one.plan)
    except (Refused, Unplanned):
        assert wanted is None
        return
    assert (how.first, how.after) == wanted
    check(prompt, one, how)


@pytest.mark.parametrize("body", [body for body, rows in BODIES.items() if rows is not None])
def test_lengths_between_two_others(body: str) -> None:
    """What follows for a length from a shorter and a longer prompt is what its own plan says."""
    one, low, mine, high = (made(body, rows) for rows in (1, 4, ROWS, 9))
    ends = [(each.plan, by_rows(each.plan, one.plan)) for each in (low, high)]
    if mine.plan.sized:
        with pytest.raises(Refused, match="by itself"):
            between(ends[0], ends[1], ROWS)
        return
    assert between(ends[0], ends[1], ROWS) == by_rows(mine.plan, one.plan)


def test_lengths_whose_rows_do_not_follow() -> None:
    """For the shortest prompt the slice ends where the prompt does, for the longest where it says."""
    body = "kept.append((h[:5] @ W).tanh())"
    one, low, high = (made(body, rows) for rows in (1, 3, 9))
    with pytest.raises(Refused, match="by itself"):
        between((low.plan, by_rows(low.plan, one.plan)), (high.plan, by_rows(high.plan, one.plan)), ROWS)


def test_plans_of_other_code_are_other_plans() -> None:
    one = made("kept.append((h @ W).tanh())", 1)
    for body in ("kept.append((h @ W).exp())", "kept.append((h @ W).tanh() * 2)", "kept.append((h @ W).tanh()[:, :3])"):
        with pytest.raises(Refused):
            by_rows(made(body, ROWS).plan, one.plan)
