"""Names and containers whose tensors are fetched at the end of a session's block."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from interpose import capture
from interpose.program.session_variables import SessionVariables
from interpose.rpc.remote import Fetching


@dataclass(frozen=True)
class Gathered:
    """Containers and names of the notebook that may hold remote values.

    The names still hold the values that a trace assigned.
    """

    containers: list[object]
    names: list[tuple[capture.Scope, str, object]]

    def fetch(self) -> list[object]:
        """Fetch the tensors in the containers; return the fetched values of the names."""
        fetching = Fetching()
        for container in self.containers:
            fetching.value(container)
        return [fetching.value(value) for _, _, value in self.names]

    def assign(self, tensors: list[object]) -> None:
        """Assign the fetched values to the names; called in the thread of the block."""
        for (scope, name, value), tensor in zip(self.names, tensors, strict=True):
            if tensor is not value:
                scope.assign({name: tensor})


class SessionNames:
    """The names and containers that a session's traces assigned and changed.

    Attributes:
        variables: the session variables.
    """

    def __init__(self) -> None:
        self.variables = SessionVariables()
        self._names: list[tuple[capture.Scope, str, object]] = []
        self._containers: list[object] = []

    def assigned(self, scope: capture.Scope, names: Mapping[str, object]) -> None:
        """Note that a trace assigned names."""
        self._names.extend((scope, name, value) for name, value in names.items())

    def changed(self, container: object) -> None:
        """Note that a trace changed a list or a dict of the caller."""
        self._containers.append(container)

    def take(self) -> Gathered:
        """Return the noted containers and names, and forget them.

        A name that the notebook assigned again since is left out.
        """
        self.variables = SessionVariables()
        names, self._names = self._names, []
        containers, self._containers = self._containers, []
        return Gathered(containers, [one for one in names if _still_holds(*one)])


def still_there(scope: capture.Scope) -> bool:
    """Whether an assignment in a scope has an effect.

    It has an effect in a module, in a notebook, and in a running function that called this function directly or not.
    """
    if scope.frame.f_locals is scope.globals:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scope.frame:
        frame = frame.f_back
    return frame is not None


def _still_holds(scope: capture.Scope, name: str, value: object) -> bool:
    """Whether a name still holds the value that a trace assigned to it."""
    try:
        return still_there(scope) and scope.lookup(name) is value
    except KeyError:
        return False
