"""The notebook of the documents runs against a service: no error, no warning, no internal name, and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.e2e.service import RunningService
from tools.notebooks import executed, outputs, problems

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "first-experiment.ipynb"


def check(notebook: Any) -> None:
    """Check what the cells of an executed notebook show."""
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(codes) == 12 and all(cell["outputs"] for cell in codes)
    pictures = [output["data"]["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(pictures) == 3 and min(map(len, pictures)) > 10_000
    assert any("<details" in "".join(output.get("data", {}).get("text/html", "")) for output in outputs(notebook)), (
        "the tree of modules folds"
    )


@pytest.mark.timeout(400)
def test_the_notebook_of_the_documents_runs(service: RunningService) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    done = executed(notebook, service.address, {"smollm2": "llama"})
    check(done)
    shown = [problem for problem in problems(done) if service.address not in problem]
    assert shown == []
    assert [cell["source"] for cell in done["cells"]] == [cell["source"] for cell in notebook["cells"]]


def test_the_notebook_of_the_documents_has_its_outputs() -> None:
    """What is on the site: outputs of the small trained model, with nothing of the machine that they were made on."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    check(notebook)
    assert problems(notebook) == []
    assert [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"] == list(range(1, 13))
