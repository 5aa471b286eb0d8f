"""A tiny model whose blocks' loops run as programs in padded batches, beside the same blocks in greenlets on the same rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.core.location import Kind
from executor.graphs.buffers import Outputs
from executor.graphs.limits import GraphLimits
from executor.graphs.operations import ALL
from executor.graphs.outside import Outside
from executor.graphs.programs import InProgram, Programs
from executor.graphs.tables import Tables
from executor.graphs.tickets import PlainCopier
from executor.model.rows import Rows
from executor.plan.compile import compile_region, survey
from executor.plan.deliver import Delivery
from executor.plan.eligible import regions
from executor.plan.ir import Plan
from executor.plan.run import Member, leave
from tests.unit.executor.plan import bench
from tests.unit.executor.plan.test_cases import names

LIMITS = GraphLimits(
    bank_bytes=1 << 12, step_bytes=1 << 16, prompt_bytes=1 << 12, host_bytes=1 << 20, emitted_bytes=1 << 14
)
SLOTS, ROWS = 8, 12


def device() -> torch.device:
    """Return where the model is now."""
    return next(bench.MODEL.parameters()).device


@contextmanager
def moved(to: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which the model is on another device and in another dtype."""
    tree: Any = bench.TREE
    bench.MODEL.to(to, dtype)
    tree.device = to
    bench.FORMS.clear()
    try:
        yield
    finally:
        bench.MODEL.to("cpu", torch.float32)
        tree.device = torch.device("cpu")
        bench.FORMS.clear()


def machine(limits: GraphLimits = LIMITS, **rest: Any) -> Programs:
    """Return programs of the tiny model in tables of their own."""
    dtype = next(bench.MODEL.parameters()).dtype
    tables = Tables((), SLOTS, ROWS, dtype, device(), limits)
    modules = {path: module for module, path in bench.TREE.paths.items() if path}
    return Programs(modules, tables, limits, **rest)


@dataclass
class Ride:
    """A request whose loop runs as programs.

    Attributes:
        twin: the same request in a greenlet.
        mine: the request.
        slot: where it is in the tables.
        plan, program: what runs now.
        first: the first step of it.
    """

    twin: bench.Request
    mine: bench.Request
    slot: int
    member: Member | None = None
    plan: Plan | None = None
    program: InProgram | None = None
    first: int = 0


@dataclass
class Rides:
    """Some requests in one engine, and what became of them.

    Args:
        texts: the block of each request.
        names: what the notebook of each has.
        programs: runs them.
        ahead: how many steps run after the last of each request, as an engine runs steps ahead.

    Attributes:
        unstable: the operations that may be off in their last bits.
        keys: the programs that ran.
        hidden: of each step what the model computed, with the greenlets and with the programs: hidden states and logits.
    """

    texts: Sequence[str]
    names: Callable[[int], dict[str, Any]]
    programs: Programs
    ahead: int = 0
    unstable: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    hidden: list[tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=list
    )
    run: Callable[[Programs, Sequence[str], torch.Tensor], torch.Tensor] | None = None

    def go(self, steps: int, seed: int = 0) -> Rides:
        rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
        slots = rng.sample(range(SLOTS), len(self.texts))
        self.rides = [
            Ride(bench.Request(text, self.names(i), i), bench.Request(text, self.names(i), i), slots[i])
            for i, text in enumerate(self.texts)
        ]
        self.tables = self.programs._tables
        ring = 4 * self.tables.split * self.tables.output.itemsize
        self.outputs = Outputs(self.tables, PlainCopier(), ring, LIMITS.host_bytes)
        kind = {"dtype": next(bench.MODEL.parameters()).dtype, "device": device()}
        for step in range(bench.FIRST):
            rows = bench.PROMPT if step == 0 else 1
            x = torch.randn(len(self.rides) * rows, bench.HIDDEN, generator=made).to(**kind)
            for which in ("twin", "mine"):
                self._greenlets(which, x, [(ride, i * rows, (i + 1) * rows) for i, ride in enumerate(self.rides)])
        for step in range(bench.FIRST, steps):
            padded = rng.randint(len(self.rides), ROWS)
            at = rng.sample(range(padded), len(self.rides))
            x = torch.randn(padded, bench.HIDDEN, generator=made).to(**kind)
            twins = self._greenlets("twin", x, [(ride, i, i + 1) for ride, i in zip(self.rides, at, strict=True)])
            mine = self._step(step, x, at)
            self.hidden.append((twins, mine))
            plain = torch.tensor([i not in at for i in range(padded)])
            for one, other in zip(mine, twins, strict=True):
                assert torch.equal(one[plain], other[plain]), "rows of other requests"
        for step in range(steps, steps + self.ahead):
            x = torch.randn(ROWS, bench.HIDDEN, generator=made).to(**kind)
            self._pass(x, list(range(len(self.rides))), step)
        for ride in self.rides:
            self._land(ride, steps)
            assert ride.member is not None
            ride.member.deliver()
            ride.mine.mediator.state.progress.step = ride.twin.mediator.state.progress.step
            ride.mine.finish()
            ride.twin.finish()
        assert self.outputs.idle
        return self

    def _greenlets(
        self, which: str, x: torch.Tensor, at: Sequence[tuple[Ride, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step in greenlets; `at` is where the rows of each request are.

        Returns:
            [rows, hidden], and [requests, vocabulary]; each row is a request's, but in a step with prompts alone.
        """
        prompts = any(stop - start > 1 for _, start, stop in at)
        last = torch.tensor([stop - 1 for _, _, stop in at], device=x.device) if prompts else None
        count = len(at) if prompts else len(x)
        requests = [(getattr(ride, which), Rows(start, stop, len(x), len(x))) for ride, start, stop in at]
        for request, _ in requests:
            request.begin()

        def visit(path: str, kind: str, value: Any) -> Any:
            for i, (request, rows) in enumerate(requests):
                row = i if prompts else rows.start
                here = Rows(row, row + 1, count, count) if path == bench.LOGITS else rows
                value = request.visit(path, kind, value, here)
            return value

        found = bench.hooked(visit, x.clone, last)
        for request, _ in requests:
            request.mediator.pass_step()
        return found

    def _step(self, step: int, x: torch.Tensor, at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step in programs; [rows, hidden] and [rows, vocabulary]."""
        for ride in self.rides:
            request = ride.mine
            if ride.plan is not None and ride.plan.holds(max(step, ride.first)):
                continue
            [region] = regions(request.unit)
            if ride.member is None:
                waits = request.mediator.state.waits.location
                assert waits is not None and waits.kind == Kind.STEP
                found = survey(region, request.names, bench.SOURCES.get)
                ride.member = Member(found, request.names, request.registry.mark, request.registry.mark_all)
                ride.first = waits.step
            else:
                self._land(ride, step)
                ride.first = step
            first, live = ride.first, frozenset(request.writes)
            ride.plan = compile_region(region, request.names, live, first, bench.context())
            ride.program = self.programs.join(ride.slot, "a", ride.plan, ride.member.environment, (first, ALL))
            self.tables.join(ride.slot, "a", (), 1, ride.program.emitted)
            self.unstable |= {ride.program.unstable} - {""}
        return self._pass(x, at, step)

    def _pass(self, x: torch.Tensor, at: list[int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass with `x`, [rows, hidden]; return what it gives, and the logits, [rows, vocabulary]."""
        batch = [(self.tables.slots, 1)] * len(x)
        for ride, i in zip(self.rides, at, strict=True):
            batch[i] = (ride.slot, 1)
        outgoing = self.tables.begin_step(batch, dict.fromkeys([ride.slot for ride in self.rides], step), len(x))
        keys = sorted({ride.program.key for ride in self.rides if ride.program is not None})
        self.keys |= set(keys)
        self.outputs.before(outgoing)
        hidden = (self.run or in_hooks)(self.programs, keys, x)
        self.outputs.ring.append()
        self.outputs.after(outgoing, {ride.slot: str(ride.slot) for ride in self.rides})
        with torch.inference_mode():
            logits = bench.MODEL.lm_head.forward(hidden)
            for key in keys:
                mine = [
                    (i, ride.slot)
                    for ride, i in zip(self.rides, at, strict=True)
                    if ride.program is not None and ride.program.key == key and step >= ride.first
                ]
                if mine and self.programs.program_of(key).hoisted.outside:
                    rows, slots = zip(*mine, strict=True)
                    here = Outside(self.programs.program_of(key), self.tables, self.outputs.ring, rows, slots)
                    logits = here.visit(bench.LOGITS, logits)
        return hidden, logits

    def _land(self, ride: Ride, until: int) -> None:
        """Give a block what its steps so far left."""
        if ride.program is None or ride.plan is None or ride.member is None:
            return
        self.tables.leave(ride.slot)
        self.programs.leave(ride.slot)
        read, ran = self.outputs.collect(str(ride.slot)), until - ride.first

        def stacked(number: int) -> torch.Tensor:  # [steps, ...]
            found = read.stacked(number, ran)
            assert found is not None and len(found) == ran
            return found

        values = ride.program.lowered.values(stacked, ran)
        for i in range(until - ride.first):
            give = Delivery(
                lambda output, i=i: values[output][i].to(device()).clone(), ride.first + i, ride.member.mark
            )
            for append in ride.plan.appends:
                give.add(append, ride.member.environment)
        leave(ride.plan, ride.member, give)
        ride.member.deliver()


def in_hooks(programs: Programs, keys: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """Run the model with programs at hooks: [rows, hidden]."""
    with torch.inference_mode(), programs.hooked(keys):
        return bench.MODEL(x.clone())


def in_own_rows(programs: Programs, keys: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """Run the model with programs at hooks, for the rows alone that have one: [rows, hidden]."""
    tables = programs._tables
    opened = tables.open_rows[: len(x), 1]
    with torch.inference_mode(), programs.hooked(keys, opened.nonzero()[:, 0]):
        return bench.MODEL(x.clone())


def compare(rides: Rides) -> None:
    """Compare programs with greenlets: to the bit, or within rounding where an operation is not stable."""
    exact = not rides.unstable
    for twins, mine in rides.hidden:
        for one, other, where in zip(mine, twins, ("hidden", "logits"), strict=True):
            near(one, other, exact, where)
    for i, ride in enumerate(rides.rides):
        near(ride.mine.saved(), ride.twin.saved(), exact, f"request {i}")


def near(one: Any, other: Any, exact: bool, where: str) -> None:
    """Compare two values; `exact` is to the bit."""
    assert type(one) is type(other), (where, one, other)
    if isinstance(one, torch.Tensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), where
        one, other = one.cpu(), other.cpu()
        if exact:
            bits = [
                value.reshape(-1).contiguous().clone(memory_format=torch.contiguous_format).view(torch.uint8)
                for value in (one, other)
            ]
            assert torch.equal(*bits), (where, one, other)
        else:
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text: f"{where}: {text}"
            )
    elif isinstance(one, list):
        assert len(one) == len(other), (where, one, other)
        for i, pair in enumerate(zip(one, other, strict=True)):
            near(*pair, exact, f"{where}[{i}]")
    elif isinstance(one, dict):
        assert list(one) == list(other), (where, one, other)
        for key in one:
            near(one[key], other[key], exact, f"{where}[{key!r}]")
    else:
        assert one == other, (where, one, other)


# Bodies of loops for a model on any device; `zero` is a number in the model's dtype, and `none` a row of zeros.
ELEMENTWISE = {
    "a capture": ("kept.append(model.layers[1].output[0].save())", "", ""),
    "steering": ("model.layers[1].output[0][:] += alpha * v", "", ""),
    "steering of the stream": ("model.layers[1].resid_post += scale * v", "", ""),
    "an assignment": ("model.layers[1].mlp.output = model.layers[1].mlp.output.relu()", "", ""),
    "an input is assigned": ("model.layers[1].mlp.input = model.layers[1].mlp.input * 0.5", "", ""),
    "columns": ("h = model.layers[1].attn.qkv.q\nh[:, neurons] = 0\nh[:, ::2] *= fine", "", ""),
    "a carried sum": ("total = total + model.layers[1].mlp.output", "total = none * 1", "total.save()"),
    "a carried sum in place": ("total += model.layers[1].mlp.output[0]", "total = (none[0] * 1).save()", ""),
    "the step before": (
        "h = model.layers[1].mlp.output\nkept.append((h - previous).save())\nprevious = h.clone()",
        "previous = none * 1",
        "",
    ),
    "several locations": (
        "a = model.layers[0].mlp.output.clone()\nb = model.layers[2].output[0]\nb[:] = torch.where(b > 0, a, b)\n"
        "table[step] = [a.save(), (b > a).save(), (a * 2).to(torch.float64)]",
        "",
        "",
    ),
    "the logits": ("x = model.logits.output\nkept.append(x.save())\nx[:, 3] = -100", "", ""),
    "a layer and the logits": (
        "h = model.layers[1].mlp.output[-1:] * 2\nseen = seen + h\nx = model.logits.output\n"
        "x += seen[:, :1]\nkept.append((x * h[:, 1:2]).save())",
        "seen = none * 1",
        "seen.save()",
    ),
    "the step as a number": ("model.layers[1].mlp.output[:] *= 0.25\nkept.append((step, fine * 2))", "", ""),
}
WITH_SUMS = {
    "a probe": ("kept.append(torch.sigmoid(model.layers[2].output[1] @ w).save())", "", ""),
    "a gate": (
        "h = model.layers[1].mlp.output\nh[:] = torch.where((h @ w).amax(-1, keepdim=True) > 0.1, h + v, h)",
        "",
        "",
    ),
    "an autoencoder": (
        "h = model.layers[1].resid_post\na = torch.relu(h @ sae['enc'])\nkept.append(a.topk(3).values.save())\n"
        "h[:] = a @ sae['dec'][0]",
        "",
        "",
    ),
    "norms": (
        "h = model.layers[0].resid_post\nkept.append(h.norm())\npeak = torch.maximum(peak, h.norm())\nh /= h.norm()",
        "peak = zero * 1",
        "peak.save()",
    ),
    "a normalisation": ("kept.append(F.layer_norm(model.layers[2].resid_post, (19,)).save())", "", ""),
    "a shared matrix": ("kept.append((model.layers[1].mlp.output @ shared).save())", "", ""),
}


def names_here(number: int) -> dict[str, Any]:
    """Return what a request's notebook has, on the model's device and in its dtype."""
    like = next(bench.MODEL.parameters())

    def here(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(like if value.is_floating_point() else like.device)
        if type(value) is dict:
            return {key: here(one) for key, one in value.items()}
        return [here(one) for one in value] if type(value) is list else value

    zeros = {"zero": torch.zeros(()), "none": torch.zeros(1, bench.HIDDEN)}
    made = here({**names(number), **zeros})
    return {**made, "fine": (made["scale"] * 3).float()}
