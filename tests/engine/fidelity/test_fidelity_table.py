"""docs/fidelity.md says what is measured now: every location, architecture and condition, in all layouts or a part of them.

`make fidelity` writes the page; `tests/fidelity/suite.py` says which part is measured here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fidelity.suite import suite
from tests.fidelity.table import column, disagreements, page, parse

SECONDS = 1800


@pytest.mark.timeout(SECONDS + 60)
def test_the_page_says_what_is_measured(tmp_path: Path) -> None:
    result, log = tmp_path / "measured.json", tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fidelity", "--suite", str(result)],
            cwd=page().parents[1],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert process.wait(SECONDS) == 0, log.read_text()[-6000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            process.wait()
    measured = json.loads(result.read_text())
    now = {
        job.layout: {name: column(measured[job.layout.name][name], turns) for name, turns in job.columns.items()}
        for job in suite()
    }
    assert disagreements(parse(page().read_text()), now) == []
