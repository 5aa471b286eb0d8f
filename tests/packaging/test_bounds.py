"""The lower bounds of pyproject.toml allow nothing that the generated code is newer than; `make test-lowest` tries them."""

from __future__ import annotations

import re
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.version import Version

from tests.lowest.environments import requirements
from tests.wheel import ROOT

GENERATED = sorted((ROOT / "interpose" / "v1").glob("*_pb2*.py"))


def lower_bound(requirement: str) -> Version:
    """The lowest version that a requirement allows."""
    (bound,) = Requirement(requirement).specifier
    assert bound.operator in (">=", "=="), requirement
    return Version(bound.version)


def bounds() -> dict[str, Version]:
    """The lowest version of each direct dependency of the client and the server, by its name."""
    return {Requirement(line).name: lower_bound(line) for line in requirements("serve")}


def test_protobuf_is_no_older_than_what_generated_the_messages() -> None:
    generators = [
        Version(version)
        for path in GENERATED
        for version in re.findall(r"^# Protobuf Python Version: (\S+)$", path.read_text(), re.MULTILINE)
    ]
    assert len(generators) == len([path for path in GENERATED if path.stem.endswith("_pb2")])
    assert max(generators) <= bounds()["protobuf"]


def test_grpcio_is_no_older_than_what_generated_the_methods() -> None:
    (generator,) = re.findall(
        r'^generator="grpcio-tools==(\S+)"$', (ROOT / "tools/protos.sh").read_text(), re.MULTILINE
    )
    # Generators since 1.63 write down which version the code asks for.
    asked = [
        Version(version)
        for path in GENERATED
        for version in re.findall(r"^GRPC_GENERATED_VERSION = '(\S+)'$", path.read_text(), re.MULTILINE)
    ]
    assert max([Version(generator), *asked]) <= bounds()["grpcio"]


def test_every_dependency_has_a_lower_bound() -> None:
    assert len(bounds()) == len(requirements("serve")) > 10


def test_the_ingress_does_without_what_older_health_packages_lack() -> None:
    program = """
from grpc_health.v1 import health_pb2
if hasattr(health_pb2, "HealthListRequest"):
    del health_pb2.HealthListRequest, health_pb2.HealthListResponse
from serve_app.ingress.deployment import IngressDeployment
assert not hasattr(IngressDeployment, "List") and hasattr(IngressDeployment, "Check")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
