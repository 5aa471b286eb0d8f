"""A tuple of the model is a tuple in a block, whatever reads it, before and after its items were assigned."""

from __future__ import annotations

import collections
import copy
import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from executor.core.errors import Refusal
from executor.interleave.serving import check_plain
from executor.model.items import ListOutputs, Outputs, Spot, as_served, kind_of, made_of, outputs_like, plainly
from executor.model.values import Served

Pair = collections.namedtuple("Pair", ["hidden", "residual"])

A, B, X = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3), torch.full((2, 3), 7.0)

READS: dict[str, Any] = {
    "unpacked": lambda out: (lambda a, b: (a, b))(*out),
    "assigned to two names": lambda out: next((a, b) for a, b in [out]),
    "starred": lambda out: [*out],
    "indexed": lambda out: (out[0], out[1]),
    "from the end": lambda out: (out[-2], out[-1]),
    "sliced": lambda out: out[:],
    "tuple": tuple,
    "list": list,
    "reversed": lambda out: tuple(reversed(out))[::-1],
    "zip": lambda out: [one for one, _ in zip(out, range(2), strict=True)],
    "itemgetter": lambda out: operator.itemgetter(0, 1)(out),
    "extend": lambda out: (lambda rows: rows.extend(out) or rows)([]),
    "plus": lambda out: operator.add(out, ()),
    "plus from the left": lambda out: operator.add((None,), out)[1:],
    "times": lambda out: (out * 2)[2:],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "stack": lambda out: torch.stack(out),
    "cat": lambda out: torch.cat(out).reshape(2, 2, 3),
    "cat by name": lambda out: torch.cat(tensors=out, dim=0).reshape(2, 2, 3),
    "numpy": lambda out: torch.from_numpy(np.stack(out)),
    "concatenate": lambda out: torch.from_numpy(np.concatenate(out)).reshape(2, 2, 3),
    "pytree": lambda out: _pytree.tree_map(torch.clone, out),
    "pad": lambda out: torch.nn.utils.rnn.pad_sequence(out, batch_first=True),
}


def matched(out: Any) -> Any:
    match out:
        case (a, b):
            return a, b
    raise AssertionError


@pytest.mark.parametrize("read", [*READS.values(), matched], ids=[*READS, "match"])
def test_every_way_to_read_gives_what_was_assigned(read: Any) -> None:
    """What the tuple was held as, before the assignment, reads the new item too."""
    out = Outputs([A, B], Spot("a.output"))
    assert all(map(torch.equal, read(out), (A, B)))
    held = out
    out[0] = X
    assert all(map(torch.equal, read(held), (X, B)))


def test_it_is_a_tuple() -> None:
    out = Outputs([A, None], Spot("a.output"))
    assert isinstance(out, tuple) and not isinstance(out, list)
    plain = (A, None)
    assert out == plain and plain == out and out != (A, 1) and hash(out) == hash((A, None))
    assert len(out) == 2 and None in out and out.index(None) == 1 and out.count(None) == 1
    assert repr(out) == repr((A, None)) and operator.mod("%s %s", out) == f"{A!r} None"
    assert type(out[:1]) is type(operator.add(out, ())) is type(copy.copy(out)) is tuple
    numbers = Outputs([1, 2], Spot("a.output"))
    assert numbers < (1, 3) and numbers <= (1, 2) and numbers > (1, 1) and numbers >= (1, 2)


@pytest.mark.parametrize(
    ("key", "value", "message"), [(0, A[0], "has shape"), (slice(1), (A,), "one at a time"), (1, A, "only")]
)
def test_an_item_that_does_not_fit_is_refused(key: Any, value: Any, message: str) -> None:
    out = Outputs([A, None], Spot("a.output"))
    with pytest.raises(Refusal, match=message):
        out[key] = value
    with pytest.raises(IndexError):
        out[2] = A
    assert out[0] is A and out[1] is None


def test_named_tuples_and_lists_keep_their_kind() -> None:
    out = outputs_like(Pair(A, B), [A, B], Spot("a.output"), ())
    assert (
        isinstance(out, Pair)
        and isinstance(out, tuple)
        and out.hidden is A
        and out._asdict() == {"hidden": A, "residual": B}
    )
    out[0] = X
    hidden, residual = out
    assert out.hidden is X and hidden is X and residual is B
    assert type(out._replace(residual=A)) is Pair and out._replace(residual=A).residual is A
    assert "hidden=" in repr(out) and type(made_of(kind_of(out), list(out))) is Pair and type(plainly(out)) is tuple
    rows = outputs_like([A, B], [A, B], Spot("a.output"), ())
    assert isinstance(rows, list) and isinstance(rows, ListOutputs) and kind_of(rows) is list
    rows[1] = X
    assert rows[1] is X and type(plainly(rows)) is list
    with pytest.raises(Refusal, match=r"a.output\[0\] has shape"):
        rows[0] = A[0]


def test_items_of_what_was_assigned_as_a_whole_can_be_assigned() -> None:
    old = Outputs([Outputs([A, B], Spot("a.input"), (0,)), {}], Spot("a.input"))
    new = as_served(old, ((X, B), {}), Spot("a.input"))
    new[0][1] = A
    assert new == ((X, A), {})
    with pytest.raises(Refusal, match=r"a.input\[0\]\[0\] has shape"):
        new[0][0] = A[0]


def served(value: Any) -> Served:
    from executor.model.layouts import WHOLE
    from executor.model.rows import Rows

    return Served("a.output", value, Rows(0, 2, 2, 2), lambda path: WHOLE)


def test_an_assignment_that_the_model_would_not_see_is_refused() -> None:
    """Where the block has gone on, and in a tuple that was replaced as a whole."""
    at = served((A.clone(), B.clone()))
    before = at.value
    at.assign((X, B))
    with pytest.raises(Refusal, match=r"a.output\[0\] was assigned after a.output was replaced as a whole"):
        before[0] = A
    now = at.value
    now[1] = X
    assert all(map(torch.equal, at.settle(at._original), (X, X)))
    at.leave()
    with pytest.raises(Refusal, match="the block had gone on from there"):
        now[0] = A


def test_the_model_goes_on_with_a_tuple_of_its_own_kind() -> None:
    at = served(Pair(A.clone(), B.clone()))
    at.value[0] = X
    settled = at.settle(at._original)
    assert type(settled) is Pair and torch.equal(settled.hidden, X) and settled.residual is at._original.residual


class Looping(torch.Tensor):
    """A tensor with code of its own."""


class Sequence(tuple):
    """A tuple with code of its own."""


def test_what_a_location_gives_may_be_written_back() -> None:
    """Tuples, named tuples and lists of a location, the model's own named tuple, and what a block makes of them."""
    for model in ((A, B), Pair(A, B), [A, (B, Pair(A, B))], {"pair": Pair(A, B)}):
        value = served(model).value
        check_plain(value, "x.output")
    named = served(Pair(A, B)).value
    check_plain((named, Pair(A, B), named._replace(hidden=X), None, 1), "x.output")


@pytest.mark.parametrize(
    "value",
    [
        A.as_subclass(Looping),
        Sequence([A, B]),
        [(A, A.as_subclass(Looping))],
        type("Mine", (Outputs,), {})([A], Spot("x.output")),
        {"one": collections.namedtuple("Unknown", ["one"])(A)},
        collections.OrderedDict(one=A),
    ],
    ids=["tensor", "tuple", "nested", "subclass of ours", "foreign named tuple", "dict"],
)
def test_values_with_code_of_their_own_are_not_written_back(value: Any) -> None:
    with pytest.raises(Refusal, match="whose own code the engine does not run"):
        check_plain(value, "x.output")
