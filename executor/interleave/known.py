"""Blocks of which all that they do is known, because requests with them have shown it.

Many blocks are a loop over the steps alone, with lists that they make before it (`executor.plan.outline`). When the loop of such
a block has gone into the tables before the prompt's step, nothing is left that the block's own code could decide. The same holds
for every block with the same text that reads the same values, but for the elements of tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from executor.core.programs import Unit
from executor.core.request import Opened
from executor.graphs.operations import ALL
from executor.graphs.table_loop import PlannedSteps
from executor.plan.ir import Item, Plan
from executor.plan.outline import lists_of
from executor.plan.run import Member
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import ARRAY_LIBRARY_TORCH, Tensor

_MOST_KNOWN, _MOST_LENGTHS = 256, 64
_MOST_TENSORS = 16
# Values that are the same in every trace that has the same message.
_FIXED = frozenset(
    "none boolean integer big_integer real complex_number text dtype device module tracer python_module symbol".split()
)

# What stands for a block, but for the elements of the tensors that it reads.
Key = tuple[bytes, tuple[tuple[object, ...], ...]]
Learn = Callable[[Sequence[PlannedSteps], Member], None]


@dataclass
class Known:
    """What a block does.

    Attributes:
        lists: the lists that it gives back, in order: the name, whether the list itself is saved, and its index among the
            containers that the loop writes to, -1: none.
        constants: the tensors that the loop reads: the name, and the index in the trace's scope.
        steps: the loop's steps, by the rows of the prompt.
        accounts: serialized events with an account, by all that an account depends on.
    """

    lists: tuple[tuple[str, bool, int], ...]
    constants: tuple[tuple[str, int], ...]
    steps: dict[int, tuple[PlannedSteps, ...]] = field(default_factory=dict)
    accounts: dict[tuple[object, ...], bytes] = field(default_factory=dict)


class KnownBlocks:
    """The known blocks of one worker. The block that came longest ago is forgotten first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, Known] = OrderedDict()

    def find(self, opened: Opened, rows: int) -> Known | None:
        """Return what the only block of a trace does, if that is known.

        Args:
            opened: the trace.
            rows: of the prompt.
        """
        key = key_of(opened)
        known = self._known.get(key) if key is not None else None
        if key is None or known is None or rows not in known.steps:
            return None
        self._known.move_to_end(key)
        return known

    def learner(self, opened: Opened, rows: int) -> Learn | None:
        """Return what is to be called when a block's loop has gone into the tables; None: nothing.

        The caller has seen that no code can look at the block's lists before they are encoded.

        Args:
            opened: the block's trace.
            rows: of the prompt.
        """
        key = key_of(opened)
        if key is None or (key in self._known and rows in self._known[key].steps):
            return None
        program = opened.trace.invokes[0].program
        made = lists_of(Unit.of_block(program))
        if made is None:
            return None
        return lambda steps, member: self._learn(key, _known_of(program, made, steps, member), rows, steps)

    def _learn(self, key: Key, known: Known | None, rows: int, steps: Sequence[PlannedSteps]) -> None:
        if known is None:
            return
        known = self._known.setdefault(key, known)
        if len(known.steps) < _MOST_LENGTHS:
            known.steps[rows] = tuple(steps)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


def _known_of(
    program: pb.Program, made: Mapping[str, bool], steps: Sequence[PlannedSteps], member: Member
) -> Known | None:
    """Return what a block does whose loop is in the tables; None if it does more than that.

    Args:
        program: the block.
        made: its lists, as of `lists_of`.
        steps: of the loop.
        member: what the block reads.
    """
    plans, names = [one.plan for one in steps], member.namespace
    if steps[-1].until != ALL or any(map(_is_unusual, plans)):
        return None
    if any(type(names.get(name)) is not list or names[name] for name in made):
        return None
    numbers = {id(one): i for i, one in enumerate(member.environment.written)}
    if not numbers.keys() <= {id(names[name]) for name in made}:
        return None  # it writes to a list that its trace brought
    saving = {append.container for plan in plans for append in plan.appends if append.item.saved}
    found = [(name, made[name], numbers.get(id(names[name]), -1)) for name in program.writes if name in made]
    refs = {one.name: one.value.ref for one in program.reads if one.value.WhichOneof("kind") == "ref"}
    constants = [name for name, _ in member.environment.constants]
    if not refs.keys() >= set(constants):
        return None
    return Known(
        tuple(one for one in found if one[1] or one[2] in saving), tuple((name, refs[name]) for name in constants)
    )


def key_of(opened: Opened) -> Key | None:
    """Return what stands for the block of a trace; None: such a block is never known."""
    trace = opened.trace
    if len(trace.invokes) != 1 or len(trace.scope.values) > _MOST_TENSORS or not trace.stacks:
        return None
    if trace.stream or trace.scan or trace.explain or trace.applied or trace.edits:
        return None
    if trace.shared or trace.exchanged or trace.variables:
        return None
    invoke = trace.invokes[0]
    if invoke.joint or invoke.gang or invoke.after:
        return None
    forms = []
    for value in trace.scope.values:
        form = _form(value.tensor) if value.WhichOneof("kind") == "tensor" else None
        if form is None:
            return None
        forms.append(form)
    for one in invoke.program.reads:
        kind = one.value.WhichOneof("kind")
        if kind not in _FIXED and not (kind == "ref" and one.value.ref < len(forms)):
            return None
    return invoke.program.SerializeToString(), tuple(forms)


def _form(tensor: Tensor) -> tuple[object, ...] | None:  # of any shape
    """Return a tensor's message without its elements; None if no known block reads it."""
    payload = tensor.WhichOneof("payload")
    if tensor.library != ARRAY_LIBRARY_TORCH or tensor.shape_only or payload is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.parameter, tensor.requires_grad, payload


def _is_unusual(plan: Plan) -> bool:
    """Return whether a plan leaves more than lists of tensors."""
    if plan.carried or any(map(_has_saved, (item for _, item in plan.results))):
        return True
    return any(append.key is not None or append.item.kind != "tensor" for append in plan.appends)


def _has_saved(item: Item) -> bool:
    return item.saved or any(map(_has_saved, (*item.items, *item.keys)))
