"""Gives a block what its loop read in the tables, as if the block had run the steps itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from executor.graphs.table_loop import Left, Phase, values_of
from executor.plan.deliver import Delivery
from executor.plan.ir import Append, Plan
from executor.plan.run import Member, leave
from executor.saves.rows import Rows, can_be_sent, cut


def land(left: Left, member: Member, on: torch.device | None, unseen: bool = False) -> None:
    """Give a block's lists, dicts and names what its loop left.

    Args:
        left: what the loop left.
        member: the block.
        on: the device of the values; None: the block does not use them before it ends, and they stay on the host.
        unseen: whether then no code at all looks at its lists before they are encoded, and their tensors may be `Rows`.
    """
    for phase in left.loop.phases:
        if left.ran_in(phase):
            _land(left, phase, member, on, unseen)


def _land(left: Left, phase: Phase, member: Member, on: torch.device | None, unseen: bool) -> None:
    """Give a block what the steps of one phase left; as of `land`."""
    plan, first, ran = phase.steps.plan, phase.steps.first, left.ran_in(phase)
    with torch.inference_mode(False), torch.no_grad():
        values = values_of(left, replace(phase, lowered=phase.lowered.going_on(plan, member.environment.carried)), on)
        several = _appended_at_once(plan, on)
        for container, appends in several.items():
            _extend(member.environment.written[container], appends, values, ran, member, unseen)
        rest = [append for append in plan.appends if append.container not in several]
        for i in range(ran) if rest else range(ran - 1, ran):
            give = Delivery(_in_step(values, i), first + i, member.mark)
            for append in rest:
                give.add(append, member.environment)
        leave(plan, member, give)


def rows_of(left: Left, phase: Phase) -> dict[int, list[Rows]] | None:
    """Return what the steps of one phase add to lists, of a plan that adds tensors alone.

    Args:
        left: what the loop left.
        phase: of the loop; it ran at least one step.

    Returns:
        By the index of the list among the containers; None if a message cannot have the items of a list as rows.
    """
    found: dict[int, list[Rows]] = {}
    with torch.inference_mode(False), torch.no_grad():
        values: Mapping[int, torch.Tensor] | None = None
        for container, appends in _appended_at_once(phase.steps.plan, None).items():
            rows = _as_read(left, phase, appends)
            if rows is None:
                values = values_of(left, phase, None) if values is None else values
                rows = _in_rows(appends, values)
            if rows is None or not can_be_sent(rows):
                return None
            found[container] = list(cut(rows))
    return found


def _as_read(left: Left, phase: Phase, appends: Sequence[Append]) -> torch.Tensor | None:
    """Return the items of a list, [steps * appends, ...], if taps read them side by side."""
    reads = [phase.lowered.reads.get(output) for output in map(_output_of, appends)]
    first = reads[0]
    if first is None or any(one is None or one[1] != first[1] for one in reads):
        return None
    read = left.read.of_prompt if phase.steps.plan.rows > 1 else left.read.of_later_steps
    ran = left.ran_in(phase)
    values = read.columns([phase.numbers[one[0]] for one in reads if one is not None], ran)
    if values is None or len(values) != ran:
        return None
    return values.reshape(ran * len(reads), *first[1]).contiguous()


def _in_step(values: Mapping[int, torch.Tensor], i: int) -> Any:
    """Return what gives an output, [...], in step `i`; `values` are [steps, ...] each."""
    # A copy, because the block may change what it got of one step and keep what it got of another.
    return lambda output: values[output][i].clone()


def _appended_at_once(plan: Plan, on: torch.device | None) -> dict[int, list[Append]]:
    """Return the lists that get tensors only, and that the block does not use before it ends."""
    found: dict[int, list[Append]] = {}
    if on is not None:
        return found
    for append in plan.appends:
        found.setdefault(append.container, []).append(append)
    return {number: appends for number, appends in found.items() if all(map(_is_tensor, appends))}


def _is_tensor(append: Append) -> bool:
    return append.key is None and append.when < 0 and append.item.kind == "tensor"


def _extend(
    container: list[Any],
    appends: Sequence[Append],
    values: Mapping[int, torch.Tensor],
    steps: int,
    member: Member,
    unseen: bool,
) -> None:
    """Add the tensors of all steps to a list.

    They are views of one tensor where their shapes are equal.

    Args:
        container: the list.
        appends: where the block adds to it, in the order of a step.
        values: the outputs of the plan, [steps, ...] each.
        steps: how many.
        member: the block.
        unseen: as of `land`.
    """
    base = _in_rows(appends, values)
    if base is not None:
        if unseen and can_be_sent(base):
            items = list(cut(base))
            container.extend(items)
            if any(append.item.saved for append in appends):
                member.mark_all(items)
            return
        tensors: list[torch.Tensor] = list(base.unbind(0))
    else:
        given = _given(appends, values)
        tensors = [one[i] for i in range(steps) for one in given]
    container.extend(tensors)
    for k, append in enumerate(appends):
        if append.item.saved:
            member.mark_all(tensors[k :: len(appends)])


def _given(appends: Sequence[Append], values: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return what a list gets, [steps, ...] for each append, as it was when it was saved."""
    return [values[output] for output in map(_output_of, appends)]


def _output_of(append: Append) -> int:
    return append.item.snapshot if append.item.snapshot >= 0 else append.item.output


def _in_rows(appends: Sequence[Append], values: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Return the items of a list, [steps * appends, ...], contiguous; None: their shapes differ."""
    given = _given(appends, values)
    if len(given) == 1:
        return given[0].contiguous()
    if len({(one.shape, one.dtype) for one in given}) != 1:
        return None
    base = _side_by_side(given)
    return (torch.stack(given, 1).flatten(0, 1) if base is None else base).contiguous()


def _side_by_side(given: Sequence[torch.Tensor]) -> torch.Tensor | None:  # [steps, ...] each
    """Return the values of several outputs step by step, [steps * outputs, ...], without a copy.

    It is None if they lie in another way.
    """
    first, count = given[0], len(given)
    each = first[0]
    size, memory = each.numel(), first.untyped_storage().data_ptr()
    if first.stride(0) != count * size or not each.is_contiguous():
        return None
    for k, one in enumerate(given):
        apart = one.data_ptr() != first.data_ptr() + k * size * first.itemsize
        if apart or one.stride() != first.stride() or one.untyped_storage().data_ptr() != memory:
            return None
    return first.as_strided((len(first) * count, *each.shape), (size, *each.stride()))
