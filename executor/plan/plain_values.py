"""Which values of a message lead to no module of the model, whatever a block does with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Value

_MOST = 10_000  # values that are looked at
_LEAVES = frozenset(
    "none boolean integer big_integer real complex_number text data tensor slice ellipsis range dtype device size remote".split()
)
_SEQUENCES = frozenset("list tuple set frozen_set".split())


def kept_of(trace: pb.Trace) -> frozenset[int]:
    """Return the entries of a trace's values that are variables of its session."""
    return frozenset(variable.entry for variable in trace.variables)


class Plain:
    """Looks at values that may refer to others.

    Args:
        values: those to which they refer.
        kept: the entries of `values` that are not looked at, because they may be something else when the block runs.

    Attributes:
        kept: as given.
    """

    def __init__(self, values: Sequence[Value], kept: frozenset[int]) -> None:
        self.kept = kept
        self._values = values
        self._left = _MOST

    def holds(self, value: Value) -> bool:
        """Return whether a value is made of numbers, texts and tensors alone."""
        todo, seen = [value], set[int]()
        while todo:
            one = todo.pop()
            self._left -= 1
            if self._left < 0:
                return False
            kind = one.WhichOneof("kind")
            if kind == "ref":
                if one.ref in self.kept or one.ref >= len(self._values):
                    return False
                if one.ref not in seen:
                    seen.add(one.ref)
                    todo.append(self._values[one.ref])
            elif kind in _SEQUENCES or kind == "dict":
                todo.extend(_parts(one))
            elif kind not in _LEAVES:
                return False
        return True


def _parts(value: Value) -> Iterator[Value]:
    kind = value.WhichOneof("kind")
    if kind == "dict":
        yield from value.dict.keys
        yield from value.dict.values
    elif kind is not None:
        yield from getattr(value, kind).items
