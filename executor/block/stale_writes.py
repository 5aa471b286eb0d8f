"""Stale writes: a value is changed in place after the block has gone on from its location.

The model has used the value by then, and the change would reach nothing. A block that means to work on its own copy says so
with `.clone()`; without that, it fails, so that no edit is silently missing.
"""

from __future__ import annotations

import weakref

import torch

from executor.core.errors import Refusal
from executor.core.torch_modes import unseen
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb

_RECENT = 16
_ROOM = 256


class StaleWrites:
    """The values of locations that a block has left, as far as the block still holds them."""

    def __init__(self) -> None:
        self._given: list[tuple[weakref.ref[torch.Tensor], int, object]] = []
        self._room = _ROOM

    def leave(self, served: Served) -> None:
        """Watch the values of a location from now on."""
        given = self._given
        while given and given[-1][0]() is None:
            given.pop()
        for value in served.given():
            given.append((weakref.ref(value), value._version, served.at))
        self._make_room()

    def watch(self, value: torch.Tensor, refusal: Refusal) -> None:
        """Watch a value of any shape that may not be changed; `refusal` is raised if it is."""
        self._given.append((weakref.ref(value), value._version, refusal))
        self._make_room()

    def _make_room(self) -> None:
        if len(self._given) > self._room:
            self._given = [entry for entry in self._given if entry[0]() is not None]
            self._room = max(_ROOM, 2 * len(self._given))

    def check_recent(self) -> None:
        """Refuse a change to one of the latest values, close to the line that made the change.

        This is called where the block waits next.
        """
        self._check(self._given[-_RECENT:])

    def check_all(self) -> None:
        """Refuse a change to any of them.

        Raises:
            Refusal: INVALID_ARGUMENT, with the location.
        """
        self._check(self._given)

    @staticmethod
    def _check(given: list[tuple[weakref.ref[torch.Tensor], int, object]]) -> None:  # any shape
        if not given:
            return
        changed: object = None
        with unseen():
            for reference, version, where in given:
                value = reference()
                if value is not None and value._version != version:
                    changed = where
                    break
        if isinstance(changed, Refusal):
            raise changed
        if changed is not None:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"the value of {changed} was changed in place after the block had gone on from there, when the model had "
                "used it already, so the change cannot be applied; change it before asking for the next location, or "
                "work on a copy: value = value.clone()",
                location=str(changed),
            )
