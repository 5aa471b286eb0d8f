"""Workers, which import nothing of the actors, find them by the same names."""

from __future__ import annotations

from actors import naming
from executor.saves import outbox


def test_workers_know_the_names() -> None:
    assert (outbox.NAMESPACE, outbox.DIRECTORY) == (naming.NAMESPACE, naming.DIRECTORY)
