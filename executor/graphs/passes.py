"""One pass of a program through the model, for all rows of the step's tensors at once.

The program's operations run under `torch.func.vmap` over the rows, padding and rows of other requests included. So no shape
depends on the requests of the batch, and a captured graph holds the operations. What the program changes and carries is written
where the request of the row has the program open in this step; other rows keep their bits.

On a GPU nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from executor.graphs.emitted import elements_of, packed
from executor.graphs.hoist import Hoisted
from executor.graphs.operations import Refused
from executor.graphs.tables import Tables
from executor.model.items import Path
from executor.plan.program import ProgramRun
from executor.plan.run import replaced
from executor.views.view import tensor_at

_TRIED_ROWS = 3
# How far apart the results of operations with sums may be, relative to the largest: it depends on the number of rows.
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


class CannotRun(RuntimeError):
    """The model's value at a location has another form than the program was made for."""


@dataclass(eq=False)
class Program:
    """A program on the device, with what its requests have there.

    Attributes:
        number: its number in the tables; no other program ever has it.
        key: names it, in `executor.graphs.cache.Key.plans`.
        hoisted: the operations.
        shared: the inputs that all requests have in common.
        stacked: the inputs of each request's own, [slots + 1, ...] each.
        states: what each request carries from step to step, by name: [slots + 1, ...] each.
        tenant: whose share of the memory it takes.
        crossing: what its part within the pass leaves for its part after the pass, by the operation: [slots + 1, ...] each.
        at: for each value that it leaves, by an output that has it, the location after which it is known, and where it begins in
            the range of a request in the output and how long it is there, in elements.
    """

    number: int
    key: str
    hoisted: Hoisted
    shared: Mapping[int, torch.Tensor]
    stacked: Mapping[int, torch.Tensor]
    states: Mapping[str, torch.Tensor]
    tenant: str
    crossing: Mapping[fx.Node, torch.Tensor]
    at: Mapping[int, tuple[int, int, int]]

    @property
    def size(self) -> int:
        """The bytes of what it has for each request."""
        return sum(
            one.numel() * one.itemsize
            for one in (*self.stacked.values(), *self.states.values(), *self.crossing.values())
        )


class Pass:
    """A program on its way through one forward pass.

    Args:
        program: the program.
        tables: of the step.
        rows: the rows of the model's tensors, padding included.
        only: int64 [some rows], the rows that it runs for; None: for all rows, as in a graph.
    """

    def __init__(self, program: Program, tables: Tables, rows: int, only: torch.Tensor | None = None) -> None:
        self._program = program
        self._tables = tables
        self._rows = rows
        self._only = only
        self._next = 0
        with torch.inference_mode(False), torch.no_grad():
            self._slots = tables.rows[:rows, 0] if only is None else tables.rows.index_select(0, only)[:, 0]
            opened = tables.open_rows[:rows] if only is None else tables.open_rows.index_select(0, only)
            self._others = opened[:, 1] != program.number
            self._offsets = opened[:, 0].masked_fill(self._others, tables.scratch)
            hoisted = program.hoisted
            self._before = {name: state.index_select(0, self._slots) for name, state in program.states.items()}
            inputs = {index: tensor.index_select(0, self._slots) for index, tensor in program.stacked.items()}
            inputs |= program.shared
            inputs |= {hoisted.states[name]: state for name, state in self._before.items()}
            self._run = ProgramRun(hoisted.parts, inputs, frozenset(program.shared), len(self._slots))

    @property
    def over(self) -> bool:
        """Whether the program has been at all of its locations in the pass."""
        return self._next == self._program.hoisted.inside

    def visit(self, number: int, original: Any, current: Any) -> Any:
        """Run on from a location; return the value that the model goes on with.

        Args:
            number: the location among those of the plan.
            original: the model's value there, each tensor [rows, ...].
            current: what programs before made of it.

        Raises:
            CannotRun: the value has another form than the program was made for.
        """
        hoisted, plan = self._program.hoisted, self._program.hoisted.plan
        read = plan.reads[number]
        if number != self._next:
            raise CannotRun(f"{read.path}.{read.kind} is out of turn")
        self._next += 1
        given = {}
        for (leaf, path), index in zip(read.form.leaves(), hoisted.reads[number], strict=True):
            tensor = checked(tensor_at(original, path), (self._rows, *leaf.shape), leaf.dtype, read.path)
            given[index] = tensor.contiguous() if self._only is None else tensor.index_select(0, self._only)
        with torch.inference_mode(False), torch.no_grad():
            self._run.serve(number, {index: tensor.unsqueeze(1) for index, tensor in given.items()})
            self._emit(number)
        for write in (one for one in plan.writes if one.read == number):
            current = self._written(write.at, write.mutated, self._result(write.output).squeeze(1), original, current)
        if self.over:
            with torch.inference_mode(False), torch.no_grad():
                if self._program.hoisted.outside:
                    self._cross()
                else:
                    self._carry()
        return current

    def _result(self, output: int) -> torch.Tensor:  # [rows, ...]
        return self._run.result(self._program.hoisted.results[output])

    def _written(self, at: Path, mutated: bool, new: torch.Tensor, original: Any, current: Any) -> Any:
        """Write [rows, ...] where the rows are the program's.

        What the block changed in place goes into the model's tensor, and what it assigned into a new one in its place.
        """
        others = self._others.view(-1, *[1] * (new.dim() - 1))
        now = tensor_at(current, at)
        with torch.no_grad():
            if not mutated:
                return replaced(current, at, self._put(now.clone(), others, new))
            targets = {id(tensor): tensor for tensor in (tensor_at(original, at), now)}
            for tensor in targets.values():
                self._put(tensor, others, new)
        return current

    def _put(self, tensor: torch.Tensor, others: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Change a tensor [rows, ...] where the rows are the program's; return it.

        `others` is [rows that it runs for, 1, ...], and `new` is [rows that it runs for, ...].
        """
        if self._only is None:
            torch.where(others, tensor, new, out=tensor)
        else:
            tensor.index_copy_(0, self._only, torch.where(others, tensor.index_select(0, self._only), new))
        return tensor

    def _emit(self, number: int) -> None:
        """Write what the block keeps of the values that are known by now into the output."""
        output = self._tables.output
        for wanted, (segment, begin, width) in self._program.at.items():
            if segment != number or not width:
                continue
            values = packed(self._result(wanted), output.dtype)
            # Each row of this view begins one element after the row before, so that a row's index is its range's beginning.
            ranges = output.as_strided((len(output) - begin - width + 1, width), (1, 1), begin)
            ranges.index_copy_(0, self._offsets, values)

    def _cross(self) -> None:
        """Leave what the program's part after the pass needs, by slots."""
        for node, left in self._program.crossing.items():
            self._keep(left, left.index_select(0, self._slots), self._run.value(node))

    def _carry(self) -> None:
        for one in self._program.hoisted.changed:
            self._keep(self._program.states[one.name], self._before[one.name], self._result(one.output))

    def _keep(self, kept: torch.Tensor, before: torch.Tensor, now: torch.Tensor) -> None:
        """Write [rows, ...] by slots where the rows are the program's; `kept` is [slots + 1, ...]."""
        others = self._others.view(-1, *[1] * (before.dim() - 1))
        # Rows of one slot that are not the program's all write what is there already.
        kept.index_copy_(0, self._slots.long(), torch.where(others, before, now))


def emitted_at(hoisted: Hoisted, dtype: torch.dtype) -> dict[int, tuple[int, int, int]]:
    """Return where a program leaves its outputs, as of `Program.at`.

    Args:
        hoisted: the program.
        dtype: of the output's elements.
    """
    begin = 0
    segments = {node: k for k, nodes in enumerate(hoisted.parts.segments) for node in nodes}
    segments |= {hoisted.parts.inputs[index]: k for k, read in enumerate(hoisted.reads) for index in read}
    found = {}
    for (output, *_), (shape, own) in zip(hoisted.emitted, hoisted.forms, strict=True):
        width = elements_of(shape, own, dtype)
        found[output] = (segments.get(hoisted.parts.results[hoisted.results[output]], 0), begin, width)
        begin += width
    return found


@contextmanager
def hooked(
    programs: Sequence[Program], modules: Mapping[str, nn.Module], tables: Tables, only: torch.Tensor | None = None
) -> Iterator[None]:
    """Return a context in which the model runs some programs between its modules.

    Args:
        programs: the programs.
        modules: the model's modules by path.
        tables: of the step.
        only: int64 [some rows], as of `Pass`.
    """
    passes: dict[int, Pass] = {}
    at: dict[tuple[str, str], list[tuple[Program, int]]] = {}
    for program in programs:
        for number, read in enumerate(program.hoisted.plan.reads[: program.hoisted.inside]):
            at.setdefault((read.path, read.kind), []).append((program, number))

    def visit(here: list[tuple[Program, int]], value: Any) -> Any:
        now = value
        for program, number in here:
            if number == 0:
                passes[program.number] = Pass(program, tables, _rows(program, value), only)
            found = passes.get(program.number)
            if found is None:
                raise CannotRun(f"the program {program.key} has not begun")
            now = found.visit(number, value, now)
            if found.over:
                del passes[program.number]
        return now

    handles = []
    try:
        for (path, kind), here in at.items():
            module, mine = modules[path], partial(visit, here)
            if kind == "input":
                handles.append(module.register_forward_pre_hook(_before(mine), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(_after(mine)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(program: Program, value: Any) -> int:
    """Return the rows of a value at a program's first location, padding included."""
    read = program.hoisted.plan.reads[0]
    for _, path in read.form.leaves():
        tensor = tensor_at(value, path)
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            return int(tensor.shape[0])
    raise CannotRun(f"{read.path}.{read.kind} has no rows")


def _before(visit: Callable[[Any], Any]) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        now = visit((args, kwargs))
        return None if now[0] is args and now[1] is kwargs else now

    return hook


def _after(visit: Callable[[Any], Any]) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        now = visit(output)
        return None if now is output else now

    return hook


def checked(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, path: str) -> torch.Tensor:  # [rows, ...]
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise CannotRun(f"{path} has another form than in the steps before")
    return tensor


def try_out(
    hoisted: Hoisted,
    shared: Mapping[int, torch.Tensor],
    own: Mapping[int, torch.Tensor],
    states: Mapping[int, torch.Tensor],
    device: torch.device,
) -> None:
    """Run a program for several rows at once and for each row alone, on values without meaning.

    Args:
        hoisted: the program.
        shared, own, states: its other inputs than those of locations, in common and of one request, of any shape.
        device: of the model.

    Raises:
        Refused: it cannot run for several rows, or gives something else then.
    """
    made = torch.Generator().manual_seed(0)
    rows: dict[int, list[torch.Tensor]] = {}
    for number, read in enumerate(hoisted.plan.reads):
        for (leaf, _), index in zip(read.form.leaves(), hoisted.reads[number], strict=True):
            rows[index] = [_drawn(leaf.shape, leaf.dtype, made).to(device) for _ in range(_TRIED_ROWS)]
    one_by_one = []
    batch = {index: torch.stack([one] * _TRIED_ROWS) for index, one in (*own.items(), *states.items())}
    with torch.inference_mode(False), torch.no_grad():
        for row in range(_TRIED_ROWS):
            run = ProgramRun(hoisted.parts, {**shared, **own, **states})
            for number, indices in enumerate(hoisted.reads):
                run.serve(number, {index: rows[index][row] for index in indices})
            one_by_one.append([run.result(at) for at in range(len(hoisted.parts.results))])
        several = ProgramRun(hoisted.parts, {**shared, **batch}, frozenset(shared), _TRIED_ROWS)
        slow = torch._C._functorch._is_vmap_fallback_enabled()
        torch._C._functorch._set_vmap_fallback_enabled(False)
        try:
            for number, indices in enumerate(hoisted.reads):
                several.serve(number, {index: torch.stack(rows[index]) for index in indices})
        except Exception as error:
            raise Refused(f"an operation cannot run for several rows at once ({error})") from error
        finally:
            torch._C._functorch._set_vmap_fallback_enabled(slow)
        exact = not hoisted.unstable(frozenset(shared))
        for at in range(len(hoisted.parts.results)):
            _compare(several.result(at), [row[at] for row in one_by_one], exact)


def _drawn(shape: Iterable[int], dtype: torch.dtype, made: torch.Generator) -> torch.Tensor:  # [1, *shape]
    if dtype.is_floating_point:
        return torch.randn((1, *shape), generator=made).to(dtype)
    return torch.zeros((1, *shape), dtype=dtype)


def _compare(several: torch.Tensor, alone: list[torch.Tensor], exact: bool) -> None:  # [rows, ...]
    expected = torch.stack(alone)
    if several.shape != expected.shape or several.dtype != expected.dtype:
        raise Refused("an operation gives another form for several rows at once")
    if exact or not expected.dtype.is_floating_point:
        # Which elements are the largest may depend on the last bit of what they are computed from.
        same = torch.equal(several.nan_to_num(), expected.nan_to_num()) if exact else True
    else:
        far = (several.double() - expected.double()).nan_to_num().norm()
        same = bool(far <= _NEAR[expected.dtype] * expected.double().nan_to_num().norm())
    if not same:
        raise Refused("an operation gives something else for several rows at once")
