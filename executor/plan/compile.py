"""Makes the plan of a region for one step: its code runs once on tensors without elements."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from executor.model.tree import SAMPLES, ModuleTree
from executor.plan.containers import Written
from executor.plan.decide import Decisions
from executor.plan.eligible import Region
from executor.plan.environment import Environment, SourceOf, Walk, of_every_rank
from executor.plan.functional import first_unstable, functional
from executor.plan.ir import Carried, Constant, Plan
from executor.plan.record import CARRIED, CONSTANT, Recorder, storage_of
from executor.plan.refuse import Refused
from executor.plan.segments import parts_of
from executor.plan.step import Guard, Step
from executor.plan.trace import FormOf, Results, Tracing, explained
from executor.plan.weight import check_weight
from interpose.contract.saving import saving_with

MOST_OPERATIONS = 20_000
_BY_TEXT = frozenset({"locals", "globals", "vars", "dir", "eval", "exec"})  # may read any name

# Runs code as the code of a block: names of modules ask the tracing (`executor.block.interface.Block`).
RunAs = Callable[[Tracing, Callable[[], None]], None]


@dataclass(frozen=True)
class Context:
    """What a compilation needs of the worker.

    Attributes:
        tree: the model's modules.
        form_of: gives the forms of locations.
        run_as: runs code as a block's.
        source_of: gives the source of the user's functions.
        shared: the names that other blocks see.
        last: in the prompt's step, how many of its last rows the code may use; 0: all rows.
    """

    tree: ModuleTree
    form_of: FormOf
    run_as: RunAs
    source_of: SourceOf
    shared: frozenset[str] = frozenset()
    last: int = 0


def survey(region: Region, namespace: Mapping[str, Any], source_of: SourceOf) -> Environment:
    """Return what a region reads of a block's names.

    Raises:
        Refused: it reads what no plan can have.
    """
    return Walk(region, namespace, source_of).environment


def compile_region(
    region: Region, namespace: Mapping[str, Any], live: frozenset[str], step: int, context: Context
) -> Plan:
    """Return the plan of a region for a step.

    Args:
        region: what is to become a plan.
        namespace: the block's names as the step begins.
        live: the names beside `region.after` that the block gives back when it has ended.
        step: the step; the plan's guards say for which others it is.
        context: what it needs of the worker.

    Raises:
        Refused: the region is no plan; with the notebook's line.
    """
    return _Compilation(region, namespace, live, step, context).plan()


class _Compilation:
    def __init__(
        self, region: Region, namespace: Mapping[str, Any], live: frozenset[str], step: int, context: Context
    ) -> None:
        self._region = region
        self._context = context
        self._guards: list[Guard] = []
        self._recorder = Recorder((region.filename,), context.tree.device)
        self._tracing = Tracing(context.tree, self._recorder, context.form_of, step, context.last)
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._walk = Walk(
            region, namespace, context.source_of, self._stand_in, self._recorder.line, self._tracing.added
        )
        self._recorder.add_files(self._walk.filenames)
        self._decisions: Decisions | None = None
        self._step = step
        self._live = live

    def _stand_in(self, at: int | str, tensor: torch.Tensor) -> torch.Tensor:
        carried = isinstance(at, str)
        name = f"carried_{at}" if carried else f"const_{at}"
        made = self._recorder.input(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        self._recorder.own(made, CARRIED if carried else CONSTANT)
        if isinstance(at, str):
            self._stand_ins[at] = made
        return made

    def plan(self) -> Plan:
        region, walk = self._region, self._walk
        names = walk.names
        before = {name: names[name] for name in region.reads if name in region.writes and name in names}
        if region.target:
            names[region.target] = Step(self._step, self._guards)
        self._decisions = decisions = Decisions(self._recorder, self._tracing, names, region.tracers)

        def run() -> None:
            with saving_with(self._tracing.save):
                exec(region.code, names)
            lines = {name: region.reads.get(name, region.line) for name in (*region.writes, region.target) if name}
            lines = {name: line for name, line in lines.items() if name not in self._stand_ins}
            used = {name: line for name, line in lines.items() if name in region.after}
            given = {name: line for name, line in lines.items() if name in self._live}
            if decisions.taken is not None and any(read.path == SAMPLES for read in self._tracing.results.reads):
                raise Refused(decisions.taken, "a number is taken beside the samples", "keep the tensor: x.clone()")
            shared = self._context.shared | region.outside
            self._check_torn(decisions, names, {*before, *used, *(shared & given.keys())})
            self._tracing.close(names, used, given, frozenset(given) if shared & _BY_TEXT else shared)

        self._context.run_as(self._tracing, lambda: self._guarded(lambda: self._recorder.run(run)))
        walk.check_unchanged()
        results = self._tracing.results
        carried = self._carried(names, before, results)
        return self._made(results, carried)

    def _check_torn(self, decisions: Decisions, names: Mapping[str, Any], read: Collection[str]) -> None:
        """Refuse names that a decision left without a value, where other code reads them.

        Args:
            decisions: of the step.
            names: the names that have a value.
            read: the names that the next step or other code may read.
        """
        torn = {name: line for name, line in decisions.torn.items() if name not in names}
        for name, line in torn.items():
            if name in read:
                raise _undecided(name, line)
        self._tracing.results.dropped.extend(torn)

    def _guarded(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            torn = self._decisions.torn if self._decisions is not None else {}
            if isinstance(error, NameError) and error.name in torn:
                raise _undecided(error.name, torn[error.name]) from error
            raise explained(error, self._line_of(error)) from error

    def _line_of(self, error: Exception) -> int:
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._region.filename:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def _carried(self, names: Mapping[str, Any], before: Mapping[str, Any], results: Results) -> list[Carried]:
        found = []
        inputs = [node.name for node in self._recorder.inputs]
        storages = {storage_of(tensor) for _, tensor in self._walk.environment.constants}
        for name, old in before.items():
            line, new = self._region.reads[name], names.get(name)
            if name not in self._stand_ins:
                if not (new is old or isinstance(new, Written)) and not (type(new) is type(old) and new == old):
                    raise Refused(
                        line,
                        f"{name} is a {type(old).__name__} that changes from step to step",
                        "use the loop's number, or a tensor: count = torch.zeros(()) before the loop",
                    )
                continue
            if not isinstance(new, torch.Tensor):
                raise Refused(line, f"{name} is a tensor in one step and none in the next", "keep it a tensor")
            if new.device != old.device:
                raise Refused(
                    line, f"{name} goes to another device", "keep it where it is; the notebook gets it on its CPU"
                )
            alike = (new.shape, new.dtype, new.stride()) == (old.shape, old.dtype, old.stride())
            if not alike:
                raise Refused(
                    line,
                    f"{name} has shape {list(old.shape)} in one step and {list(new.shape)} in the next",
                    "keep its shape, or append to a list and torch.cat it after the loop",
                    later=True,  # a prompt's step may have left more rows
                )
            mutated = storage_of(old) in self._recorder.changed
            real = self._walk.environment.carried[name]
            if mutated:
                others = [one for other, one in self._walk.environment.carried.items() if other != name]
                if new is not old or storage_of(real) in storages | {storage_of(one) for one in others}:
                    raise Refused(
                        line,
                        f"{name} is changed in place and has another name too",
                        f"make a new one: {name} = {name} + x",
                    )
            found.append(Carried(name, inputs.index(f"carried_{name}"), results.output(new), mutated))
        return found

    def _made(self, results: Results, carried: list[Carried]) -> Plan:
        recorder, region, environment = self._recorder, self._region, self._walk.environment
        graph = recorder.graph
        if len(graph.nodes) > MOST_OPERATIONS:
            raise Refused(region.line, f"the step has more than {MOST_OPERATIONS} operations", "use larger tensors")
        graph.output([recorder.node(tensor) for tensor in results.outputs])
        holders = [*recorder.inputs, *(node for node, _ in recorder.literals)]
        for node in reversed(holders):
            next(iter(graph.nodes)).prepend(node)
        rows = {read.form.rows for read in results.reads} or {1}
        if len(rows) != 1:
            raise Refused(region.line, "locations with several numbers of rows", "")
        pure = functional(graph)
        given = zip((node for node in pure.nodes if node.op == "placeholder"), holders, strict=True)
        served = [node for node, holder in given if not holder.name.startswith(("const_", "literal_"))]
        check_weight(pure, served, max(rows), region.line)
        reads = [read.inputs for read in results.reads]
        constants = tuple(Constant(name, tuple(tensor.shape), tensor.dtype) for name, tensor in environment.constants)
        shared = frozenset(node.name for node in holders if node.name.startswith(("const_", "literal_")))
        device = self._context.tree.device
        operations = re.sub(rf"\b{device}\b", of_every_rank(device), str(graph))
        text = repr((environment.fingerprint, results.reads, self._guards, operations))
        return Plan(
            key=hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(),
            environment=environment.fingerprint,
            rows=rows.pop(),
            inputs=tuple(node.name for node in holders),
            program=parts_of(graph, reads, recorded=True),
            functional=parts_of(pure, reads, recorded=False),
            outputs=len(results.outputs),
            reads=tuple(results.reads),
            writes=tuple(results.writes),
            guards=tuple(self._guards),
            constants=constants,
            carried=tuple(carried),
            appends=tuple(results.appends),
            literals=tuple(tensor for _, tensor in recorder.literals),
            results=tuple(results.left),
            dropped=tuple(results.dropped),
            unstable=first_unstable(pure, shared, [node.name for node in holders]),
            sized=recorder.sized,
        )


def _undecided(name: str, line: int) -> Refused:
    return Refused(
        line,
        f"a value decides what {name} is, and not between tensors of one form",
        "give it tensors of one shape and dtype both ways",
    )
