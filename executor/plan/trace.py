"""One step of a block on tensors without elements: what it reads, changes, adds and leaves.

`Tracing` answers what the names in a block ask for (`executor.block.interface.Block`), without waiting for any model. A name
that it cannot answer is refused, with what to write instead.

Size: a method for each thing that a block can ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from executor.core.errors import Refusal
from executor.core.location import COMPUTED, Kind, Location
from executor.model.items import ListOutputs, Outputs, check
from executor.model.last_rows import last_of, refused
from executor.model.module_name import ModuleName
from executor.model.node import Node, Unreachable, View
from executor.model.tree import PSEUDO, SAMPLES, ModuleTree
from executor.plan.containers import Written
from executor.plan.forms import Form
from executor.plan.ir import Append, Item, Read, Write
from executor.plan.record import CARRIED, CONSTANT, DECIDE, Recorder, storage_of
from executor.plan.refuse import Refused
from executor.plan.served import Traced
from executor.plan.step import Step
from executor.plan.symbols import Symbol
from executor.saves.registry import refuse_names

_DEEPEST = 30

# Returns the form of a raw location's value for a request, or None if it is not known.
FormOf = Callable[[str, str], Form | None]


@dataclass
class Results:
    """What the trace of one step found.

    Attributes:
        reads, writes, appends: as of `Plan`.
        outputs: the tensors that the program gives, by their numbers.
        carried: by name, the tensor that the step leaves.
        left: the names that the step leaves, with their values.
        dropped: the names whose values cannot be kept.
    """

    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    left: list[tuple[str, Item]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def output(self, tensor: torch.Tensor) -> int:
        """Return the number of the output that gives a tensor."""
        number = next((i for i, one in enumerate(self.outputs) if one is tensor), None)
        if number is None:
            number = len(self.outputs)
            self.outputs.append(tensor)
        return number


class Tracing:
    """A block that is traced in one step.

    Args:
        tree: the model's modules.
        recorder: records the operations.
        form_of: gives the forms of locations.
        step: the step.
        last: as of `Context`.

    Attributes:
        pointer, missed: as of `executor.block.interface.Block`.
        results: what was found so far.
    """

    def __init__(self, tree: ModuleTree, recorder: Recorder, form_of: FormOf, step: int, last: int = 0) -> None:
        self.pointer = step
        self.missed = 0
        self.results = Results()
        self._tree = tree
        self._recorder = recorder
        self._form_of = form_of
        self._at_now: tuple[str, str] | None = None
        self._served: Traced | None = None
        self._position = -1
        self._last = last
        self._saved: dict[int, tuple[Any, torch.Tensor | None]] = {}
        self._added: list[tuple[int, Any, Any, int, int, torch.Tensor | None]] = []
        self._items: list[Any] = []  # of the served value, when the block was last outside of a decision

    # Values of the model.

    def read(self, node: Node, kind: str) -> Any:
        """Return the value at a module's input or output."""
        served = self._at(node, kind)
        return self._last_of(served.value, served, node.path, f"{node.path}.{kind}")

    def read_view(self, view: View) -> Any:
        """Return a canonical value."""
        served = self._at_view(view)
        if not view.counts_tokens:
            self._check_complete(view.node.path, view.name)
        return self._last_of(view.read(served), served, view.node.path, view.name)

    def write_view(self, view: View, value: Any) -> None:
        """Replace a canonical value."""
        self._check_complete(view.node.path, view.name)
        view.write(self._at_view(view), value)

    def _at_view(self, view: View) -> Traced:
        if isinstance(view, Unreachable):
            raise view.refusal()
        return self._at(view.node, view.kind, view.name)

    def read_input(self, node: Node) -> Any:
        """Return a module's first argument."""
        served = self._at(node, Kind.INPUT)
        args, kwargs = served.value
        first = args[0] if args else next(iter(kwargs.values()))
        return self._last_of(first, served, node.path, f"{node.path}.input")

    def write(self, node: Node, kind: str, value: Any) -> None:
        """Replace the value at a module's input or output."""
        self._complete(node, kind).assign(value)

    def write_input(self, node: Node, value: Any) -> None:
        """Replace a module's first argument."""
        args, kwargs = self._complete(node, Kind.INPUT).value
        if args:
            args[0] = value
        else:
            name = next(iter(kwargs))
            check(kwargs[name], value, f"{node.path}.input")
            kwargs[name] = value

    def _complete(self, node: Node, kind: str) -> Traced:
        self._check_complete(node.path, f"{node.path}.{kind}")
        return self._at(node, kind)

    def _check_complete(self, path: str, location: str) -> None:
        if self._last and path not in PSEUDO:
            raise refused(location, self._last)

    def _last_of(self, value: Any, served: Traced, path: str, location: str) -> Any:
        """Return a value of which the code may use the last rows, if it may use no others."""
        if not self._last or path in PSEUDO:
            return value
        return last_of(
            value, served.rows, self._last, location, sized=False
        )  # the plan is for prompts with more rows too

    def _at(self, node: Node, kind: str, shown: str = "") -> Traced:
        location = (node.path, str(kind))
        if self._served is not None and self._at_now == location:
            self._served.put_back()
            return self._served
        name = str(Location(node.path, kind, 0, shown))
        line = self._recorder.line()
        if kind in COMPUTED:
            raise Refused(
                line, f"{name} is computed apart from the model's pass", "read it in steps outside of the loop"
            )
        position = self._tree.order_of(node.path, kind)
        if position <= self._position:
            raise Refused(line, f"{name} had already passed", "ask for locations in the order that the model runs them")
        self.settle()
        form = self._form_of(*location)
        if form is None:
            raise Refused(line, f"{name} has not been seen in a step of one row yet", "", later=True)
        number, first = len(self.results.reads), len(self._recorder.inputs)
        inputs = [
            self._recorder.input(f"at{number}_{leaf.index}", (form.rows, *leaf.shape), None, leaf.dtype)
            for leaf, _ in form.leaves()
        ]
        read = Read(*location, form, tuple(range(first, first + len(inputs))), line)
        self.results.reads.append(read)
        self._recorder.serving = number
        self._served = Traced(name, number, form, inputs, self._recorder)
        self._at_now, self._position = location, position
        self._items = self._served.items()
        return self._served

    def settle(self) -> None:
        """The block goes on from where it is: note what it changed there."""
        served = self._served
        if served is None:
            return
        self._check_items()
        number = len(self.results.reads) - 1
        for changed in served.changed():
            if self.results.reads[number].path == SAMPLES:
                raise Refused(
                    self._recorder.line(),
                    "a sampled token is changed, and every token is checked first",
                    "change the logits",
                )
            output = self.results.output(changed.tensor)
            self.results.writes.append(Write(number, changed.leaf, changed.at, output, changed.mutated))
        served.leave()
        self._recorder.unbar()
        self._served = self._at_now = None
        self._recorder.serving = -1

    # Where a value decides.

    def turn_way(self) -> None:
        """The block goes on under another condition.

        A changed stream is put back here, row by row. The block itself puts it back where it asks for a location next, so that no
        code may look at the parts in between.
        """
        self._check_items()
        served = self._served
        pending = served.pending if served is not None else []
        if served is None or not pending:
            return
        if not served.by_rows:
            self._refuse("a computed value of the model is changed beside a decision on a value", DECIDE)
        with self._recorder.certain():
            served.put_back()
        self._recorder.bar(pending)

    def reached(self) -> list[Any]:
        """Return what the block has of the location where it is."""
        return [] if self._served is None else [self._served.value]

    def _check_items(self) -> None:
        """Refuse an assignment to a value of the model under a condition."""
        if self._served is None:
            return
        items, before = self._served.items(), self._items
        same = len(items) == len(before) and all(one is other for one, other in zip(items, before, strict=True))
        if not same and self._recorder.condition is not None:
            self._refuse("a value of the model is assigned where a value decides", "change it in place: h[:] = ...")
        self._items = items

    def _check_certain(self, what: str) -> None:
        if self._recorder.condition is not None:
            self._refuse(f"{what} where a value decides", DECIDE)

    # What a plan does not have.

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise Refused(self._recorder.line(), what, instead)

    @property
    def steps(self) -> int:
        self._refuse("the number of steps so far is asked for", "use the loop's own number")

    def skip(self, node: Node, value: Any) -> NoReturn:
        self._refuse(f"{node.path}.skip() skips a module, which the engine does", "assign the module's output")

    def apply(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        self._refuse(
            f"{node.path}(...) applies a module of the model", "save its input, and apply the module after the loop"
        )

    def parameter(self, node: Node, name: str) -> NoReturn:
        self._refuse(f"{node.path}.{name} reads a weight", f"read it before the loop: weight = ….{name}")

    def await_barrier(self, barrier: object) -> NoReturn:
        self._refuse("a barrier waits for other invokes", "meet before the loop")

    def await_step(self, step: int, coming: object) -> NoReturn:
        self._refuse("a loop over steps inside the step", "write one loop over steps")

    def await_result(self) -> NoReturn:
        self._refuse("tracer.result waits for the end of the generation", "read it after the loop")

    def advance(self, node: Node) -> NoReturn:
        self._refuse(
            f"{node.path}.next() moves on to another step", "read the location in that step's turn of the loop"
        )

    def record(self, *_: object) -> NoReturn:
        self._refuse("tracer.cache() starts to record", "call it before the loop")

    def log(self, text: str) -> NoReturn:
        self._refuse("text is sent in every step", "append the values to a list and print them after the loop")

    def stop(self) -> NoReturn:
        self._refuse("tracer.stop() ends the request from inside", "bound the loop: tracer.iter[a:b]")

    # The values that the block keeps.

    def save(self, value: Any) -> Any:
        """Note a saved value; return what the block goes on with, as `SaveRegistry.save` does."""
        self._check_certain("a value is saved")
        if isinstance(value, torch.Tensor):
            if self._served is None or not self._served.owns(value):
                if self._recorder.owner(value)[0] == CONSTANT:
                    self._refuse(
                        "a tensor from before the loop is saved in every step", "save it once, before the loop"
                    )
                self._saved[id(value)] = (value, None)
                return value
            alias, snapshot = value.view_as(value), value.detach().clone()
            self._saved[id(alias)] = (alias, snapshot)
            self._saved[id(value)] = (value, snapshot)
            return alias
        if isinstance(value, Outputs | ListOutputs):
            self._refuse("a tuple of the model's values is saved", "save its tensors one by one: output[0].save()")
        if isinstance(value, Step):
            self._refuse("the step's number is saved by itself", "append it to a saved list")
        if isinstance(value, Written):
            self._refuse(
                "a list from before the loop is saved in every step", "save it before the loop: kept = [].save()"
            )
        refuse_names(value)
        self._saved[id(value)] = (value, None)
        return value

    def added(self, container: int, key: Any, value: Any, line: int) -> None:
        """Note that the block adds to a list or dict of its own."""
        self._added.append((container, key, value, line, len(self.results.reads) - 1, self._recorder.condition))

    def close(
        self,
        names: Mapping[str, Any],
        used: Mapping[str, int],
        given: Mapping[str, int],
        shared: frozenset[str] = frozenset(),
    ) -> None:
        """The step is over: note what it added and left.

        Args:
            names: what the names are bound to now.
            used: the names that the code after the step uses, each with a line for messages.
            given: further names that the block may give back. A value that no plan can keep is then dropped.
            shared: the names among `given` that other blocks or the code outside of the step may see. Tensors of other names are
                given back only if they are saved, and are dropped else.
        """
        self.settle()
        for container, key, value, line, read, condition in self._added:
            when = -1 if condition is None else self.results.output(condition)
            of_dict = key is not None
            item = self._item(value, line, 0)
            self.results.appends.append(
                Append(container, self._item(key, line, 0) if of_dict else None, item, line, read, when)
            )
        for name, line in {**given, **used}.items():
            if name not in names or isinstance(names[name], Written):
                continue
            if name not in used and name not in shared and self._is_lost(names[name]):
                self.results.dropped.append(name)
                continue
            try:
                self.results.left.append((name, self._item(names[name], line, 0)))
            except Refused:
                if name in used:
                    raise
                self.results.dropped.append(name)

    def _is_lost(self, value: Any) -> bool:
        """Return whether a value has tensors, and nothing of it is saved."""
        parts = list(_parts(value))
        saved = any(id(part) in self._saved and self._saved[id(part)][0] is part for part in parts)
        return not saved and any(isinstance(part, torch.Tensor) for part in parts)

    def _item(self, value: Any, line: int, depth: int) -> Item:
        """Return how a value of the step is made of the program's outputs."""
        if depth > _DEEPEST:
            raise Refused(line, "a value that is nested too deeply", "use a flat list")
        saved = self._saved.get(id(value))
        marked = saved is not None and saved[0] is value
        if isinstance(value, torch.Tensor):
            snapshot = saved[1] if saved is not None and marked else None
            if self._recorder.owner(value)[0] == CARRIED:
                self._check_carried(value, line)
            copy = -1 if snapshot is None else self.results.output(snapshot)
            return Item("tensor", self.results.output(value), saved=marked, snapshot=copy)
        if isinstance(value, Step):
            return Item("number", number=value.expression, saved=marked)
        if isinstance(value, Symbol):
            return Item("scalar", self.results.output(value.tensor), saved=marked)
        if isinstance(value, tuple | list):
            if type(value) not in (tuple, list, Outputs):
                raise Refused(line, f"a {type(value).__name__} is kept", "keep a plain tuple or list")
            kind = "list" if type(value) is list else "tuple"
            return Item(kind, items=tuple(self._item(one, line, depth + 1) for one in value), saved=marked)
        if type(value) is dict:
            items = tuple(self._item(one, line, depth + 1) for one in value.values())
            keys = tuple(self._item(key, line, depth + 1) for key in value)
            return Item("dict", items=items, keys=keys, saved=marked)
        if isinstance(
            value, ModuleName | bool | int | float | complex | str | bytes | None | torch.dtype | range | slice
        ):
            return Item("value", value=value, saved=marked)
        raise Refused(
            line, f"a {type(value).__name__} is kept past the step", "keep tensors, numbers, tuples and lists"
        )

    def _check_carried(self, value: torch.Tensor, line: int) -> None:
        if storage_of(value) in self._recorder.changed:
            raise Refused(line, "a tensor that the next step changes in place is kept", "keep a copy: total.clone()")


def _parts(value: Any) -> Iterator[Any]:
    """Return a value and what it holds, at any depth; a container that is there twice once."""
    todo, seen = [value], set[int]()
    while todo:
        one = todo.pop()
        yield one
        if isinstance(one, tuple | list | dict) and id(one) not in seen:
            seen.add(id(one))
            todo.extend((*one.keys(), *one.values()) if isinstance(one, dict) else one)


def explained(error: Exception, line: int) -> Refused:
    """Return why traced code could not go on, for an exception of its own."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Refusal):
        return Refused(line, error.message, "")
    return Refused(line, f"it cannot run without the values ({type(error).__name__}: {error})", "")
