"""Which loops go into the tables: each block's text, and the taps that come of it or the reason why none do.

A block that goes into the tables gives what its greenlet gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from executor.graphs import tail
from executor.graphs.lower import Lowerer
from executor.graphs.operations import Refused
from executor.graphs.tables import LATER, Tables
from executor.graphs.taps import Site, Taps, with_replacing
from executor.graphs.template import Lowered
from executor.model.rows import Rows
from executor.plan.compile import compile_region, survey
from executor.plan.deliver import Delivery
from executor.plan.eligible import regions
from executor.plan.run import Member, inputs_of, leave
from tests.unit.executor.graphs.samples import CPU, LIMITS
from tests.unit.executor.plan.bench import (
    FIRST,
    FORMS,
    HIDDEN,
    SOURCES,
    TREE,
    Run,
    context,
    equal,
    hooked,
    steps_of,
)
from tests.unit.executor.plan.test_cases import block
from tests.unit.executor.plan.test_cases import names as other_names

STEPS = 7


def sites() -> list[Site]:
    """Return the sites of the tiny model, in the order of its forward."""
    context()
    found: list[Site] = []
    for node in TREE.nodes.values():
        for kind in ("input", "output"):
            form = FORMS[0](node.path, kind)
            leaves = [] if form is None else [(leaf, at) for leaf, at in form.leaves() if len(leaf.shape) == 1]
            found += [Site(node.path, kind, (at,), leaf.shape[0]) for leaf, at in leaves]
            if len(leaves) == 2:
                found.append(Site(node.path, kind, tuple(at for _, at in leaves), HIDDEN))
    return with_replacing(found)


SITES = sites()
NUMBERS = {site.key: i for i, site in enumerate(SITES)}


def names(number: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(number)
    return {
        **other_names(number),
        "mean": torch.randn(19, generator=made),
        "patch": torch.randn(1, 19, generator=made),
    }


class InTables(Run):
    """The requests of one batch, whose loops are in the tables from their third step on."""

    def go(self, inputs: Sequence[torch.Tensor]) -> InTables:
        count, lowerer = len(self.requests), Lowerer(NUMBERS)
        tables = Tables([site.width for site in SITES], count, 64, torch.float32, CPU, LIMITS)
        taps = Taps({path: module for module, path in TREE.paths.items()}, SITES, tables)
        self.lowered: list[Lowered] = []
        self.read: list[list[list[torch.Tensor]]] = []
        last = len(inputs)
        self._begin(inputs[:FIRST])
        for i, request in enumerate(self.requests):
            [region] = regions(request.unit)
            request.member = Member(
                survey(region, request.names, SOURCES.get),
                request.names,
                request.registry.mark,
                request.registry.mark_all,
            )
            plan = compile_region(region, request.names, frozenset(request.writes), FIRST, context())
            constants = inputs_of(plan, request.member)
            lowered = lowerer.lower(plan, constants, (FIRST, last))
            tables.join(i, str(i), lowered.taps, 1)
            self.plans.append(plan)
            self.lowered.append(lowered)
            self.read.append([])
        for step in range(FIRST, last):
            outgoing = tables.begin_step([(i, 1) for i in range(count)], dict.fromkeys(range(count), step), count)
            with taps.hooked(tables.sites):
                _, logits = hooked(lambda path, kind, value: None, inputs[step].clone)
            self.outputs.append(logits.clone())
            for i, lowered in enumerate(self.lowered):
                share = outgoing[LATER].shares.get(i)
                found: dict[int, torch.Tensor] = {}
                for part in share.parts if share is not None else ():
                    start = share.start + part.at
                    found[part.tap] = tables.output[start : start + part.width].view(1, -1).clone()
                self.read[i].append([found.get(k, torch.empty(0)) for k in range(len(lowered.taps))])
        for i, request in enumerate(self.requests):
            self._land(i, last - FIRST)
            request.finish()
        return self

    def _begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Run the first steps in greenlets."""
        count = len(self.requests)
        for rows in inputs:
            each = rows.shape[0] // count
            spans = [Rows(i * each, (i + 1) * each, rows.shape[0], rows.shape[0]) for i in range(count)]
            ends = torch.tensor([span.stop - 1 for span in spans])
            for request in self.requests:
                request.begin()
            _, logits = hooked(lambda path, kind, value, s=spans: self._serve(s, path, kind, value), rows.clone, ends)
            for request in self.requests:
                request.mediator.pass_step()
            self.outputs.append(logits.clone())

    def _land(self, i: int, steps: int) -> None:
        member = self.requests[i].member
        assert member is not None
        plan, read = self.plans[i], self.read[i]
        values = self.lowered[i].values(lambda tap: torch.stack([one[tap] for one in read]), steps)
        for step in range(steps):
            give = Delivery(lambda output, k=step: values[output][k].contiguous(), FIRST + step, member.mark)
            for append in plan.appends:
                give.add(append, member.environment)
            leave(plan, member, give)
        member.deliver()


def plain(value: Any) -> Any:
    """Return a value with its tensors in one layout, narrow floats as their bits."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().view(torch.int16) if value.dtype == torch.bfloat16 else value
        return torch.empty(bits.shape, dtype=bits.dtype).copy_(bits)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return list(map(plain, value)) if isinstance(value, list) else value


def same(one: Run, other: Run) -> None:
    """Compare what two runs of a block saved, and what the model computed."""
    for step, (mine, theirs) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        equal(mine, theirs, f"logits of step {step}")
    for i, (mine, theirs) in enumerate(zip(one.requests, other.requests, strict=True)):
        equal(plain(mine.saved()), plain(theirs.saved()), f"request {i}")


# A name; the loop's body, what stands before it and after it; the taps, and how many operations the tail has. A star is a tap
# at a site whose tensor is replaced.
X, Y, S = "model.layers[1].output[0]", "model.layers[1].mlp.output", "model.layers[1].resid_post"
Y_2 = "model.layers[2].mlp.output"
Q = "model.layers[1].attn.qkv.q"
LOWERED: dict[str, tuple[str, str, str, str, int]] = {
    "a layer": (f"kept.append({X}.save())", "", "", "READ", 0),
    "all layers": ("for i in range(3):\n    kept.append(model.layers[i].output[0].save())", "", "", "READ READ READ", 0),
    "steering in place": (f"{X}[:] += v", "", "", "ADD", 0),
    "steering, scaled": (f"{X}[:] += alpha * v / v.norm()", "", "", "ADD", 0),
    "steering by +=": (f"{X} += v", "", "", "ADD", 0),
    "steering by an assignment": (f"x = {X}.clone()\n{X} = x + v", "", "", "ADD*", 0),
    "an assigned tuple": ("a, b = model.layers[1].output\nmodel.layers[1].output = (a * 2, b)", "", "",
                          "MULTIPLY*", 0),
    "an assigned output": (f"{Y} = {Y} * 0.5", "", "", "MULTIPLY*", 0),
    "an assigned input": ("model.layers[1].mlp.input = model.layers[1].mlp.input + v", "", "", "ADD*", 0),
    "assigned zeros": (f"{Y} = torch.zeros_like({Y})", "", "", "SET*", 0),
    "assigned, and kept before and after": (
        f"x = {Y}\nkept.append(x.clone())\n{Y} = x * 2\nkept.append({Y}.save())\nkept.append(x)", "", "",
        "READ* MULTIPLY* READ*", 0),
    "an assignment and a change in place": (
        f"model.layers[0].output[0][:] += v\n{X} = {X} * 0.5\nkept.append(model.layers[2].resid_post.save())", "", "",
        "ADD MULTIPLY* READ", 0),
    "columns of the stream": (f"{S}[:, 5:9] = 0", "", "", "SET", 0),
    "the stream, scaled": (f"{S} *= 0.5", "", "", "MULTIPLY", 0),
    "the stream, assigned": (f"{S} = {S} + v", "", "", "ADD", 0),
    "the stream, set": (f"{S}[:] = patch", "", "", "SET", 0),
    "the queries": (f"kept.append({Q}.save())\n{Q}[:] *= 2\nkept.append({Q}[:, 3:5].clone())", "", "",
                    "READ MULTIPLY READ READ", 0),
    "one column": (f"{Y}[:, 3] = 2.5\n{Y}[-1, 4] = 0", "", "", "SET SET", 0),
    "some neurons, set": (f"{Y}[:, [2, 3, 4, 9]] = 0\n{Y}[:, [15, -2]] = v[:2]", "", "", "SET SET SET SET", 0),
    "some neurons, set to a vector": (f"{S}[:, [3, 4, 11]] = mean[:3]\n{Y_2}[:, [6, 5]] = mean[3:5]", "", "",
                                      "SET SET SET SET", 0),
    "some neurons, scaled": (f"{Y}[:, neurons] *= 0.5\n{Y}[:, [1, 7]] *= v[:2]\nkept.append({Y}.save())", "", "",
                             "MULTIPLY MULTIPLY READ", 0),
    "some neurons, steered": (f"{S}[..., neurons] += v[:2]\n{Y_2}[-1, [0, 3]] -= 2", "", "", "ADD ADD", 0),
    "every fourth column": (f"{Y}[:, ::4] *= -1\n{Y}[:, 1::9] = 0\nkept.append({Y}[:, ::2].save())", "", "",
                            "MULTIPLY SET SET READ", 5),
    "with the step": (f"kept.append((step, {X}.save()))", "", "", "READ", 0),
    "a dict": ("for i in range(2):\n    table[i, step] = model.layers[i].output[0].save()", "", "", "READ READ", 0),
    "the last row": (f"kept.append({X}[-1].save())\nkept.append({X}[-1].clone())", "", "", "READ", 0),
    "a wider dtype": (f"kept.append({X}.double().save())", "", "", "READ", 1),
    "a narrower dtype": (f"kept.append({X}.to(torch.bfloat16).cpu().save())", "", "", "READ", 1),
    "columns of some neurons": (f"kept.append({X}[:, neurons].save())", "", "", "READ", 1),
    "a difference": (f"kept.append({X} - mean)", "", "", "READ", 1),
    "the difference of two layers": (
        "a = model.layers[1].mlp.output.clone()\nkept.append(model.layers[2].mlp.output - a)", "", "", "READ READ", 1),
    "a stack": ("kept.append(torch.stack([model.layers[i].output[0] for i in range(2)]).save())", "", "", "READ READ", 1),
    "a mask": (f"kept.append(({X} > 0).save())", "", "", "READ", 1),
    "both halves and their sum": (
        "a, b = model.layers[1].output\nkept.extend([a.clone(), b.clone(), a + b])", "", "", "READ READ READ", 0),
    "a half that changes, and the sum": (
        f"{X}[:] *= 2\nkept.append({X} + model.layers[1].output[1])", "", "", "MULTIPLY READ READ", 1),
    "a sum so far": (f"total = total + {Y}", "total = torch.zeros(1, 19)", "total.save()", "READ", 1),
    "a sum so far in place": (f"total += {Y}[0]", "total = torch.zeros(19).save()", "", "READ", 1),
    "the step before": (f"h = {Y}\nkept.append((h - previous).save())\nprevious = h.clone()",
                        "previous = torch.zeros(1, 19)", "", "READ", 1),
    "what it kept, after the loop": (f"kept.append({Y}[0] * 2)", "", "total = torch.stack(kept).sum(0).save()", "READ", 1),
}  # fmt: skip


def found(lowered: Lowered) -> tuple[str, int]:
    taps = " ".join(tap.code.name + ("*" if SITES[tap.site].replaces else "") for tap in lowered.taps)
    return taps, len(lowered.tail.nodes) if lowered.tail is not None else 0


@pytest.mark.parametrize("name", LOWERED)
def test_a_loop_in_the_tables_gives_what_its_greenlet_gives(name: str) -> None:
    body, before, after, taps, operations = LOWERED[name]
    text = block(body, before, after)
    inputs = steps_of(2, STEPS)
    run = Run(text, [names(i) for i in range(2)]).go(inputs)
    made = InTables(text, [names(i) for i in range(2)]).go(inputs)
    assert found(made.lowered[0]) == (taps, operations)
    same(run, made)


REFUSED: dict[str, tuple[str, str]] = {
    "a norm": (f"kept.append({X}.norm())", "the tables and the host have no aten.linalg_vector_norm"),
    "a probe": (f"kept.append({X} @ w)", "the tables and the host have no aten.mm"),
    "a division": (f"{X}[:] /= 3", "the tables have no aten.div.Tensor"),
    "a projection": (f"h = {S}\nh -= (h @ v)[:, None] * v", "the tables have no aten.mv"),
    "a mask of the model's own": (f"h = {Y}\nh[:] = torch.where(h > 0, h, 0)", "the tables have no aten.gt"),
    "a value of another location": (
        f"x = model.layers[0].mlp.output.clone()\n{Y}[:] = x",
        "not made of the location's own",
    ),
    "a sum so far that steers": (f"total = total + {Y}[-1]\n{X}[:] += total", "total is carried from step to step"),
    "a list that the block computes": (f"{Y}[:, index] = 0", "aten.index_put"),
    "one column twice": (f"{Y}[:, [1, 1]] *= 2", "aten.index"),
    "more than the host is to compute": (f"kept.append({X}.repeat(1, 200000)[:, :3])", "the host would compute 38"),
    "every second step": (f"if step % 2:\n    {X}[:] += v", "something else in some of the steps"),
    "the logits": ("kept.append(model.logits.output.save())", "is no site"),
}


def test_a_tail_runs_some_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_AT_ONCE", 50)  # two steps of this tail
    test_a_loop_in_the_tables_gives_what_its_greenlet_gives("a wider dtype")


@pytest.mark.parametrize("name", REFUSED)
def test_other_loops_stay_plans(name: str) -> None:
    body, why = REFUSED[name]
    text = block(body, "total = torch.zeros(19)")
    with pytest.raises(Refused, match=why):
        InTables(text, [names(0)]).go(steps_of(1, STEPS))
