"""The value that traced code gets at a location: tensors without elements, and its changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from executor.core.errors import Refusal
from executor.model.items import Opaque, Path
from executor.model.layouts import WHOLE
from executor.model.rows import Rows
from executor.model.values import Leaf, Served
from executor.plan.forms import Form
from executor.plan.record import SERVED, Recorder, storage_of
from executor.views.view import Stream
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class Changed:
    """A tensor that the traced code changed.

    Attributes:
        leaf: its number in the form.
        at: where it is in the location's value.
        tensor: what the model is to go on with.
        mutated: whether the code changed the tensor itself.
    """

    leaf: int
    at: Path
    tensor: torch.Tensor
    mutated: bool


class Traced(Served):
    """One location in traced code.

    Args:
        location: its name.
        number: its place among the locations of the plan.
        form: the form of the value there.
        inputs: a tensor for each of the form.
        recorder: records.

    Attributes:
        rows: of the request.
    """

    def __init__(self, location: str, number: int, form: Form, inputs: list[torch.Tensor], recorder: Recorder) -> None:
        self._recorder = recorder
        self._number = number
        self.rows = form.rows
        super().__init__(location, form.filled(inputs), Rows(0, form.rows, form.rows, form.rows), lambda path: WHOLE)

    def _expose_tensor(self, value: torch.Tensor, path: Path) -> Any:
        known = next((leaf for leaf in self._leaves if leaf.original is value), None)
        if known is not None:
            return known.private
        private = value.clone(memory_format=torch.contiguous_format)
        self._recorder.own(private, SERVED, self._number)
        self._leaves.append(Leaf(value, WHOLE, private, private._version, private, private.shape))
        return private

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._recorder.owner(tensor) == (SERVED, self._number)

    def derive(self, *args: Any) -> torch.Tensor:
        with self._recorder.own_use():
            value = super().derive(*args)
        self._recorder.own(value, SERVED, self._number)
        return value

    def put_back(self) -> None:
        for _, held in self._derived:
            if held.value._version == held.version:
                continue
            if held.stale([one for one, _ in held.sources]):
                raise Refusal(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"the residual stream at {self.location} and the tensors that it is the sum of were both changed",
                    location=self.location,
                )
            with self._recorder.own_use():
                held.put(held.compute(), held.value)
            held.version = held.value._version
            held.sources = [(one, one._version) for one, _ in held.sources]

    @property
    def pending(self) -> list[torch.Tensor]:  # [rows, ...] each
        """The tensors that changed derived values are still to be put into."""
        held = [one for _, one in self._derived if one.value._version != one.version]
        return [source for one in held for source, _ in one.sources]

    @property
    def by_rows(self) -> bool:
        """Whether derived values are put back by rows, and a row without a change keeps its bits."""
        return all(isinstance(key, Stream) for key, _ in self._derived)

    def items(self) -> list[Any]:
        """Return what stands in the value now, at any depth."""
        found: list[Any] = []
        todo = [self.value]
        while todo:
            one = todo.pop()
            found.append(one)
            todo.extend(one.values() if isinstance(one, dict) else one if isinstance(one, tuple | list) else ())
        return found

    def changed(self) -> list[Changed]:
        """Return what the traced code changed here, when it goes on."""
        self.put_back()
        found: list[Changed] = []
        seen: set[int] = set()

        def visit(original: Any, now: Any, path: Path) -> None:
            if isinstance(now, Opaque) or not isinstance(original, torch.Tensor | tuple | list | dict):
                return
            if isinstance(original, dict):
                for key, one in original.items():
                    visit(one, now[key], (*path, key))
            elif isinstance(original, tuple | list):
                for i, (one, other) in enumerate(zip(original, now, strict=True)):
                    visit(one, other, (*path, i))
            else:
                number, leaf = next((i, leaf) for i, leaf in enumerate(self._leaves) if leaf.original is original)
                if now is not leaf.private:
                    placed = now.detach().to(original.device, original.dtype).clone()
                    found.append(Changed(number, path, placed, mutated=False))
                elif storage_of(now) in self._recorder.changed and number not in seen:
                    seen.add(number)
                    if now.shape != leaf.before.shape:
                        raise ValueError(f"its shape became {list(now.shape)}")
                    found.append(Changed(number, path, now, mutated=True))

        visit(self._original, self.value, ())
        return found

    def settle(self, current: Any) -> NoReturn:
        raise RuntimeError("a traced location has no model to write to")
