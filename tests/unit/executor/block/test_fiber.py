"""What a block's fiber needs of the process that it runs in."""

from __future__ import annotations

import subprocess
import sys

_MADE_BY_TRANSFORMERS = """
import sys
import torch
if sys.argv[1] == "ours":
    import executor.block.fiber
from transformers.initialization import meta_device_safe_creation_ops
with torch.device("meta"), meta_device_safe_creation_ops():
    torch.empty(3)
with torch.device("meta"):
    print(torch.linspace(0, 1, 3).device)
"""


def test_a_default_device_holds_for_every_function_where_transformers_has_made_a_model() -> None:
    """Without a fiber's own look before that, torch would take transformers' linspace for its own in such a process."""

    def device(whose: str) -> str:
        command = [sys.executable, "-c", _MADE_BY_TRANSFORMERS, whose]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]

    assert device("nobody's") == "cpu", "transformers or torch has changed: is the look still needed?"
    assert device("ours") == "meta"
