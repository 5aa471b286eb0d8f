"""A tiny model that runs blocks in greenlets, as a worker does, or as plans from their third step on."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, cast

import torch

from executor.block.api import Program
from executor.block.budget import Budget
from executor.block.envoy import Envoy, Tracer
from executor.block.fiber import run_as
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.namespace import new_namespace
from executor.block.state import BlockState, Progress, Record
from executor.core.location import Kind, Location
from executor.core.programs import Unit
from executor.interleave.planned import PlannedRunner, PlannedText
from executor.interleave.plans import Plans
from executor.model.apply import Applier
from executor.model.layouts import WHOLE
from executor.model.rows import Rows
from executor.model.skips import Skips
from executor.model.tree import LOGITS, ModuleTree
from executor.model.values import Served
from executor.plan.cache import PlanCache
from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import Region, regions
from executor.plan.forms import Form
from executor.plan.ir import Plan
from executor.plan.run import Member, PlannedStep
from executor.saves.registry import SaveRegistry
from executor.views.view import Part, Stream
from interpose.capture.analysis import block_reads_writes
from interpose.capture.rewrite import parse_block

HIDDEN, VOCABULARY, LAYERS, PROMPT = 19, 31, 3, 3
FIRST = 2  # the first step of plans: a carried tensor has the rows of a prompt in the step before
FILE = "<cell 1>"


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(torch.tanh(self.qkv(hidden)))
        return made


class Layer(torch.nn.Module):
    """A layer that leaves its last addition to the next layer, as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden if residual is None else residual + hidden
        residual = residual + self.attn(residual)
        return self.mlp(residual), residual


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        assert residual is not None
        made: torch.Tensor = self.norm(hidden + residual)
        return made


def _model() -> tuple[Model, ModuleTree]:
    torch.manual_seed(1)
    model = Model().requires_grad_(False)
    tree = ModuleTree(model, 1)
    tree.record_order(lambda: model(torch.zeros(2, HIDDEN)))
    for i in range(LAYERS):
        path = f"layers.{i}"
        node, attention = tree.nodes[path], tree.nodes[f"{path}.attn.qkv"]
        shape = f"[tokens, {HIDDEN}]"
        node.views["resid_post"] = Stream(f"{path}.resid_post", path, node, "output", shape, at=((0,), (1,)))
        attention.views["q"] = Part(f"{path}.q", f"{path}.attn.qkv", attention, "output", shape, columns=(0, HIDDEN))
    return model, tree


MODEL, TREE = _model()
ENVOY: Any = Envoy(TREE, TREE.root)
BUDGET = Budget(600.0, 1 << 40)
SOURCES: dict[CodeType, str] = {}
LINES: dict[str, dict[int, str]] = {}


def unit(text: str) -> Unit:
    """Return a block's text as it travels; its first line is line 1."""
    return Unit("block", textwrap.dedent(text).strip("\n") + "\n", FILE, 1, 0, tracers=("tracer",))


def functions(text: str, names: dict[str, Any], filename: str = "<cell 0>") -> dict[str, Any]:
    """Return the functions that a cell defines, as a worker rebuilds them; they find `names` and each other."""
    tree = parse_block(textwrap.dedent(text), filename, 1, 0)
    space = {**new_namespace(), **names}
    exec(compile(tree, filename, "exec"), space)
    lines = textwrap.dedent(text).splitlines()
    LINES[filename] = dict(enumerate(lines, 1))
    made = {name: value for name, value in space.items() if isinstance(value, FunctionType) and name not in names}
    made = {name: value for name, value in made.items() if value.__code__.co_filename == filename}
    for value in made.values():
        first = value.__code__.co_firstlineno
        end = next((i for i in range(first, len(lines)) if lines[i][:1].strip()), len(lines))
        SOURCES[value.__code__] = "\n".join(lines[first - 1 : end])
    return made


class Forms:
    """The forms of all locations in a step of one row for each request."""

    def __init__(self, rows: int = 1) -> None:
        self._known: dict[tuple[str, str], Form] = {}
        mine = Rows(0, rows, rows, rows)

        def see(path: str, kind: str, value: Any) -> None:
            self._known[path, kind] = Form.of(value, mine, lambda tensor, _: mine.of(tensor))

        hooked(
            lambda path, kind, value: see(path, kind, value),
            lambda: torch.randn(rows, HIDDEN).to(next(MODEL.parameters())),
        )

    def __call__(self, path: str, kind: str) -> Form | None:
        return self._known.get((path, kind))


def hooked(
    visit: Callable[[str, str, Any], Any], rows: Callable[[], torch.Tensor], last: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step; every location is visited, and what a visit returns takes its place, unless it is None."""
    handles = []
    for module, path in TREE.paths.items():
        if not path:
            continue
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: visit(path, "input", (args, kwargs)), with_kwargs=True
            )
        )
        handles.append(module.register_forward_hook(lambda _, args, out, path=path: visit(path, "output", out)))
    try:
        with torch.inference_mode():
            hidden = MODEL(rows())
            logits = MODEL.lm_head.forward(hidden if last is None else hidden[last])
            changed = visit(LOGITS, "output", logits)
            return hidden, logits if changed is None else changed
    finally:
        for handle in handles:
            handle.remove()


class Request:
    """One request with its block."""

    def __init__(self, text: str, names: dict[str, Any], number: int, plans: Plans | None = None) -> None:
        self.unit = unit(text)
        code = self.unit.compile()
        self.names = {**new_namespace(), "model": ENVOY, "tracer": Tracer(), "torch": torch, **names}
        self.registry = SaveRegistry()
        self.said: list[str] = []
        state = BlockState(
            Identity(str(number), f"trace {number}", 0),
            self.registry,
            emit=lambda said: bool(self.said.append(said)) or True,
            progress=Progress(PROMPT),
            record=Record(Skips(TREE)),
        )
        lines = {FILE: dict(enumerate(self.unit.source.splitlines(), 1))}
        runner = GreenletRunner(state, Program(code, self.names, lines), TREE, cast(Applier, None), Bounds(BUDGET))
        body = parse_block(self.unit.source, FILE, 1, 0).body
        self.writes = block_reads_writes(body)[1]
        self.planned: PlannedRunner | None = None
        if plans is not None:
            source = PlannedText(self.unit, lines | LINES, frozenset(self.writes))
            self.planned = PlannedRunner(state, runner, source, Bounds(BUDGET), plans)
        self.mediator = Mediator(state, self.planned or runner)
        self.region: Region | None = None
        self.member: Member | None = None

    def begin(self) -> None:
        state = self.mediator.state
        self.mediator.begin_step()
        if state.progress.step == 0:
            self.mediator.start()
        elif state.live and state.waits.location == Location("", Kind.STEP, state.progress.step):
            self.mediator.resume(True)

    def visit(self, path: str, kind: str, value: Any, rows: Rows) -> Any:
        mediator, state = self.mediator, self.mediator.state
        location = state.waits.location
        if location is None or (location.path, location.kind, location.step) != (path, kind, state.progress.step):
            return value
        served = Served(str(location), value, rows, lambda _: WHOLE)
        mediator.serve(served, location, TREE.order_of(path, kind))
        with torch.inference_mode():
            made = served.settle(value) if state.ending.failure is None else value
        mediator.left()
        return made

    def finish(self) -> None:
        if self.mediator.state.live:
            self.mediator.finish("result")
        failure = self.mediator.state.ending.failure
        assert failure is None, str(failure)

    def saved(self) -> dict[str, Any]:
        """Return what the block gives back, by its names."""
        names = {name: self.names[name] for name in self.writes if name in self.names}
        return {name: self.plain(value) for name, value in names.items() if self.registry.reaches(value)}

    def plain(self, value: Any) -> Any:
        """Return a value as it is sent."""
        value = self.registry.snapshot(value)
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(self.plain, value)]
        if isinstance(value, dict):
            return {key: self.plain(item) for key, item in value.items()}
        return value


def steps_of(requests: int, steps: int, seed: int = 5) -> list[torch.Tensor]:
    """Return the rows that the model is given in each step: the prompts, then one row for each request."""
    made = torch.Generator().manual_seed(seed)
    rows = [torch.randn(requests * PROMPT, HIDDEN, generator=made)]
    return rows + [torch.randn(requests, HIDDEN, generator=made) for _ in range(steps - 1)]


class Run:
    """The requests of one batch on their way through a generation.

    Attributes:
        outputs: the logits of each step.
        plans: the plans that ran, in their order.
        batched: for each step of a plan, whether its operations ran once for all requests.
    """

    def __init__(
        self, text: str, names: Sequence[dict[str, Any]], planned: bool = False, plans: Plans | None = None
    ) -> None:
        self.requests = [Request(text, mine, i, plans) for i, mine in enumerate(names)]
        self.outputs: list[torch.Tensor] = []
        self.plans: list[Plan] = []
        self.batched: list[bool] = []
        self._planned = planned
        self._cache = PlanCache()

    def go(self, inputs: Sequence[torch.Tensor]) -> Run:
        count = len(self.requests)
        for step, rows in enumerate(inputs):
            each = rows.shape[0] // count
            spans = [Rows(i * each, (i + 1) * each, rows.shape[0], rows.shape[0]) for i in range(count)]
            ends = torch.tensor([span.stop - 1 for span in spans])
            if self._planned and step >= FIRST:
                steps = self._plan(step)
                _, logits = hooked(
                    lambda path, kind, value, s=steps: self._visit(s, path, kind, value), rows.clone, ends
                )
                for one in steps:
                    assert one.wanted is None
                    one.finish()
            else:
                for request in self.requests:
                    request.begin()
                _, logits = hooked(
                    lambda path, kind, value, s=spans: self._serve(s, path, kind, value), rows.clone, ends
                )
                for request in self.requests:
                    request.mediator.pass_step()
            self.outputs.append(logits.clone())
        for request in self.requests:
            if request.member is not None:
                request.member.deliver()
            request.finish()
        return self

    def _serve(self, spans: list[Rows], path: str, kind: str, value: Any) -> Any:
        for i, (request, span) in enumerate(zip(self.requests, spans, strict=True)):
            rows = span if path != LOGITS else Rows(i, i + 1, len(spans), len(spans))
            value = request.visit(path, kind, value, rows)
        return value

    def _plan(self, step: int) -> list[PlannedStep]:
        groups: dict[str, tuple[Plan, list[int]]] = {}
        for i, request in enumerate(self.requests):
            if request.region is None:
                [request.region] = regions(request.unit)
            region, live = request.region, frozenset(request.writes)
            if request.member is None:
                found = survey(region, request.names, SOURCES.get)
                request.member = Member(found, request.names, request.registry.mark, request.registry.mark_all)
            member = request.member
            plan = self._cache.get(
                (member.environment.fingerprint,),
                step,
                lambda names=request.names, r=region, live=live: compile_region(r, names, live, step, context()),
                region.line,
            )
            groups.setdefault(plan.key, (plan, []))[1].append(i)
        made = []
        for plan, indices in groups.values():
            members = [cast(Member, self.requests[i].member) for i in indices]
            one = PlannedStep(plan, members, [step] * len(members))
            self.plans.append(plan)
            self.batched.append(one.batched)
            self._rows = getattr(self, "_rows", {})
            self._rows[id(one)] = torch.tensor(indices)
            made.append(one)
        return made

    def _visit(self, steps: list[PlannedStep], path: str, kind: str, value: Any) -> Any:
        for one in steps:
            if one.wanted == (path, kind):
                value = one.visit(value, self._rows[id(one)])
        return value


FORMS: list[Forms] = []


def context() -> Context:
    """Return what a compilation needs of the tiny model."""
    if not FORMS:
        FORMS.append(Forms())
    return Context(TREE, FORMS[0], run_as, SOURCES.get)


def equal(one: Any, other: Any, where: str = "") -> None:
    """Compare two values, tensors bit for bit."""
    assert type(one) is type(other), (where, one, other)
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype, where
        assert one.stride() == other.stride(), where
        assert one.numpy().tobytes() == other.numpy().tobytes(), (where, one, other)
    elif isinstance(one, list):
        assert len(one) == len(other), (where, one, other)
        for i, pair in enumerate(zip(one, other, strict=True)):
            equal(*pair, f"{where}[{i}]")
    elif isinstance(one, dict):
        assert list(one) == list(other), (where, one, other)
        for key in one:
            equal(one[key], other[key], f"{where}[{key!r}]")
    else:
        assert one == other, (where, one, other)


def both(
    text: str, names: Callable[[int], dict[str, Any]] = lambda i: {}, requests: int = 3, steps: int = 6
) -> tuple[Run, Run]:
    """Run a block in greenlets, as a batch of plans, and as a worker runs it; compare what comes of it.

    Returns:
        The run in greenlets, and the run as a batch of plans.
    """
    inputs = steps_of(requests, steps)
    plans = Plans(TREE)
    plain = Run(text, [names(i) for i in range(requests)]).go(inputs)
    planned = Run(text, [names(i) for i in range(requests)], planned=True).go(inputs)
    as_worker = Run(text, [names(i) for i in range(requests)], plans=plans).go(inputs)
    for other in (planned, as_worker):
        same(plain, other)
    assert planned.plans
    refused = [request.planned.refused for request in as_worker.requests if request.planned is not None]
    assert plans.steps >= requests * (steps - FIRST - 1), refused
    return plain, planned


def same(plain: Run, planned: Run) -> None:
    """Compare two runs of a block: what it saved, what it printed, and what the model computed."""
    for step, (one, other) in enumerate(zip(plain.outputs, planned.outputs, strict=True)):
        equal(one, other, f"logits of step {step}")
    for i, (one, other) in enumerate(zip(plain.requests, planned.requests, strict=True)):
        equal(one.saved(), other.saved(), f"request {i}")
        assert one.said == other.said
