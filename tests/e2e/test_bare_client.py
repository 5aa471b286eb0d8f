"""A notebook with another Python than the service, and without torch: what is published, and what it requires, is enough."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import interpose
from tests.bare_notebook import check_notebook
from tests.e2e.service import RunningService
from tests.interpreters import installed
from tests.wheel import bare_environment, build_wheel


@pytest.mark.timeout(300)
def test_a_client_of_another_python_reads_and_writes(
    service: RunningService, model: interpose.Model, tmp_path: Path
) -> None:
    version = next(one for one in ("3.13", "3.12", "3.10", "3.11") if one in installed())
    assert sys.version_info[:2] != tuple(map(int, version.split("."))) or len(installed()) == 1
    python = bare_environment(version, build_wheel(tmp_path / "wheel"), tmp_path)
    check_notebook(python, version, model, service.address, tmp_path)
