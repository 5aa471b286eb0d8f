"""Adapters over two tensor-parallel ranks on two GPUs, in half precision."""

from __future__ import annotations

from pathlib import Path

from tests.fidelity.half import ratio, too_far
from tests.fidelity.lora import Adapted, over_two_ranks


def test_every_location_is_as_near_as_in_transformers(runner: str, tmp_path: Path) -> None:
    """Of the model without an adapter, and of the merged weights of each, all of them in one batch."""
    halves = over_two_ranks(tmp_path, "--half")
    given = [name for under in halves.values() for name, found in under.items() if not isinstance(found, str)]
    assert {f"{phase}, {name}" for phase in ("prefill", "decode") for name in Adapted.NAMES} == set(given)
    assert too_far(halves) == []
    print(
        f"llama with adapters in bfloat16, two ranks: {len(given)} given, at most {ratio(halves):.2f} times as far off"
    )
