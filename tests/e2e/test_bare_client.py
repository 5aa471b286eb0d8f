"""A notebook with another Python than the service, and without torch: what is published, and what it requires, is enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import interpose
from tests.e2e.service import RunningService
from tests.interpreters import installed
from tests.wheel import bare_environment, build_wheel

NOTEBOOK = """
import sys
import numpy as np
import interpose

class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, h):
        match self.by:
            case float(): return h * self.by

client = interpose.connect(sys.argv[1], progress=False)
model = client.model("llama")
scale, vector = Scale(0.5), np.arange(128, dtype=np.float32)
with model.trace("one two three", max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
    model.model.layers[1].mlp.output[:] = scale(model.model.layers[1].mlp.output)
    model.model.layers[2].output[0][-1] += vector
    hidden = model.model.layers[2].output[0].bfloat16().save()
    logits = model.logits.output.save()
    result = tracer.result.save()
assert "torch" not in sys.modules
try:
    with model.trace("one two three"):
        scale.by / 0
except interpose.InterventionError as error:
    print(error.frames[0].text.strip())
np.savez(sys.argv[2], hidden=hidden.astype(np.float32), logits=logits, tokens=result.token_ids)
print(sys.version_info[:2], hidden.dtype, type(logits).__name__)
client.close()
"""


@pytest.mark.timeout(300)
def test_a_client_of_another_python_reads_and_writes(
    service: RunningService, model: interpose.Model, tmp_path: Path
) -> None:
    version = next(one for one in ("3.13", "3.12", "3.10", "3.11") if one in installed())
    python = bare_environment(version, build_wheel(tmp_path / "wheel"), tmp_path)
    script, found = tmp_path / "notebook.py", tmp_path / "found.npz"
    script.write_text(NOTEBOOK)
    command = [python, "-I", script, service.address, found]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"scale.by / 0\n({version.replace('.', ', ')}) bfloat16 ndarray\n"

    vector = np.arange(128, dtype=np.float32)
    with model.trace("one two three", max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
        model.model.layers[1].mlp.output[:] *= 0.5
        model.model.layers[2].output[0][-1] += vector
        hidden = model.model.layers[2].output[0].bfloat16().float().save()
        logits = model.logits.output.save()
    assert sys.version_info[:2] != tuple(map(int, version.split("."))) or len(installed()) == 1
    theirs = np.load(found)
    np.testing.assert_array_equal(theirs["hidden"], hidden.numpy())
    np.testing.assert_allclose(theirs["logits"], logits.numpy(), atol=1e-5)
    assert theirs["tokens"].tolist() == tracer.result.token_ids
