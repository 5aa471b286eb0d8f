"""The distribution `interpose-server` holds the server, asks for its own version of the client, and can be imported."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.wheel import ROOT, bare_environment, build_wheel

PACKAGES = ("actors", "executor", "serve_app")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("server"), ROOT / "server")


def test_it_holds_the_servers_packages_whole(server: Path) -> None:
    names = zipfile.ZipFile(server).namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, "interpose_server-0.1.0.dist-info"}
    in_tree = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == in_tree
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_its_source_distribution_is_complete(server: Path) -> None:
    """The wheel of the other tests was built from it alone."""
    (archive,) = server.parent.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"client.toml", "hatch_build.py", "LICENSE", "README.md", "serve_app/app.py"} <= names
    assert not [name for name in names if name.startswith(("interpose/", "tests/"))]


def test_its_metadata_is_the_clients(client: Path, server: Path) -> None:
    with zipfile.ZipFile(server) as archive:
        own = email.message_from_bytes(archive.read("interpose_server-0.1.0.dist-info/METADATA"))
    with zipfile.ZipFile(client) as archive:
        clients = email.message_from_bytes(archive.read("interpose-0.1.0.dist-info/METADATA"))
    for name in ("Version", "Requires-Python", "License-Expression", "Keywords"):
        assert own[name] == clients[name]
    assert own.get_all("Requires-Dist") == [
        "interpose[serve]==0.1.0",
        "interpose[cpu]==0.1.0; extra == 'cpu'",
        "interpose[gpu]==0.1.0; extra == 'gpu'",
    ]
    assert {*own.get_all("Classifier")} ^ {*clients.get_all("Classifier")} == {
        "Operating System :: OS Independent",
        "Operating System :: POSIX :: Linux",
    }
    for page in (own, clients):  # an index shows it, where links into the repository lead nowhere
        assert page["Description-Content-Type"] == "text/markdown"
        text = str(page.get_payload())
        assert "pip install" in text and not re.search(r"\]\((?!https:)", text)
    assert (ROOT / "server" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_it_is_importable_in_a_bare_environment(client: Path, server: Path, tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = bare_environment(version, server, tmp_path, "--no-deps", client)
    command = [python, "-I", "-c", "import serve_app, executor, actors; print(serve_app.__file__)"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
    # The server is there; what it needs is said.
    done = subprocess.run(
        [python.with_name("interpose"), "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = json.loads(done.stdout)
    found = {one["name"]: one["status"] for one in said["findings"]}
    assert (done.returncode, said["role"]) == (1, "server")
    assert found["server"] == "ok" and found["ray"] == found["engine"] == found["grpcio"] == "missing"


def test_the_application_is_built_from_it(client: Path, server: Path, tmp_path: Path) -> None:
    """With everything that it requires: the libraries of this environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, client, server]
    subprocess.run(command, check=True, capture_output=True)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import executor.engine.engine, serve_app.app, serve_app.service, interpose
places = (executor.engine.engine, serve_app.app, serve_app.service, interpose)
assert all(module.__file__.startswith({str(tmp_path)!r}) for module in places), [module.__file__ for module in places]
print(callable(serve_app.app.build))
"""
    # -I: neither this folder nor PYTHONPATH.
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 and result.stdout == "True\n", result.stderr
