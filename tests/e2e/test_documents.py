"""What README and docs/blocks.md show works as it stands: every block of Python, one after the other."""

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


GUIDES = (
    "index.md",
    "from-nnsight.md",
    "from-transformer-lens.md",
    "from-interp-engine.md",
    "openai.md",
    "experiments.md",
)
TUTORIALS = sorted(f"tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", [*GUIDES, *TUTORIALS])
def test_the_blocks_of_a_guide(service: RunningService, tmp_path: Path, page: str) -> None:
    """Blocks marked "py" are the other tool's; ours run, and give no warning."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert len(blocks) >= (1 if page in ("index.md", "experiments.md") else 2)
    text = "\n".join([*blocks, "model.clear_edits()", "client.close()\n"])
    script = tmp_path / "guide.py"
    text = text.replace("localhost:9000", service.address).replace("http://localhost:8000/v1", service.http)
    script.write_text(text.replace("smollm2", "llama"))
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
