"""A plan: a block's step as data, which is checked, compared and run without Python code.

The program is a graph of torch's aten operations. Its inputs are, in this order, the tensors of the locations that it reads,
the carried tensors, the constants and the literals. It lists its operations in the order of the block, with the block's own
in-place operations; `Plan.functional` is the same program without any.

Nothing here knows greenlets or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from executor.plan.forms import Form
from executor.plan.segments import Parts
from executor.plan.step import Expression, Guard


@dataclass(frozen=True)
class Read:
    """A location that a plan reads.

    Attributes:
        path, kind: the raw location, as of `executor.core.location.Location`.
        form: the value there.
        inputs: for each tensor of the form, the index of the program's input.
        line: the notebook's line that asked first.
    """

    path: str
    kind: str
    form: Form
    inputs: tuple[int, ...]
    line: int = 0


@dataclass(frozen=True)
class Write:
    """A tensor that a plan changes at a location.

    Attributes:
        read: the index of the location among the plan's reads.
        leaf: the index of the tensor in the location's form.
        at: the path of keys to the tensor in the location's value.
        output: the index of the program's output.
        mutated: whether the block changed the tensor itself; otherwise it assigned another.
    """

    read: int
    leaf: int
    at: tuple[object, ...]
    output: int
    mutated: bool


@dataclass(frozen=True)
class Constant:
    """A tensor that the block reads and does not change, the same in every step.

    Attributes:
        name: the name under which the block reaches it first.
        shape, dtype: of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Carried:
    """A tensor that a step leaves for the next step under a name.

    Attributes:
        name: the block's name.
        input: the index of the program's input.
        output: the index of the program's output.
        mutated: whether the block changes the tensor itself, so that its identity stays.
    """

    name: str
    input: int
    output: int
    mutated: bool


@dataclass(frozen=True)
class Item:
    """A value that a step gives to a list, a dict or a name.

    It is one of six kinds: a tensor (`output`), a number that is taken out of a scalar (`output`), a number made of the step
    (`number`), a constant (`value`), a sequence (`items` in a tuple or list), or a dict (`items` under `keys`).

    Attributes:
        kind: "tensor", "scalar", "number", "value", "tuple", "list" or "dict".
        saved: whether the block saved this very value.
        snapshot: of a saved tensor of a location, the output that holds its copy; -1: the tensor itself is what was saved.
    """

    kind: str
    output: int = -1
    number: Expression | None = None
    value: Any = None
    items: tuple[Item, ...] = ()
    keys: tuple[Item, ...] = ()
    saved: bool = False
    snapshot: int = -1


@dataclass(frozen=True)
class Append:
    """A place of the block that adds to a list, or puts into a dict.

    Attributes:
        container: the index of the list or dict among the containers that the block writes to.
        key: the key in a dict; None for a list, whose end gets the item.
        item: the value.
        line: the notebook's line.
        read: the index of the location where the block is then; -1 before the first.
        when: the output that says whether the block adds it, a scalar bool; -1: it always does.
    """

    container: int
    key: Item | None
    item: Item
    line: int
    read: int
    when: int = -1


@dataclass(frozen=True)
class Plan:
    """One step of a block, for every step in which the guards hold.

    Size: data: all that a step needs, with nothing left to look up.

    Attributes:
        key: stands for the code, the shapes and dtypes of everything it reads, and the constants that are no tensors.
        environment: the fingerprint of the environments that it is for.
        rows: the rows of a request that it is for; 1 in a step of the generation after the first.
        inputs: the names of the program's inputs, in order.
        program: the operations.
        functional: the same without in-place operations.
        outputs: the number of results.
        reads, writes: the locations, in the order of the model, and what it changes there.
        guards: what must hold of the step.
        constants, carried, appends: as of their classes.
        literals: small tensors that the code itself makes of numbers.
        results: the names that the step leaves, with their values.
        dropped: the names that the step binds to what no plan can keep, such as a function; they end unbound.
        unstable: the first operation whose last bits may depend on how many rows it is given; "" if there is none.
        sized: whether the code may have seen a number that depends on how many rows there are.
    """

    key: str
    environment: str
    rows: int
    inputs: tuple[str, ...]
    program: Parts = field(compare=False)
    functional: Parts = field(compare=False)
    outputs: int
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    guards: tuple[Guard, ...]
    constants: tuple[Constant, ...]
    carried: tuple[Carried, ...]
    appends: tuple[Append, ...]
    literals: tuple[torch.Tensor, ...] = field(compare=False)
    results: tuple[tuple[str, Item], ...]
    dropped: tuple[str, ...]
    unstable: str
    sized: bool = True

    def holds(self, step: int) -> bool:
        """Return whether the plan is for a step."""
        return all(guard.holds(step) for guard in self.guards)

    @property
    def read(self) -> tuple[str, ...]:
        """The locations that the plan reads, as `path.kind`, each once."""
        return tuple(dict.fromkeys(f"{read.path}.{read.kind}" for read in self.reads))

    @property
    def written(self) -> tuple[str, ...]:
        """The locations that the plan changes, as `path.kind`, each once."""
        written = (self.reads[write.read] for write in self.writes)
        return tuple(dict.fromkeys(f"{read.path}.{read.kind}" for read in written))
