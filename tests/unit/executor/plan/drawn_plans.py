"""Plans at random, as a hostile process could send them: operations of the list with arguments of all kinds."""

from __future__ import annotations

import random
from typing import Any

import torch

from executor.plan import allowed
from executor.plan.forms import Form
from executor.plan.plain import Unfit
from executor.plan.portable import made_of
from executor.plan.program import ProgramRun

WIDTH = 6
_SIZES = [0, 1, 1, 2, 3, 6, 6, 17]
_INTEGERS = [-(1 << 63), (1 << 63) - 1, -(1 << 31), 1 << 31, -7, -3, -2, -1, -1, 0, 0, 0, 1, 1, 1, 2, 3, 6, 17, 1 << 16]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
_DTYPES = list(allowed.DTYPES.values())
FORM = Form.of_copies(torch.zeros(1, WIDTH))
BIG_FORM = Form.of_copies((torch.zeros(1, 2, 3, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)))


def constant(draw: random.Random) -> torch.Tensor:
    """Return a tensor of any form, with any elements."""
    shape = [draw.choice(_SIZES) for _ in range(draw.choice([0, 1, 1, 2, 2, 3]))]
    dtype = draw.choice(_DTYPES)
    if draw.random() < 0.5:
        low = draw.choice([-2, 0])
        return torch.randint(low, draw.choice([1, 2, 3, 6]), shape).to(dtype)
    if dtype.is_floating_point:
        return (
            torch.tensor([draw.choice(_FLOATS) for _ in range(max(1, _count(shape)))])
            .to(dtype)[: _count(shape)]
            .view(shape)
        )
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    values = [draw.choice([least, most, 0, most // 2]) for _ in range(max(1, _count(shape)))]
    return torch.tensor(values, dtype=dtype)[: _count(shape)].view(shape)


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def argument(draw: random.Random, kind: str, count: int) -> Any:
    """Return an argument of a kind; `count` results are there."""
    if kind.startswith("Optional["):
        return None if draw.random() < 0.4 else argument(draw, kind[len("Optional[") : -1], count)
    if kind.startswith("List["):
        return [argument(draw, kind[len("List[") : -1], count) for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3]))]
    if kind == "Tensor":
        return draw.choice(_FLOATS) if draw.random() < 0.05 else ("node", draw.randrange(count))
    if kind == "ScalarType":
        return "dtype", draw.choice(list(allowed.DTYPES))
    if kind == "MemoryFormat":
        return "format", draw.choice(list(allowed.FORMATS))
    if kind == "bool":
        return draw.random() < 0.5
    if kind == "int":
        return draw.choice(_INTEGERS)
    if kind in ("float", "number"):
        return draw.choice(_FLOATS + (_INTEGERS if kind == "number" else []))
    return draw.choice(["trunc", "floor", "none", "tanh"])


def plan(draw: random.Random) -> dict[str, Any]:
    """Return a plan of some operations."""
    fixed = {3 + i: constant(draw) for i in range(draw.randrange(1, 5))}
    inputs = 3 + len(fixed)
    nodes: list[Any] = []
    names = list(allowed.operations())
    for _ in range(draw.randrange(1, 5)):
        name = draw.choice(names)
        count = inputs + len(nodes)
        if name == allowed.GETITEM:
            nodes.append((name, [("node", draw.randrange(count)), draw.choice([0, 1, 2])], {}))
            continue
        given: list[Any] = []
        named: dict[str, Any] = {}
        for one in allowed.operations()[name]._schema.arguments:
            if one.name in allowed.DEVICE_ARGUMENTS:
                continue
            value = argument(draw, str(one.real_type), count)
            if one.kwarg_only:
                if draw.random() < 0.4:
                    named[one.name] = value
            else:
                given.append(value)
        nodes.append((name, given, named))
    results = [number for number in range(inputs, inputs + len(nodes)) if draw.random() < 0.7]
    return {
        "inputs": inputs,
        "nodes": nodes,
        "results": results,
        "reads": [("a", "output", [0], 1), ("b", "output", [1, 2], 2)],
        "writes": [],
        "guards": [],
        "fixed": {number: (tensor, list(range(tensor.dim()))) for number, tensor in fixed.items()},
        "begins": {},
        "carried": [],
        "every": list(range(len(results))),
        "last": [],
    }


def form_of(path: str, kind: str) -> Form | None:
    return {"a": FORM, "b": BIG_FORM}.get(path)


def run(told: Any, device: torch.device) -> str:
    """Make a plan and run a step; return what came out: "unfit", "raised" or "ran".

    Raises:
        RuntimeError: an operation harmed the device, or a result has another form than the worker computed.
    """
    try:
        made = made_of(told, form_of, device, 1 << 20)
    except Unfit:
        return "unfit"
    step = ProgramRun(made.parts, {**made.fixed, **made.begins})
    hidden = torch.randn(1, WIDTH, device=device)
    other = torch.randn(1, 2, 3, device=device).bfloat16(), torch.tensor([4], device=device)
    try:
        step.serve(0, {0: hidden})
        step.serve(1, {1: other[0], 2: other[1]})
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        if "device-side" in str(error) or "CUDA error" in str(error):
            raise RuntimeError(f"{told['nodes']} harmed the device: {error}") from error
        return "raised"
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize()
    for number, node in enumerate(made.parts.results):
        value, form = step.result(number), node.meta["val"]
        if (value.shape, value.dtype) != (form.shape, form.dtype):
            raise RuntimeError(
                f"{told['nodes']} gave {value.shape}, {value.dtype} in the place of {form.shape}, {form.dtype}"
            )
    return "ran"
