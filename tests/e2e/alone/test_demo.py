"""What README shows first works as it stands: the demo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(600)
def test_the_demo(tmp_path: Path) -> None:
    """`make demo` after its set-up: its own service, a client in another process, a picture, nothing left.

    SmolLM2, which the demo goes on to, needs a package that not every index has; tests/packaging/test_demo.py has the order.
    """
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--directory", str(tmp_path), "--tiny"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stdout + result.stderr
    said = result.stdout
    assert "loading the model" in said, "what the service does while it starts"
    assert "| with model.trace(ids" in said and "block.mlp.act[:] = 0" in said, "the trace"
    assert re.search(r"after the last layer: \(\d+, \d+\) torch\.float32", said) and "it begins: [" in said
    one, other = (
        re.search(rf"^{name}: +'(.+)'$", said, re.MULTILINE) for name in ("continuation", "without the MLP .*")
    )
    assert one is not None and other is not None and one[1] != other[1], "both continuations"
    assert len(re.findall(r": \d+\.\d+ s\]?$", said, re.MULTILINE)) >= 7, "how long each phase took"
    picture = tmp_path / "tiny-llama.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
