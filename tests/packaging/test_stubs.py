"""The checked-in stubs are what the protos say, and every protobuf a notebook may have runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
from interpose.v1 import service_pb2, service_pb2_grpc
request = service_pb2.SubmitRequest(protocol=1)
request.trace.shared.add(name="x").value.integer = -3
assert service_pb2.SubmitRequest.FromString(request.SerializeToString()) == request
import google.protobuf
print(google.protobuf.__version__)
"""


def generated(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (directory / "interpose" / "v1").glob("*_pb2*.py*")}


def test_they_are_fresh(tmp_path: Path) -> None:
    subprocess.run([ROOT / "tools" / "protos.sh", tmp_path], check=True, capture_output=True)
    fresh, checked_in = generated(tmp_path), generated(ROOT)
    assert fresh.keys() == checked_in.keys()
    stale = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not stale, f"run `make protos`: {stale} differ"


@pytest.mark.parametrize("major", ["4.25", "5", "6", "7"])
def test_they_run_on_protobuf(major: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", tmp_path]
    subprocess.run([*pip, f"protobuf=={major}.*"], check=True, capture_output=True)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{USE}"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{major}.")
