"""One thing that `interpose doctor` has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """Whether a thing is as it should be."""

    OK = "ok"
    WARNING = "warning"  # a client or a service runs, but not well or not always
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """One thing, and what was found of it.

    Attributes:
        name: the thing.
        status: whether it is as it should be.
        found: what was found, e.g. a version.
        remedy: how to get what is missing, or "".
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def fields(self) -> dict[str, str]:
        """Return the finding as plain texts."""
        return {"name": self.name, "status": self.status.value, "found": self.found, "remedy": self.remedy}


def judged(name: str, good: bool, found: str, remedy: str, bad: Status = Status.MISSING) -> Finding:
    """Return a finding that is OK if `good`, and else has the remedy and the status `bad`."""
    return Finding(name, Status.OK, found) if good else Finding(name, bad, found, remedy)
