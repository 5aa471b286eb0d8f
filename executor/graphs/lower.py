"""Makes taps of a plan whose program has only operations of the tables.

Any other plan stays a plan. The program is followed without values (`executor.graphs.cells`). At each site it is a sequence of
operations, and what the block keeps is the site's value after some of them, or something that the host computes of such values
when the loop is over (`executor.graphs.tail`). A plan is not for the tables if it changes the model by another operation, or
keeps something that no tail computes. `Tap.exact` holds for each tap that comes from here.

What a program becomes does not depend on what its constants are. So it is followed once for all requests with the plan, and each
request fills in its own constants (`executor.graphs.template`).

A value that the block assigns takes the place of the model's tensor, which other parts of the model may still hold. So it has a
site of its own, where the tensor is replaced before its taps run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from executor.graphs.cells import Cells, Half, Unknown, Walk
from executor.graphs.lengths import between
from executor.graphs.operands import Constant, Sketch
from executor.graphs.operations import ALL, Code, Refused, Tap
from executor.graphs.tail import MOST_ELEMENTS, Passed, Tail, allowed, checked
from executor.graphs.template import Lowered, Template
from executor.model.items import Path
from executor.plan.ir import Item, Plan, Write

_MOST_STEPS = 4096
OTHER_LENGTH = "the block may do something else with prompts of other lengths"

# The tensors of a site: the module, "input" or "output", and the paths in the location's value. A fourth item, True, stands in
# the key of a site whose tensor is replaced.
SiteKey = tuple[str, str, tuple[Path, ...]] | tuple[str, str, tuple[Path, ...], bool]
_Leaves = tuple[int, tuple[int, ...]]  # the index of a location, and tensors of it


class Lowerer:
    """Lowers the plans of one worker, each once.

    Args:
        sites: the sites of the model. At a location, a site of one tensor stands before a site of a pair with that tensor, and
            both before a site whose tensor is replaced.
        tails: whether the host may compute what blocks keep; the caller then takes the outputs from `Lowered.values`.
        most: how many plans it remembers.
    """

    def __init__(self, sites: Mapping[SiteKey, int], tails: bool = True, most: int = 512) -> None:
        self._sites = sites
        self._tails = tails
        self._most = most
        self._templates: OrderedDict[str, Template | str] = OrderedDict()
        self._between: OrderedDict[tuple[str, str, int], Template | str] = OrderedDict()

    def lower(self, plan: Plan, constants: Mapping[int, torch.Tensor], steps: tuple[int, int] = (0, ALL)) -> Lowered:
        """Return a plan as taps; the constants have any shape.

        Args:
            plan: the plan.
            constants: the tensors of its inputs that are no locations, by the index of the program's input: constants, literals,
                and what the first step gets of the tensors that steps pass on.
            steps: the first step and the step after the last, in which the plan's guards hold.

        Raises:
            Refused: the plan is not for the tables; the text says why.
        """
        return self._template(plan, steps).filled(constants, steps)

    def lower_between(
        self,
        low: Plan,
        high: Plan,
        rows: int,
        constants: Mapping[int, torch.Tensor],  # of any shape
        steps: tuple[int, int],
    ) -> Lowered:
        """Return the plan of a region for a prompt of so many rows as taps.

        Args:
            low, high: the plans for a shorter and a longer prompt.
            rows: of the prompt.
            constants, steps: as of `lower`.

        Raises:
            Refused: the plans have no taps, or these do not say what those for `rows` are.
        """
        one, other, key = self._template(low, steps), self._template(high, steps), (low.key, high.key, rows)
        found = self._between.get(key)
        if found is None:
            found = self._between[key] = between((low, one), (high, other), rows) or ""
            if len(self._between) > self._most:
                self._between.popitem(last=False)
        if isinstance(found, str):
            raise Refused(OTHER_LENGTH)
        return found.filled(constants, steps)

    def _template(self, plan: Plan, steps: tuple[int, int]) -> Template:
        """Return a plan in the tables, before its constants are known; raises as `lower`."""
        if plan.guards and not (steps[1] - steps[0] <= _MOST_STEPS and all(map(plan.holds, range(*steps)))):
            raise Refused("the block does something else in some of the steps")
        found = self._templates.get(plan.key)
        if found is None:
            try:
                found = template_of(plan, plan.functional.graph, self._sites, self._tails)
            except Refused as refused:
                found = str(refused)
            self._templates[plan.key] = found
            if len(self._templates) > self._most:
                self._templates.popitem(last=False)
        else:
            self._templates.move_to_end(plan.key)
        if isinstance(found, str):
            raise Refused(found)
        return found


def lower(
    plan: Plan,
    functional: fx.Graph,
    constants: Mapping[int, torch.Tensor],
    sites: Mapping[SiteKey, int],
    steps: tuple[int, int] = (0, ALL),
    tails: bool = False,
) -> Lowered:
    """Return a plan as taps, as `Lowerer.lower` does; the constants have any shape.

    `functional` is the plan's program without in-place operations.
    """
    if plan.guards and not (steps[1] - steps[0] <= _MOST_STEPS and all(map(plan.holds, range(*steps)))):
        raise Refused("the block does something else in some of the steps")
    return template_of(plan, functional, sites, tails).filled(constants, steps)


def template_of(plan: Plan, functional: fx.Graph, sites: Mapping[SiteKey, int], tails: bool) -> Template:
    """Return a plan in the tables, before its constants are known.

    Raises:
        Refused: the plan is not for the tables; the text says why.
    """
    walk = Walk(plan)
    holders = [node for node in functional.nodes if node.op == "placeholder"]
    for holder in holders:
        walk.values[holder] = Constant(holder)
    for one in plan.carried:
        walk.values[holders[one.input]] = Unknown(f"{one.name} is carried from step to step")
    for number, read in enumerate(plan.reads):
        for (leaf, _), index in zip(read.form.leaves(), read.inputs, strict=True):
            # A leaf of other than [rows, columns] is no site; it may be there unused.
            width = leaf.shape[0] if len(leaf.shape) == 1 else 0
            walk.values[holders[index]] = Cells.of_leaf(number, leaf.index, width)
    results: Sequence[fx.Node] = ()
    for node in functional.nodes:
        if node.op == "output":
            results = node.args[0]
        elif node.op == "call_function":
            walk.values[node] = walk.node(node)
        elif node.op != "placeholder":
            raise Refused(f"the program has a {node.op}")
    passed = tuple(Passed(holders[one.input], results[one.output]) for one in plan.carried)
    return _Gathered(walk, results, passed, sites, tails).template(holders)


@dataclass
class _Gathered:
    """Puts the operations of all sites into taps, and the rest into a tail.

    Attributes:
        final: the operations at each changed site.
        replaced: the sites at which the block assigned a new value.
        wanted: the nodes that taps read, with their columns.
        order: the operations of the tail.
        fixed: the constants of the tail.
    """

    walk: Walk
    results: Sequence[fx.Node]
    passed: tuple[Passed, ...]
    sites: Mapping[SiteKey, int]
    tails: bool
    final: dict[_Leaves, tuple[Sketch, ...]] = field(default_factory=dict)
    replaced: set[_Leaves] = field(default_factory=set)
    wanted: dict[fx.Node, Cells] = field(default_factory=dict)
    order: dict[fx.Node, None] = field(default_factory=dict)
    fixed: dict[fx.Node, None] = field(default_factory=dict)

    def template(self, holders: Sequence[fx.Node]) -> Template:
        plan, values = self.walk.plan, self.walk.values
        kept = [*outputs_of(plan), *(one.output for one in plan.carried)]
        outputs = {output: self.results[output] for output in sorted(set(kept))}
        known = {i: node for i, node in outputs.items() if isinstance(values[node], Constant)}
        self._follow_writes([node for i, node in outputs.items() if i not in known])
        direct: dict[int, fx.Node] = {}
        computed: dict[int, fx.Node] = {}
        for i, node in outputs.items():
            if i not in known:
                self._need(node)
                (direct if node in self.wanted else computed)[i] = node
        for one in self.passed:
            self._need(one.out)
        if computed and not self.tails:
            raise Refused("the block keeps a value that the model does not go on with")
        taps, tap_of = self._taps()
        shapes = {node: (tap_of[node], tuple(node.meta["val"].shape)) for node in self.wanted}
        tail = self._tail(computed, shapes) if computed else None
        needed = {*known.values(), *self.fixed, *(one.operand.node for one in taps if one.operand is not None)}
        constants = self._with_sources(needed)
        inputs = {
            i: node for i, node in enumerate(holders) if node in constants or node in {one.into for one in self.passed}
        }
        return Template(
            tuple(taps),
            {i: shapes[node] for i, node in direct.items()},
            tuple(node for node in values if node in constants and node.op == "call_function"),
            known,
            tail,
            inputs,
            any(map(checked, self.order)),
        )

    def _with_sources(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """Return some constants with all constants of which they are computed."""
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in found and isinstance(self.walk.values[node], Constant):
                found.add(node)
                todo.extend(node.all_input_nodes)
        return found

    def _tail(self, results: dict[int, fx.Node], shapes: Mapping[fx.Node, tuple[int, tuple[int, ...]]]) -> Tail:
        used: set[fx.Node] = set(results.values()) | {one.out for one in self.passed}
        for node in self.order:
            used.update(node.all_input_nodes)
        given = {node: shape for node, shape in shapes.items() if node in used}
        tail = Tail(tuple(self.order), given, tuple(self.fixed), self.passed, results)
        if tail.elements > MOST_ELEMENTS:
            raise Refused(f"the host would compute {tail.elements} numbers in each step, more than {MOST_ELEMENTS}")
        return tail

    # What is kept.

    def _need(self, node: fx.Node) -> None:
        """Note what taps must read, or the tail must compute, for the value of a node.

        Raises:
            Refused: neither can.
        """
        todo = [(node, False)]
        inputs = {one.into for one in self.passed}
        while todo:
            node, ready = todo.pop()
            if ready:
                self.order[node] = None
                continue
            if node in self.wanted or node in self.order or node in self.fixed or node in inputs:
                continue
            value = self.walk.values[node]
            if isinstance(value, Constant):
                self.fixed[node] = None
            elif isinstance(value, Cells) and self._readable(value):
                self.wanted[node] = value
            elif node.op == "call_function" and allowed(node):
                todo.append((node, True))
                todo.extend((one, False) for one in reversed(node.all_input_nodes))
            elif isinstance(value, Cells) and self._site((value.read, value.leaves)) is None:
                raise Refused(self._no_site(value.read))
            elif node.op == "call_function":
                raise Refused(f"the tables and the host have no {node.target} as the block uses it")
            else:
                raise Refused("the block keeps a value that the model does not go on with")

    def _readable(self, cells: Cells) -> bool:
        """Return whether the model has the columns at a site at some point."""
        key = (cells.read, cells.leaves)
        if cells.wide or cells.picks is not None or cells.lines is not None:
            return False
        if cells.done != self.final.get(key, ())[: len(cells.done)] or self._site(key) is None:
            return False
        # A site of one tensor stands before the pair's, and a site that replaces stands after it.
        others = [one for one in self.final if one[0] == cells.read and one != key and one not in self.replaced]
        return all(len(one[1]) > len(cells.leaves) or set(one[1]).isdisjoint(cells.leaves) for one in others)

    # What is changed.

    def _follow_writes(self, kept: Sequence[fx.Node]) -> None:
        """Find the operations at each changed site."""
        plan, values = self.walk.plan, self.walk.values
        halves: dict[int, dict[int, Cells]] = {}
        for write in plan.writes:
            value, key = values[self.results[write.output]], (write.read, (write.leaf,))
            if isinstance(value, Unknown):
                raise Refused(value.why)
            if isinstance(value, Constant):
                value = self._set(write, value, [one for one in map(values.get, kept) if isinstance(one, Cells)])
            if not write.mutated:
                self.replaced.add(key)
                if write.at != self._paths(write.read)[write.leaf]:
                    raise Refused("a tensor that stands in a value twice is assigned")
            if isinstance(value, Half) and value.leaf == write.leaf and write.mutated:
                halves.setdefault(write.read, {})[write.leaf] = value.now
            elif (
                isinstance(value, Cells)
                and value.complete
                and (value.read, value.leaves, value.columns[0]) == (*key, 0)
            ):
                self.final[key] = value.done
            else:
                raise Refused("the block writes a value that is not made of the location's own")
        for read, both in halves.items():
            nows = list(both.values())
            if len(nows) != 2 or nows[0] != nows[1] or set(both) != set(nows[0].leaves):
                raise Refused("one half of the residual stream is changed alone")
            self.final[read, nows[0].leaves] = nows[0].done

    def _set(self, write: Write, value: Constant, kept: Sequence[Cells]) -> Cells | None:
        """Return a tensor of a location after the block has set all of it to a constant."""
        before = [cells.done for cells in kept if (cells.read, cells.leaves) == (write.read, (write.leaf,))]
        base = Cells.of_leaf(write.read, write.leaf, value.like.shape[-1])
        longest: tuple[Sketch, ...] = max(before, key=len, default=())
        return self.walk.computed(torch.ops.aten.copy.default, [replace(base, done=longest), value])

    def _taps(self) -> tuple[list[Sketch], dict[fx.Node, int]]:
        """Return the taps in the order in which they run, and the tap that reads each node."""
        taps: list[Sketch] = []
        tap_of: dict[fx.Node, int] = {}
        for key in sorted({(cells.read, cells.leaves) for cells in self.wanted.values()} | set(self.final)):
            site = self._site(key)
            if site is None:
                raise Refused(self._no_site(key[0]))
            done = self.final.get(key, ())
            mine = {node: cells for node, cells in self.wanted.items() if (cells.read, cells.leaves) == key}
            for k in range(len(done) + 1):
                at: dict[object, int] = {}  # one tap for all nodes that are the same columns and rows
                for node, cells in mine.items():
                    if len(cells.done) == k:
                        where = cells.columns, cells.rows
                        if where not in at:
                            at[where] = len(taps)
                            taps.append(Sketch(Tap(site, Code.READ, cells.columns, cells.rows or (0, ALL))))
                        tap_of[node] = at[where]
                if k < len(done):
                    taps.append(replace(done[k], tap=replace(done[k].tap, site=site)))
        return taps, tap_of

    def _no_site(self, read: int) -> str:
        location = self.walk.plan.reads[read]
        return f"{location.path}.{location.kind} is no site"

    def _paths(self, read: int) -> dict[int, Path]:
        return {leaf.index: path for leaf, path in self.walk.plan.reads[read].form.leaves()}

    def _site(self, key: _Leaves) -> int | None:
        location, paths = self.walk.plan.reads[key[0]], self._paths(key[0])
        at = tuple(paths[leaf] for leaf in key[1])
        plain = (location.path, location.kind, at)
        return self.sites.get((*plain, True) if key in self.replaced else plain)


def outputs_of(plan: Plan) -> Iterator[int]:
    """Return the outputs that the block's lists and names get."""

    def of(item: Item) -> Iterator[int]:
        if item.kind in ("tensor", "scalar"):
            yield item.output
            if item.snapshot >= 0:
                yield item.snapshot
        for one in (*item.items, *item.keys):
            yield from of(one)

    for append in plan.appends:
        if append.when >= 0:
            yield append.when
        for item in (append.item, append.key):
            if item is not None:
                yield from of(item)
    for _, item in plan.results:
        yield from of(item)
