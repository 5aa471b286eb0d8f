"""What a block does besides its loop is read off its text, and any other text is refused."""

from __future__ import annotations

import pytest

from executor.core.programs import Unit
from executor.plan.outline import lists_of

LOOP = "for step in tracer.iter[:]:\n    kept.append(model.layers[0].output.save())\n"


def unit(text: str, indent: int = 0) -> Unit:
    return Unit("block", text, "<cell>", 1, indent, tracers=("tracer",))


@pytest.mark.parametrize(
    "text, lists",
    [
        (f"kept = []\n{LOOP}", {"kept": False}),
        (f"kept = list()\n{LOOP}", {"kept": False}),
        (f"kept = [].save()\n{LOOP}", {"kept": True}),
        (f"kept = list().save()\nother = []\n{LOOP}", {"kept": True, "other": False}),
        (f"kept = []\n{LOOP}kept.save()\n", {"kept": True}),
        (f"kept = []\nkept.save()\n{LOOP}", {"kept": True}),
        (f"'Keeps a layer.'\nimport torch.nn.functional as F\nscale = -0.5\nkept = []\n{LOOP}pass\n", {"kept": False}),
        ("for step in tracer.iter[:]:\n    model.layers[0].output[:] += vector\n", {}),
        (f"kept = []\n{LOOP}".replace("for step in tracer.iter[:]", "with tracer.iter[:] as step"), {"kept": False}),
    ],
)
def test_lists_before_the_only_loop(text: str, lists: dict[str, bool]) -> None:
    assert lists_of(unit(text)) == lists


@pytest.mark.parametrize(
    "text",
    [
        "kept = []\n",
        f"kept = []\n{LOOP}{LOOP}",
        f"kept = [1]\n{LOOP}",
        f"kept = other = []\n{LOOP}",
        f"kept = []\nkept = []\n{LOOP}",
        f"kept = []\nprint(1)\n{LOOP}",
        f"kept = []\n{LOOP}print(len(kept))\n",
        f"kept = []\n{LOOP}total = sum(kept)\n",
        f"kept = []\n{LOOP}other.save()\n",
        f"kept = []\n{LOOP}kept.append(1)\n",
        f"import os\nkept = []\n{LOOP}",
        f"from os import system as list\nkept = []\n{LOOP}",
        f"from . import torch\nkept = []\n{LOOP}",
        f"kept = []\nwhole = tracer.result\n{LOOP}",
        f"kept = []\n{LOOP}    kept = []\n",
        f"kept = []\n{LOOP}else:\n    print(1)\n",
        f"kept = []\nif True:\n    {LOOP}",
        f"kept = sorted([])\n{LOOP}",
        f"kept = list(range(3))\n{LOOP}",
        f"number = (3).save()\n{LOOP}",
        f"kept: list = []\nkept[:] = [1]\n{LOOP}",
        "for kept in tracer.iter[:]:\n    pass\n" + "kept = []\n",
        "kept = []\nfor kept in tracer.iter[:]:\n    pass\n",
        "kept = [\n",
    ],
)
def test_a_block_that_does_more_is_refused(text: str) -> None:
    assert lists_of(unit(text)) is None
