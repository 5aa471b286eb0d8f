"""Plans as plain values from a process that may say anything: none but a real plan is taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.model.tree import SAMPLES
from executor.plan import allowed
from executor.plan.forms import Form
from executor.plan.plain import Unfit
from executor.plan.portable import MOST_NODES, PortablePlan, made_of
from executor.plan.program import ProgramRun

WIDTH = 8
MOST_BYTES = 1 << 20
CPU = torch.device("cpu")
FORMS = {
    ("layers.0", "output"): Form.of_copies((torch.zeros(1, WIDTH), None)),
    ("layers.1", "output"): Form.of_copies(torch.zeros(1, WIDTH)),
    (SAMPLES, "output"): Form.of_copies(torch.zeros(1, dtype=torch.int64)),
}


def node(number: int) -> tuple[str, int]:
    return "node", number


# h = layers[0].output[0]; h += vector; kept.append(h.sum(-1)); x = layers[1].output; total = total + x
GOOD: dict[str, Any] = {
    "inputs": 4,
    "nodes": [
        ("add.Tensor", [node(0), node(1)], {}),
        ("sum.dim_IntList", [node(4), [-1]], {}),
        ("add.Tensor", [node(3), node(2)], {}),
    ],
    "results": [4, 5, 6],
    "reads": [("layers.0", "output", [0], 1), ("layers.1", "output", [2], 2)],
    "writes": [(0, 0, (0,), 0, True)],
    "guards": [([("%", 2, False)], "<", 5, True)],
    "fixed": {1: (torch.arange(float(WIDTH)), [0])},
    "begins": {3: (torch.zeros(1, WIDTH), [0, 1])},
    "carried": [(3, 2)],
    "every": [1],
    "last": [2],
}


def made(told: Any) -> PortablePlan:
    return made_of(told, lambda path, kind: FORMS.get((path, kind)), CPU, MOST_BYTES)


def test_a_plan_computes_what_it_says() -> None:
    plan = made(GOOD)
    hidden, other = torch.ones(1, WIDTH), torch.full((1, WIDTH), 3.0)
    run = ProgramRun(plan.parts, {**plan.fixed, **plan.begins})
    run.serve(0, {0: hidden})
    assert torch.equal(run.result(0), hidden + torch.arange(float(WIDTH)))
    run.serve(1, {2: other})
    assert torch.equal(run.result(2), other) and run.result(1).item() == WIDTH + 28
    assert torch.equal(hidden, torch.ones(1, WIDTH)), "the program wrote to what it was given"
    assert plan.holds(3)


def test_a_constant_lies_in_memory_as_it_did() -> None:
    whole = torch.arange(6.0).view(2, 3)
    told = {**GOOD, "fixed": {1: (torch.arange(float(WIDTH)), [0]), 4: (whole, [1, 0])}, "inputs": 5}
    told["nodes"], told["results"] = [("add.Tensor", [node(0), node(1)], {})], [5]
    told |= {"writes": [], "every": [0], "last": [], "carried": []}
    assert torch.equal(made(told).fixed[4], whole.t()) and made(told).fixed[4].stride() == (1, 3)


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **fields}


def one(name: str, *args: Any, **named: Any) -> dict[str, Any]:
    """Return a plan with one operation more."""
    return changed(nodes=[*copy.deepcopy(GOOD["nodes"]), (name, list(args), named)])


def many(*nodes: tuple[str, list[Any], dict[str, Any]]) -> dict[str, Any]:
    return changed(nodes=[*copy.deepcopy(GOOD["nodes"]), *nodes])


def indexed(index: torch.Tensor, name: str = "index.Tensor") -> dict[str, Any]:
    args = [node(0), 1, node(4)] if name == "index_select.default" else [node(0), [None, node(4)]]
    shift = [(name, args, {}), ("add.Tensor", [node(0), node(1)], {})]
    fixed = {1: (torch.arange(float(WIDTH)), [0]), 4: (index, list(range(index.dim())))}
    return changed(inputs=5, nodes=shift, results=[6], writes=[], carried=[], every=[0], last=[], fixed=fixed)


BIG = 1 << 40
HOSTILE: dict[str, Any] = {
    # No plan at all.
    "nothing": None,
    "a list": [],
    "too little": {name: value for name, value in GOOD.items() if name != "guards"},
    "too much": {**GOOD, "code": b"import os"},
    "nodes that are none": changed(nodes={"a": 1}),
    "a node that is none": changed(nodes=[1]),
    "a million nodes": changed(nodes=[("relu.default", [node(0)], {})] * 1_000_000),
    "a node too many": changed(nodes=[("relu.default", [node(0)], {})] * (MOST_NODES + 1)),
    "it reads nothing": changed(reads=[], writes=[]),
    # Operations.
    "an operation that is none": one("rm.default", node(0)),
    "code": one("__import__('os').system", node(0)),
    "an operation with a dunder": one("__class__.default", node(0)),
    "a packet": one("add", node(0), node(1)),
    "another namespace": one("prims::add.default", node(0), node(1)),
    "in place": one("add_.Tensor", node(0), node(1)),
    "in place on a constant": one("mul_.Scalar", node(1), 2.0),
    "a copy into a constant": one("copy_.default", node(1), node(0)),
    "an out variant": one("add.out", node(0), node(1), out=node(1)),
    "as_strided": one("as_strided.default", node(0), [1 << 20], [1]),
    "a view with strides": one("_reshape_alias.default", node(0), [1 << 20], [1]),
    "set_": one("set_.source_Tensor", node(0), node(1)),
    "resize_": one("resize_.default", node(0), [1 << 20]),
    "memory that nobody wrote": one("empty.memory_format", [8]),
    "memory like another": one("new_empty.default", node(0), [8]),
    "random": one("rand.default", [8]),
    "random in place": one("normal_.default", node(0)),
    "dropout": one("native_dropout.default", node(0), 0.5, True),
    "a value taken out": one("_local_scalar_dense.default", node(0)),
    "a value compared": one("equal.default", node(0), node(0)),
    "a shape that depends on values": one("nonzero.default", node(0)),
    "a mask": one("masked_select.default", node(0), node(0)),
    "a unique": one("_unique2.default", node(0)),
    "a file": one("from_file.default", "/etc/passwd", True, 8),
    "an embedding bag": one("_embedding_bag.default", node(0), node(1), node(1)),
    "a gather": one("gather.default", node(0), 1, node(1)),
    "a scatter": one("scatter.src", node(0), 1, node(1), node(0)),
    "a conversion to sparse": one("to_sparse.default", node(0)),
    "a resolve of another device": one("_to_copy.default", node(0), device="cuda:0"),
    "a pinned tensor": one("zeros.default", [8], pin_memory=True),
    "a layout": one("zeros.default", [8], layout=1),
    "a count that overflows": one("arange.start_step", 17, -3, -(1 << 63)),
    # Arguments.
    "too many arguments": one("relu.default", node(0), node(0), node(0)),
    "too few arguments": one("mm.default", node(0)),
    "an argument twice": one("relu.default", node(0), self=node(0)),
    "a name that is none": one("relu.default", node(0), more=1),
    "a keyword in another place": one("add.Tensor", node(0), node(1), 2),
    "a result that comes later": one("relu.default", node(7)),
    "a result of itself": one("relu.default", node(7)),
    "a cycle": many(("relu.default", [node(8)], {}), ("relu.default", [node(7)], {})),
    "a result before the first": one("relu.default", node(-1)),
    "a number of another type": one("relu.default", ("node", True)),
    "a tag that is none": one("relu.default", ("tensor", 0)),
    "a list in the place of a tensor": one("relu.default", [node(0)]),
    "text in the place of a tensor": one("relu.default", "0"),
    "None in the place of a tensor": one("relu.default", None),
    "text in the place of a number": one("sum.dim_IntList", node(0), ["-1"]),
    "a float in the place of a number": one("sum.dim_IntList", node(0), [1.0]),
    "an integer without an end": one("add.Scalar", node(0), 1 << 80),
    "a complex number": one("add.Scalar", node(0), 1 + 2j),
    "a dtype that is none": one("_to_copy.default", node(0), dtype=("dtype", "object")),
    "a complex dtype": one("_to_copy.default", node(0), dtype=("dtype", "complex64")),
    "a dtype that is text": one("_to_copy.default", node(0), dtype="float32"),
    "a format that is none": one("clone.default", node(0), memory_format=("format", "channels_last")),
    "a rounding that is none": one("div.Tensor_mode", node(0), node(1), rounding_mode="up"),
    "a dimension that is none": one("sum.dim_IntList", node(0), [7]),
    "shapes that do not fit": one("mm.default", node(0), node(0)),
    "a slice without a step": one("slice.Tensor", node(0), 1, 0, 4, 0),
    "an item that is none": one("select.int", node(0), 1, 99),
    "integers divided": many(
        ("_to_copy.default", [node(0)], {"dtype": ("dtype", "int64")}),
        ("remainder.Scalar", [node(7), -1], {}),
    ),
    "integers divided downwards": many(
        ("_to_copy.default", [node(0)], {"dtype": ("dtype", "int64")}),
        ("div.Tensor_mode", [node(7), node(7)], {"rounding_mode": "floor"}),
    ),
    "a part of a tensor": one("getitem", node(0), 0),
    "a part that is none": many(("topk.default", [node(0), 2], {}), ("getitem", [node(7), 5], {})),
    "a part from the end": many(("topk.default", [node(0), 2], {}), ("getitem", [node(7), -1], {})),
    "several results in the place of one": many(("topk.default", [node(0), 2], {}), ("relu.default", [node(7)], {})),
    # Sizes.
    "a huge tensor": one("zeros.default", [BIG]),
    "a huge tensor of many dimensions": one("zeros.default", [1 << 20, 1 << 20, 1 << 20]),
    "a tensor below zero": one("zeros.default", [-1]),
    "a huge tensor of nothing": one("zeros.default", [0, BIG]),
    "a huge range": one("arange.default", BIG),
    "a range without an end": one("arange.start_step", 0, float("inf"), 1),
    "a range of small steps": one("arange.start_step", 0, 1e18, 1e-9),
    "a range of no number": one("arange.start_step", 0, float("nan"), 1),
    "a huge view": one("expand.default", node(0), [BIG, WIDTH]),
    "a huge repetition": one("repeat.default", node(0), [1 << 20, 1 << 20]),
    "a huge edge": one("constant_pad_nd.default", node(0), [BIG, 0], 0.0),
    "sizes that grow": many(*[("cat.default", [[node(6 + i)] * 64], {}) for i in range(20)]),
    "a product that grows": many(
        ("zeros.default", [[2048, 2048]], {}), *[("mm.default", [node(7 + i), node(7)], {}) for i in range(8)]
    ),
    "a sum again and again": many(
        ("zeros.default", [[1024, 1024]], {}), *[("sum.default", [node(7)], {}) for _ in range(2000)]
    ),
    "a sort again and again": many(
        ("zeros.default", [[1 << 20]], {}), *[("sort.default", [node(7)], {}) for _ in range(20)]
    ),
    "many parts": many(("zeros.default", [[1 << 20]], {}), ("split.Tensor", [node(7), 1], {})),
    "many parts again and again": many(
        ("zeros.default", [[1024]], {}), *[("unbind.int", [node(7)], {}) for _ in range(1000)]
    ),
    "parts without a size": many(("zeros.default", [[4096]], {}), ("split.Tensor", [node(7), 0], {})),
    "parts of no dimension": one("unbind.int", node(0), 5),
    "a long list": one("cat.default", [node(0)] * 100_000),
    # Indices.
    "an index of the model's values": many(
        ("topk.default", [node(0), 2], {}),
        ("getitem", [node(7), 1], {}),
        ("index.Tensor", [node(0), [None, node(8)]], {}),
    ),
    "an index out of range": indexed(torch.tensor([WIDTH])),
    "an index far out of range": indexed(torch.tensor([BIG])),
    "an index below zero": indexed(torch.tensor([-WIDTH - 1])),
    "a mask as an index": indexed(torch.ones(WIDTH, dtype=torch.bool)),
    "a float as an index": indexed(torch.zeros(2)),
    "a selection out of range": indexed(torch.tensor([WIDTH]), "index_select.default"),
    "a selection below zero": indexed(torch.tensor([-1]), "index_select.default"),
    "more indices than dimensions": one("index.Tensor", node(0), [node(1), node(1), node(1)]),
    "a write out of range": one("index_put.default", node(0), [None, node(1)], node(0)),
    # Inputs and locations.
    "a location that the block has not been at": changed(reads=[("layers.9", "output", [0], 1)]),
    "a location of another kind": changed(reads=[("layers.0", "weight", [0], 1)]),
    "a location with a number as a name": changed(reads=[(0, "output", [0], 1)]),
    "an input of two locations": changed(reads=[("layers.0", "output", [0], 1), ("layers.1", "output", [0], 2)]),
    "an input too many": changed(reads=[("layers.0", "output", [0, 2], 1)], inputs=4),
    "an input that is none": changed(reads=[("layers.0", "output", [9], 1), ("layers.1", "output", [2], 2)]),
    "inputs without an end": changed(inputs=1 << 40),
    "inputs below zero": changed(inputs=-1),
    "inputs that are none": changed(inputs="4"),
    "a constant in the place of a location": changed(fixed={0: (torch.zeros(1, WIDTH), [0, 1])}),
    "a constant that is none": changed(fixed={1: [1.0, 2.0]}),
    "a constant in no order": changed(fixed={1: (torch.zeros(2, 4), [0, 0])}),
    "a constant in too few dimensions": changed(fixed={1: (torch.zeros(2, 4), [0])}),
    "a complex constant": changed(fixed={1: (torch.zeros(WIDTH, dtype=torch.complex64), [0])}),
    "a constant that is too large": changed(fixed={1: (torch.zeros(MOST_BYTES), [0])}),
    "a constant of shapes alone": changed(fixed={1: (torch.zeros(()).expand(4, 4), [0, 1])}),
    "a constant under a name": changed(fixed={"1": (torch.zeros(WIDTH), [0])}),
    "too many constants": changed(fixed={100 + i: (torch.zeros(1), [0]) for i in range(5000)}),
    # Results, writes and what is carried.
    "a result that is none": changed(results=[4, 5, 99]),
    "a result of another type": changed(results=[4, 5, "6"]),
    "an output that is none": changed(every=[7]),
    "an output below zero": changed(every=[-1]),
    "an output twice": changed(every=[1, 1]),
    "outputs that are too large": many(
        ("zeros.default", [[1 << 22]], {}), *[("add.Scalar", [node(7), float(i)], {}) for i in range(2)]
    )
    | {"results": [4, 5, 6, 8, 9], "every": [3, 4]},
    "the same output under many numbers": many(("zeros.default", [[1 << 20]], {}))
    | {"results": [4, 5, 6, *[7] * 3000], "every": list(range(3, 3000))},
    "a write to another location": changed(writes=[(7, 0, (0,), 0, True)]),
    "a write to another tensor": changed(writes=[(0, 1, (0,), 0, True)]),
    "a write where nothing is": changed(writes=[(0, 0, (1,), 0, True)]),
    "a write to all": changed(writes=[(0, 0, (), 0, True)]),
    "a write under another type": changed(writes=[(0, 0, (False,), 0, True)]),
    "a write under a name": changed(writes=[(0, 0, ("__class__",), 0, True)]),
    "a write of another shape": changed(writes=[(0, 0, (0,), 1, True)]),
    "a write of another dtype": many(("_to_copy.default", [node(4)], {"dtype": ("dtype", "float64")}))
    | {"results": [4, 5, 6, 7], "writes": [(0, 0, (0,), 3, True)]},
    "a write of what comes later": changed(writes=[(0, 0, (0,), 2, True)]),
    "two writes to one tensor": changed(writes=[(0, 0, (0,), 0, True), (0, 0, (0,), 0, False)]),
    "a write to a constant": changed(writes=[(1, 1, (), 0, True)]),
    "a write to a sampled token": changed(
        inputs=5,
        reads=[*GOOD["reads"], (SAMPLES, "output", [4], 3)],
        nodes=[("add.Scalar", [node(4), 1], {}), ("add.Tensor", [node(0), node(1)], {})],
        results=[5, 6, 6],
        writes=[(2, 0, (), 0, True)],
        carried=[],
    ),
    "a constant carried": changed(carried=[(1, 0)]),
    "a location carried": changed(carried=[(0, 0)]),
    "carried twice": changed(carried=[(3, 2), (3, 2)]),
    "carried in another form": changed(carried=[(3, 1)]),
    # Guards.
    "a guard with code": changed(guards=[([("**", 99, False)], "<", 5, True)]),
    "a guard with a long sum": changed(guards=[([("*", 2, False)] * 10_000, "<", 5, True)]),
    "a guard with a large number": changed(guards=[([("*", 1 << 200, False)], "<", 5, True)]),
    "a guard that compares otherwise": changed(guards=[([], "in", 5, True)]),
    "many guards": changed(guards=[([], "<", 5, True)] * 1000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plan_is_not_taken(name: str) -> None:
    with pytest.raises(Unfit):
        made(HOSTILE[name])


def test_the_operations_write_nothing_and_draw_nothing() -> None:
    assert len(allowed.operations()) > 150
    for name, operation in allowed.operations().items():
        if name == allowed.GETITEM:
            continue
        schema = operation._schema
        assert schema.name.startswith("aten::") and not schema.is_mutable, name
        assert not schema.name.endswith(("_", "empty", "strided", "rand")), name
        assert torch.Tag.nondeterministic_seeded not in operation.tags, name
        assert torch.Tag.data_dependent_output not in operation.tags, name
        dynamic = torch.Tag.dynamic_output_shape in operation.tags
        assert not dynamic or name in allowed.INDICES, name
        indices = [one.name for one in schema.arguments if one.name in ("index", "indices")]
        assert not indices or name in allowed.INDICES or name == "select.int" or name == "select_scatter.default", name


def test_no_change_of_a_plan_does_more_than_be_refused() -> None:
    """Random changes of a real plan: each is refused as unfit, or is a plan that runs."""
    draw, taken, refused = random.Random(3), 0, 0
    values: list[Any] = [None, True, -1, 0, 1, 2, 3, 7, BIG, 1.5, "", "node", node(0), node(5), [], {}, [node(1)], ()]
    for _ in range(3000):
        told = copy.deepcopy(GOOD)
        for _ in range(draw.randrange(1, 3)):
            _change(told, draw, lambda: copy.deepcopy(draw.choice(values)))
        try:
            plan = made(told)
        except Unfit:
            refused += 1
            continue
        taken += 1
        run = ProgramRun(plan.parts, {**plan.fixed, **plan.begins})
        for number, read in enumerate(plan.reads):
            leaves = zip(read.form.leaves(), read.inputs, strict=True)
            run.serve(number, {index: torch.ones(1, *leaf.shape, dtype=leaf.dtype) for (leaf, _), index in leaves})
    assert taken > 50 and refused > 1000


def _change(told: Any, draw: random.Random, value: Callable[[], Any]) -> None:
    """Change a part of some values at any depth."""
    part = told
    while True:
        if isinstance(part, dict) and part:
            key: Any = draw.choice(list(part))
        elif isinstance(part, list) and part:
            key = draw.randrange(len(part))
        else:
            return
        below = part[key]
        if isinstance(below, tuple) and below and draw.random() < 0.8:
            items = list(below)
            place = draw.randrange(len(items))
            items[place] = value()
            part[key] = tuple(items)
            return
        if not isinstance(below, dict | list) or not below or draw.random() < 0.3:
            part[key] = value()
            return
        part = below
