"""What README and docs/blocks.md show works as it stands: the demo, and every block of Python, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import RunningService

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocks_of_the_readme(service: RunningService, tmp_path: Path) -> None:
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/blocks.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    assert len(blocks) >= 7 and "localhost:9000" in blocks[0] and "smollm2" in blocks[0]
    script = tmp_path / "readme.py"
    text = "\n".join([*blocks, "job.forget()", "model.clear_edits()", "client.close()\n"])  # leave nothing behind
    script.write_text(text.replace("localhost:9000", service.address).replace("smollm2", "llama"))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "LlamaForCausalLM" in result.stdout
    assert re.search(
        r"torch\.Size\(\[\d+, 128\]\) torch\.Size\(\[1, \d+\]\) tensor\(\d+\)$", result.stdout, re.MULTILINE
    )


GUIDES = ("from-nnsight.md", "from-transformer-lens.md", "openai.md", "experiments.md")
TUTORIALS = sorted(f"tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", [*GUIDES, *TUTORIALS])
def test_the_blocks_of_a_guide(service: RunningService, tmp_path: Path, page: str) -> None:
    """Blocks marked "py" are the other tool's; ours run, and give no warning."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert len(blocks) >= (1 if page == "experiments.md" else 2)
    text = "\n".join([*blocks, "model.clear_edits()", "client.close()\n"])
    script = tmp_path / "guide.py"
    text = text.replace("localhost:9000", service.address).replace("http://localhost:8000/v1", service.http)
    script.write_text(text.replace("smollm2", "llama"))
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr


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
