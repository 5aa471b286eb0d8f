"""Taps at the sites of a model: a forward with hooks against the same model written out with the changes in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.graphs.operations import Code, Tap
from executor.graphs.tables import Tables
from executor.graphs.taps import Site, Taps
from tests.unit.executor.graphs.samples import CPU, LIMITS
from tests.unit.executor.graphs.toy import HIDDEN, LAYERS, make_toy

Change = Callable[[torch.Tensor], torch.Tensor]
WHOLE = (0, HIDDEN)
K = (HIDDEN, 2 * HIDDEN)


def written_out(toy: torch.nn.Module, x: torch.Tensor, changes: dict[str, Change]) -> dict[str, torch.Tensor]:
    """Run the model without hooks; return its values at each place. `changes` are functions, by place."""
    found = {}

    def at(name: str, value: torch.Tensor) -> torch.Tensor:
        value = changes.get(name, lambda one: one)(value)
        found[name] = value.clone()
        return value

    hidden, residual = x, None
    for i, layer in enumerate(toy.layers):
        residual = hidden if residual is None else hidden + residual
        fused = at(f"qkv {i}", layer.qkv(torch.nn.functional.normalize(residual, dim=-1)))
        q, k, v = fused.split(HIDDEN, -1)
        hidden = at(f"layer {i}", layer.out(torch.tanh(q) * k + v))
        stream = hidden + residual
        changed = at(f"stream {i}", stream.clone())
        if f"stream {i}" in changes:
            hidden, residual = torch.zeros_like(hidden), changed
    found["result"] = hidden + residual
    return found


def test_reads_and_changes_reach_the_rows_of_their_request() -> None:
    toy, taps, tables = make_toy()
    x = torch.randn(5, HIDDEN)
    v = torch.randn(HIDDEN)
    changing = [
        Tap(0, Code.MULTIPLY, K, number=0.5),
        Tap(4, Code.ADD, WHOLE, vector=v),
        Tap(5, Code.SET, (3, 6), number=0.25),
        Tap(8, Code.READ, WHOLE),
    ]
    tables.join(2, "a", changing, 2)
    tables.join(0, "b", [Tap(3 * i + 2, Code.READ, WHOLE) for i in range(LAYERS)], 1)
    later, prompt = tables.begin_step([(0, 1), (2, 2), (1, 1)], {0: 3, 2: 0}, 5)
    with taps.hooked(tables.sites):
        got = toy(x)
    again = toy(x)

    def columns(value: torch.Tensor, span: tuple[int, int], new: object) -> torch.Tensor:
        value = value.clone()
        value[:, span[0] : span[1]] = new
        return value

    plain = written_out(toy, x, {})
    changed = written_out(
        toy,
        x,
        {
            "qkv 0": lambda one: columns(one, K, one[:, K[0] : K[1]] * 0.5),
            "layer 1": lambda one: one + v,
            "stream 1": lambda one: columns(one, (3, 6), 0.25),
        },
    )
    assert torch.equal(again, plain["result"])
    assert torch.equal(got[[0, 3, 4]], plain["result"][[0, 3, 4]])
    assert torch.equal(got[1:3], changed["result"][1:3])
    share = prompt.shares[2]
    read = tables.output[tables.split + share.start : tables.split + share.start + share.size].view(2, HIDDEN)
    assert torch.equal(read, changed["stream 2"][1:3])
    share = later.shares[0]
    read = tables.output[share.start : share.start + share.size].view(LAYERS, HIDDEN)
    assert torch.equal(read, torch.stack([plain[f"stream {i}"][0] for i in range(LAYERS)]))


def test_a_site_that_is_not_hooked_runs_no_taps() -> None:
    toy, taps, tables = make_toy()
    x = torch.randn(1, HIDDEN)
    plain = written_out(toy, x, {})["result"]
    tables.join(0, "a", [Tap(4, Code.ADD, WHOLE, number=1.0)], 1)
    tables.begin_step([(0, 1)], {0: 0}, 1)
    with taps.hooked([0, 2]):
        assert torch.equal(toy(x), plain)
    with taps.hooked([4]):
        assert not torch.equal(toy(x), plain)


def test_hooks_are_gone_after_an_error() -> None:
    toy, taps, _ = make_toy()
    with pytest.raises(ZeroDivisionError), taps.hooked(range(len(taps.sites))):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in toy.modules())


def test_an_input_is_a_site_too_and_the_first_layers_second_tensor_is_none() -> None:
    toy, _, _ = make_toy()
    sites = [Site(f"layers.{i}", "input", ((0, 0), (0, 1)), HIDDEN) for i in range(LAYERS)]
    tables = Tables([HIDDEN] * LAYERS, 2, 8, torch.float32, CPU, LIMITS)
    taps = Taps(dict(toy.named_modules()), sites, tables)
    x = torch.randn(1, HIDDEN)
    tables.join(0, "a", [Tap(0, Code.ADD, WHOLE, number=1.0), Tap(1, Code.READ, WHOLE)], 1)
    later, _ = tables.begin_step([(0, 1)], {0: 0}, 1)
    with taps.hooked(tables.sites):
        got = toy(x.clone())
    expected = written_out(toy, x + 1.0, {})
    assert torch.equal(got, expected["result"])
    assert torch.equal(tables.output[: later.top], expected["stream 0"][0])


def test_tables_of_other_sites_are_refused() -> None:
    toy, taps, tables = make_toy()
    with pytest.raises(ValueError, match="other sites"):
        Taps(dict(toy.named_modules()), taps.sites[1:], tables)
    assert taps.number(taps.sites[4]) == 4
    assert taps.number(Site("layers.9", "output", ((),), 1)) is None
