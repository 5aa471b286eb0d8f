"""The wheel holds the client alone, and works in a bare environment of every supported Python."""

from __future__ import annotations

import email
import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.interpreters import installed
from tests.wheel import ROOT, bare_environment, build_wheel

ROUND_TRIP = """
import sys
import numpy as np, ml_dtypes
import interpose
from interpose.v1 import value_pb2
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder

value = {"h": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16), "n": [1, 2.5, "x", None]}
encoder = Encoder(inline_bytes=1 << 20, put_blob=lambda data: "unused")
sent = encoder.encode(value).SerializeToString()
objects = value_pb2.Objects.FromString(encoder.objects.SerializeToString())
back = Decoder(objects, get_blob=lambda blob: b"").decode(value_pb2.Value.FromString(sent))
assert back["n"] == value["n"], back
for name in "hb":
    assert back[name].dtype == value[name].dtype and (back[name] == value[name]).all(), name
heavy = {"torch", "ray", "vllm", "grpc_tools"} & set(sys.modules)
assert not heavy, heavy
assert callable(interpose.connect)
print(interpose.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_holds_the_client_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"interpose", "interpose-0.1.0.dist-info"}
    assert "interpose/py.typed" in names
    assert {"interpose/v1/service_pb2.py", "interpose/v1/service_pb2.pyi", "interpose/v1/service_pb2_grpc.py"} <= set(
        names
    )
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    in_tree = {str(path.relative_to(ROOT)) for path in ROOT.glob("interpose/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == in_tree


def test_its_requirements_are_light(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read("interpose-0.1.0.dist-info/METADATA"))
        entry_points = archive.read("interpose-0.1.0.dist-info/entry_points.txt").decode()
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {line.split(">")[0] for line in required}
    assert names == {"cloudpickle", "grpcio", "ml-dtypes", "numpy", "protobuf"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "interpose = interpose.cli:main" in entry_points


@pytest.mark.parametrize("version", installed())
def test_it_works_in_a_bare_environment(wheel: Path, version: str, tmp_path: Path) -> None:
    python = bare_environment(version, wheel, tmp_path)
    command = [python, "-I", "-c", ROUND_TRIP]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
    said = subprocess.run(
        [python.with_name("interpose"), "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said == "interpose 0.1.0\n"
    # What a client needs is there; a server has none of its parts.
    for flags, status in ((["--json"], 0), (["--server", "--json"], 1)):
        command = [python.with_name("interpose"), "doctor", *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert "actors" in found["server"]["found"] and "no vLLM" in found["engine"]["found"]
    assert "vllm==0.32.0" in found["engine"]["remedy"] and found["ray"]["status"] == "missing"


def test_the_notebook_extra_brings_what_a_notebook_shows_with(wheel: Path, tmp_path: Path) -> None:
    python = bare_environment(max(installed(), key=_number), wheel, tmp_path, extras="[notebook]")
    program = "import interpose, ipywidgets, matplotlib, tokenizers, tqdm.notebook; interpose.connect; print('fine')"
    command = [python, "-I", "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("fine\n", "")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_a_package_index_can_take_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read("interpose-0.1.0.dist-info/METADATA"))
    assert metadata["Summary"] and metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Requires-Python"] == ">=3.10" and metadata["License-File"] == "LICENSE"
    assert {"notebook", "cpu", "gpu"} <= set(metadata.get_all("Provides-Extra", []))
    # An index refuses requirements by address, and a page of ours that only we can open helps nobody.
    assert not [line for line in metadata.get_all("Requires-Dist", []) if "@" in line]
    urls = [line.partition(", ")[2] for line in metadata.get_all("Project-URL", [])]
    assert not [url for url in urls if not url.startswith("https://") or re.search(r"localhost|//[^/.]+(/|$|:)", url)]
