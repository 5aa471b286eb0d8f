"""A notebook that has the published client and nothing else, compared with a client of the running environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

import interpose

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


def check_notebook(python: Path, version: str, model: interpose.Model, address: str, folder: Path) -> None:
    """Run the notebook, and the same trace here; fail if their values differ.

    Args:
        python: the interpreter of the notebook's environment.
        version: which version of Python it is, like "3.10".
        model: the service's model `llama`.
        address: of the service.
        folder: for the notebook and what it finds.
    """
    script, found = folder / "notebook.py", folder / "found.npz"
    script.write_text(NOTEBOOK)
    command = [python, "-I", script, address, found]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"scale.by / 0\n({version.replace('.', ', ')}) bfloat16 ndarray\n"

    vector = np.arange(128, dtype=np.float32)
    with model.trace("one two three", max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
        model.model.layers[1].mlp.output[:] *= 0.5
        model.model.layers[2].output[0][-1] += vector
        hidden = model.model.layers[2].output[0].bfloat16().float().save()
        logits = model.logits.output.save()
    theirs = np.load(found)
    np.testing.assert_array_equal(theirs["hidden"], hidden.numpy())
    np.testing.assert_allclose(theirs["logits"], logits.numpy(), atol=1e-5)
    assert theirs["tokens"].tolist() == tracer.result.token_ids
