"""Two engines of one model, whose answers to the same requests are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor.plan import cache
from tests.engine.harness import LocalEngine


@contextmanager
def in_two_ways(
    checkpoint: Path, one: dict[str, Any], other: dict[str, Any], at_once: bool = True, **options: Any
) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """Return a context with two engines, which nothing may stay in.

    Args:
        checkpoint: of both.
        one, other: the options of each.
        at_once: whether a loop goes into the tables in the step of the first prompt with its length, not of the second.
        options: of both.
    """
    with pytest.MonkeyPatch.context() as patch:
        if at_once:
            patch.setattr(cache, "SIGHTINGS", 1)
        made = [LocalEngine(checkpoint, dtype="float32", **options, **own) for own in (one, other)]
        yield made[0], made[1]
        for engine in made:
            assert engine.interleaver.idle, "a trace left something behind"
            engine.close()
