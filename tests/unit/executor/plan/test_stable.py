"""The operations that run once for all requests give each row the bits that it gets alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.plan.functional import STABLE

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Each by the name of its aten operation; the second argument is another row.
OPERATIONS: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y * 2,
    "mul": lambda x, y: x * y * 0.37,
    "div": lambda x, y: x / y / 3,
    "reciprocal": lambda x, y: x.reciprocal(),
    "sqrt": lambda x, y: x.abs().sqrt(),
    "rsub": lambda x, y: torch.rsub(x, 2),
    "neg": lambda x, y: -x,
    "relu": lambda x, y: x.relu(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "argmax": lambda x, y: x.argmax(-1),
    "argmin": lambda x, y: x.argmin(-1),
    "any": lambda x, y: (x > 2.5).any(-1, keepdim=True),
    "all": lambda x, y: (x > -2.5).all(-1),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0),
    "floor": lambda x, y: (x * 3).floor(),
    "ceil": lambda x, y: (x * 3).ceil(),
    "round": lambda x, y: (x * 3).round(),
    "trunc": lambda x, y: (x * 3).trunc(),
    "sign": lambda x, y: x.sign(),
    "_to_copy": lambda x, y: x.to(torch.float16),
    "flip": lambda x, y: x.flip(-1),
    "roll": lambda x, y: x.roll(3, -1),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y]),
    "slice": lambda x, y: x[..., 1::2] * 2,
    "constant_pad_nd": lambda x, y: torch.nn.functional.pad(x, (1, 2)),
    "repeat": lambda x, y: x.repeat(2, 2),
    "unfold": lambda x, y: x.unfold(-1, 5, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_gets_the_same_bits_in_a_batch(name: str, dtype: torch.dtype) -> None:
    assert name in STABLE
    do = OPERATIONS[name]
    made = torch.Generator().manual_seed(3)
    for width in (19, 64, 67, 576, 1023):
        one, other = (torch.randn(6, 1, width, generator=made).to(dtype) for _ in range(2))
        batch = torch.func.vmap(do)(one, other)
        alone = torch.stack([do(x.clone(), y.clone()) for x, y in zip(one, other, strict=True)])
        assert batch.contiguous().view(torch.uint8).equal(alone.view(torch.uint8)), width


def test_operations_that_are_not_stable_are_not_listed() -> None:
    unstable = [
        "mm",
        "addmm",
        "bmm",
        "sigmoid",
        "silu",
        "pow",
        "rsqrt",
        "exp",
        "tanh",
        "sum",
        "mean",
        "native_layer_norm",
    ]
    assert STABLE.isdisjoint(unstable)
