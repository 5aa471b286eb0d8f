"""Makes taps of a plan whose program has only operations of the tables.

Any other plan stays a plan. The program is followed without values (`executor.graphs.cells`). At each site it is a sequence of
operations, and what the block keeps is the site's value after some of them, or something that the host computes of such values
when the loop is over (`executor.graphs.tail`). A plan is not for the tables if it changes the model by another operation, or
keeps something that no tail computes. `Tap.exact` holds for each tap that comes from here.

A value that the block assigns takes the place of the model's tensor, which other parts of the model may still hold. So it has a
site of its own, where the tensor is replaced before its taps run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from executor.graphs.cells import Cells, Half, Unknown, Walk
from executor.graphs.operations import ALL, Code, Refused, Tap
from executor.graphs.tail import Passed, Tail, allowed, checked
from executor.model.items import Path
from executor.plan.ir import Item, Plan, Write

_MOST_STEPS = 4096

# The tensors of a site: the module, "input" or "output", and the paths in the location's value. A fourth item, True, stands in
# the key of a site whose tensor is replaced.
SiteKey = tuple[str, str, tuple[Path, ...]] | tuple[str, str, tuple[Path, ...], bool]
_Leaves = tuple[int, tuple[int, ...]]  # the index of a location, and tensors of it


@dataclass(frozen=True)
class Lowered:
    """A plan in the tables.

    Attributes:
        taps: for `Tables.join`.
        reads: for each output of the plan that a tap reads, the number of the tap, and the shape of the output.
        known: the outputs that are constants.
        tail: what the host computes of what the taps read; None: nothing.
    """

    taps: tuple[Tap, ...]
    reads: Mapping[int, tuple[int, tuple[int, ...]]]
    known: Mapping[int, torch.Tensor]
    tail: Tail | None = None

    def values(self, stacked: Callable[[int], torch.Tensor], steps: int) -> dict[int, torch.Tensor]:
        """Return the outputs of the plan in all steps: [steps, ...] each.

        Args:
            stacked: returns what a tap read: [steps, rows, columns], all on one device.
            steps: how many steps; at least one.
        """
        made = {tap: stacked(tap) for tap in dict.fromkeys(self._read())}
        found = {output: made[tap].reshape(steps, *shape) for output, (tap, shape) in self.reads.items()}
        found |= {output: known.expand(steps, *known.shape) for output, known in self.known.items()}
        return found if self.tail is None else found | self.tail.run(made.__getitem__, steps)

    def _read(self) -> Iterator[int]:
        yield from (tap for tap, _ in self.reads.values())
        if self.tail is not None:
            yield from (tap for tap, _ in self.tail.given.values())


def lower(
    plan: Plan,
    functional: fx.Graph,
    constants: Mapping[int, torch.Tensor],
    sites: Mapping[SiteKey, int],
    steps: tuple[int, int] = (0, ALL),
    tails: bool = False,
) -> Lowered:
    """Return a plan as taps; the constants have any shape.

    Args:
        plan: the plan.
        functional: its program without in-place operations.
        constants: the tensors of its other inputs, by the index of the program's input: constants, literals, and what the first
            step gets of the tensors that steps pass on.
        sites: the sites of the model. At a location, a site of one tensor stands before a site of a pair with that tensor, and
            both before a site whose tensor is replaced.
        steps: the first step and the step after the last, in which the plan's guards hold.
        tails: whether the host may compute what the block keeps; the caller then takes the outputs from `Lowered.values`.

    Raises:
        Refused: the plan is not for the tables; the text says why.
    """
    if plan.guards and not (steps[1] - steps[0] <= _MOST_STEPS and all(map(plan.holds, range(*steps)))):
        raise Refused("the block does something else in some of the steps")
    walk, inputs = Walk(plan), dict[int, object](constants)
    for one in plan.carried:
        inputs[one.input] = Unknown(f"{one.name} is carried from step to step")
    for number, read in enumerate(plan.reads):
        for (leaf, _), index in zip(read.form.leaves(), read.inputs, strict=True):
            # A leaf of other than [rows, columns] is no site; it may be there unused.
            width = leaf.shape[0] if len(leaf.shape) == 1 else 0
            inputs[index] = Cells.of_leaf(number, leaf.index, width)
    results: Sequence[fx.Node] = ()
    holders: list[fx.Node] = []
    for node in functional.nodes:
        if node.op == "placeholder":
            walk.values[node] = inputs[len(holders)]
            holders.append(node)
        elif node.op == "output":
            results = node.args[0]
        elif node.op != "call_function":
            raise Refused(f"the program has a {node.op}")
        else:
            walk.values[node] = walk.node(node)
    passed = tuple(Passed(holders[one.input], results[one.output], constants[one.input]) for one in plan.carried)
    made = _Gathered(walk, results, passed, sites, steps).lowered()
    if made.tail is not None and not tails:
        raise Refused("the block keeps a value that the model does not go on with")
    return made


@dataclass
class _Gathered:
    """Puts the operations of all sites into taps, and the rest into a tail.

    Attributes:
        final: the operations at each changed site.
        replaced: the sites at which the block assigned a new value.
        wanted: the nodes that taps read, with their columns.
        order: the operations of the tail.
        tail_constants: the constants of the tail.
    """

    walk: Walk
    results: Sequence[fx.Node]
    passed: tuple[Passed, ...]
    sites: Mapping[SiteKey, int]
    steps: tuple[int, int]
    final: dict[_Leaves, tuple[Tap, ...]] = field(default_factory=dict)
    replaced: set[_Leaves] = field(default_factory=set)
    wanted: dict[fx.Node, Cells] = field(default_factory=dict)
    order: dict[fx.Node, None] = field(default_factory=dict)
    tail_constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)

    def lowered(self) -> Lowered:
        plan, values = self.walk.plan, self.walk.values
        kept = [*_outputs(plan), *(one.output for one in plan.carried)]
        outputs = {output: self.results[output] for output in sorted(set(kept))}
        known = {i: values[node] for i, node in outputs.items() if isinstance(values[node], torch.Tensor)}
        self._follow_writes([node for i, node in outputs.items() if i not in known])
        direct: dict[int, fx.Node] = {}
        computed: dict[int, fx.Node] = {}
        for i, node in outputs.items():
            if i not in known:
                self._need(node)
                (direct if node in self.wanted else computed)[i] = node
        for one in self.passed:
            self._need(one.out)
        taps, tap_of = self._taps()
        shapes = {node: (tap_of[node], tuple(node.meta["val"].shape)) for node in self.wanted}
        tail = self._tail(computed, shapes) if computed else None
        return Lowered(tuple(taps), {i: shapes[node] for i, node in direct.items()}, known, tail)

    def _tail(self, results: dict[int, fx.Node], shapes: Mapping[fx.Node, tuple[int, tuple[int, ...]]]) -> Tail:
        used: set[fx.Node] = set(results.values()) | {one.out for one in self.passed}
        for node in self.order:
            used.update(node.all_input_nodes)
        given = {node: shape for node, shape in shapes.items() if node in used}
        tail = Tail(tuple(self.order), given, self.tail_constants, self.passed, results)
        if any(map(checked, self.order)):
            rows = {tap: torch.zeros(1, *shape, dtype=node.meta["val"].dtype) for node, (tap, shape) in given.items()}
            try:
                tail.run(rows.__getitem__, 1)
            except (IndexError, RuntimeError) as error:
                raise Refused(f"the block's own code fails ({error})") from None
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
            if node in self.wanted or node in self.order or node in self.tail_constants or node in inputs:
                continue
            value = self.walk.values[node]
            if isinstance(value, torch.Tensor):
                self.tail_constants[node] = value
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
            if isinstance(value, torch.Tensor):
                value = self._set(write, value, [one for one in map(values.get, kept) if isinstance(one, Cells)])
            if not write.mutated:
                self.replaced.add(key)
                if write.at != self._paths(write.read)[write.leaf]:
                    raise Refused("a tensor that stands in a value twice is assigned")
            if isinstance(value, Half) and value.leaf == write.leaf and write.mutated:
                halves.setdefault(write.read, {})[write.leaf] = value.now
            elif isinstance(value, Cells) and (value.read, value.leaves) == key and value.columns[0] == 0:
                self.final[key] = value.done
            else:
                raise Refused("the block writes a value that is not made of the location's own")
        for read, both in halves.items():
            nows = list(both.values())
            if len(nows) != 2 or nows[0] != nows[1] or set(both) != set(nows[0].leaves):
                raise Refused("one half of the residual stream is changed alone")
            self.final[read, nows[0].leaves] = nows[0].done

    def _set(self, write: Write, value: torch.Tensor, kept: Sequence[Cells]) -> Cells | None:  # [..., columns]
        """Return a tensor of a location after the block has set all of it to a constant."""
        before = [cells.done for cells in kept if (cells.read, cells.leaves) == (write.read, (write.leaf,))]
        base = Cells.of_leaf(write.read, write.leaf, value.shape[-1])
        longest: tuple[Tap, ...] = max(before, key=len, default=())
        return self.walk.computed(torch.ops.aten.copy.default, [replace(base, done=longest), value])

    def _taps(self) -> tuple[list[Tap], dict[fx.Node, int]]:
        """Return the taps in the order in which they run, and the tap that reads each node."""
        taps: list[Tap] = []
        tap_of: dict[fx.Node, int] = {}
        for key in sorted({(cells.read, cells.leaves) for cells in self.wanted.values()} | set(self.final)):
            site = self._site(key)
            if site is None:
                raise Refused(self._no_site(key[0]))
            done = self.final.get(key, ())
            mine = {node: cells for node, cells in self.wanted.items() if (cells.read, cells.leaves) == key}
            for k in range(len(done) + 1):
                at: dict[tuple[int, int], int] = {}  # one tap for all nodes that are the same columns
                for node, cells in mine.items():
                    if len(cells.done) == k:
                        if cells.columns not in at:
                            at[cells.columns] = len(taps)
                            taps.append(Tap(site, Code.READ, cells.columns, steps=self.steps))
                        tap_of[node] = at[cells.columns]
                if k < len(done):
                    taps.append(self._placed(done[k], site))
        return taps, tap_of

    def _placed(self, tap: Tap, site: int) -> Tap:
        return replace(tap, site=site, steps=self.steps)

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


def _outputs(plan: Plan) -> Iterator[int]:
    """Return the outputs that the block's lists and names get."""

    def of(item: Item) -> Iterator[int]:
        if item.kind == "tensor":
            yield item.output
            if item.snapshot >= 0:
                yield item.snapshot
        for one in (*item.items, *item.keys):
            yield from of(one)

    for append in plan.appends:
        for item in (append.item, append.key):
            if item is not None:
                yield from of(item)
    for _, item in plan.results:
        yield from of(item)
