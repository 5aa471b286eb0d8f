"""What the traces of a session left in the notebook: names and containers whose tensors come when its block ends."""

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
    """What a session's block left on the server, at its end: containers, and names that still hold what was assigned."""

    containers: list[object]
    names: list[tuple[capture.Scope, str, object]]

    def fetch(self) -> list[object]:
        """Fetch what is in the containers; return what the names are to hold."""
        fetching = Fetching()
        for container in self.containers:
            fetching.value(container)
        return [fetching.value(value) for _, _, value in self.names]

    def assign(self, tensors: list[object]) -> None:
        """Give the names what was fetched for them; called where the block stands."""
        for (scope, name, value), tensor in zip(self.names, tensors, strict=True):
            if tensor is not value:
                scope.assign({name: tensor})


class SessionNames:
    """The names and containers that a session's traces assigned and changed.

    Attributes:
        variables: what its traces share.
    """

    def __init__(self) -> None:
        self.variables = SessionVariables()
        self._names: list[tuple[capture.Scope, str, object]] = []
        self._containers: list[object] = []

    def assigned(self, scope: capture.Scope, names: Mapping[str, object]) -> None:
        """Note that a trace assigned names, to be given their tensors at the end."""
        self._names.extend((scope, name, value) for name, value in names.items())

    def changed(self, container: object) -> None:
        """Note that a trace changed a list or dict of the caller's."""
        self._containers.append(container)

    def take(self) -> Gathered:
        """Return what was noted, without names that hold something else now, and begin anew."""
        self.variables = SessionVariables()
        names, self._names = self._names, []
        containers, self._containers = self._containers, []
        return Gathered(containers, [one for one in names if _still_holds(*one)])


def still_there(scope: capture.Scope) -> bool:
    """Whether names can be assigned in a scope so that somebody sees them.

    They can in a module or a notebook, and in a function that calls this one, however far up.
    """
    if scope.frame.f_locals is scope.globals:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scope.frame:
        frame = frame.f_back
    return frame is not None


def _still_holds(scope: capture.Scope, name: str, value: object) -> bool:
    """Whether a name is there and holds what a trace assigned to it."""
    try:
        return still_there(scope) and scope.lookup(name) is value
    except KeyError:
        return False
