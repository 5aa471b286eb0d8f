"""docs/kubernetes.md against what kubectl makes of it and of the manifests."""

from __future__ import annotations

import base64
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serve_app.environment import CALLBACK_VARIABLE, CHEAP_CALLS, proxy_environment
from serve_app.settings import GrpcSettings, settings_from
from serve_app.tenants.book import book_of
from tools.k8s import render
from tools.k8s.agreement import pod_templates
from tools.k8s.builtin import BuiltinKinds
from tools.k8s.crds import CustomResources
from tools.k8s.validate import problems

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
OVERLAY = yaml.safe_load((ROOT / "k8s" / "overlays" / "cpu-dev" / "serve.yaml").read_text())

# Stands for the command of this repository, and for kubectl: makes objects where that needs no cluster, renders what would be
# applied, and says the rest.
KUBECTL = (
    rf"""
interpose() {{ {sys.executable} -m interpose.cli "$@"; }}
"""
    + r"""
kubectl() {
    case "$*" in
        *"create secret"*) command kubectl "$@" --dry-run=client -o yaml; echo "---" ;;
        "apply -k "*) command kubectl kustomize "$3" > /dev/null ;;
        "apply -f "*) command kubectl kustomize "$(dirname "$3")" > /dev/null ;;
        *"logs --follow job/interpose-smoke") ;;
        *) echo "not expected: kubectl $*" >&2; return 1 ;;
    esac
}
"""
)


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def referenced(node: Any) -> Iterator[tuple[str, str]]:
    """Every Secret, and key in it, that an object refers to."""
    if isinstance(node, dict):
        if "secretKeyRef" in node:
            yield node["secretKeyRef"]["name"], node["secretKeyRef"]["key"]
        if "secretName" in node:
            for item in node.get("items", [{"key": "auth_token"}]):  # the key that KubeRay looks for
                yield node["secretName"], item["key"]
        for value in node.values():
            yield from referenced(value)
    elif isinstance(node, list):
        for value in node:
            yield from referenced(value)


def test_the_documents_commands_make_what_the_manifests_need(tmp_path: Path) -> None:
    script = "set -eu\n" + KUBECTL + blocks()[0]
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    made = {
        (secret["metadata"]["namespace"], secret["metadata"]["name"], key): base64.b64decode(value).decode()
        for secret in yaml.safe_load_all(result.stdout)
        if secret
        for key, value in secret["data"].items()
    }
    needed = {("interpose", *one) for folder in render.deployable() for one in referenced(render.render(folder))}
    assert needed == set(made)
    file = tmp_path / "tenants.yaml"
    file.write_text(made["interpose", "interpose-tenants", "tenants.yaml"])
    book = book_of((), str(file))
    smoke = book.table.find(made["interpose", "interpose-smoke", "api-key"])
    assert smoke is not None and smoke.tenant.name == "smoke" and not smoke.tenant.operator
    key = re.search(r"^your key: (\S+)$", result.stderr, re.MULTILINE)
    me = book.table.find(key.group(1)) if key else None
    assert me is not None and me.tenant.operator
    assert len(made["interpose", "interpose-ray-token", "auth_token"]) == 64


def test_the_documents_patch_changes_the_cluster_and_nothing_breaks(tmp_path: Path) -> None:
    (line,) = blocks()[1].splitlines()
    command = shlex.split(line)
    assert command[:6] == ["kubectl", "-n", "interpose", "patch", "rayservice", "interpose"]
    documents = render.render(render.FOLDER / "overlays" / "gpu")
    (service,) = [d for d in documents if d["kind"] == "RayService"]
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    local = ["kubectl", "patch", "--local", "-f", str(file), *command[6:], "-o", "yaml"]
    result = subprocess.run(local, capture_output=True, text=True, check=True)
    patched = yaml.safe_load(result.stdout)
    assert patched["spec"]["rayClusterConfig"]["headGroupSpec"] != service["spec"]["rayClusterConfig"]["headGroupSpec"]
    others = [d for d in documents if d is not service]
    assert problems([patched, *others], CustomResources(Path(__file__).parent), BuiltinKinds()) == []


def test_the_pods_have_the_proxies_environment() -> None:
    """What `interpose serve` sets for proxies that it starts, KubeRay's pods bring along; but they listen to others too."""
    (application,) = yaml.safe_load(OVERLAY["spec"]["serveConfigV2"])["applications"]
    limits = proxy_environment(settings_from(application["args"]))
    (service,) = [d for d in render.render(render.FOLDER / "overlays" / "cpu-dev") if d["kind"] == "RayService"]
    limit_names = ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", CALLBACK_VARIABLE)
    for _, template in pod_templates(service):
        given = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
        for name in (*limit_names, *CHEAP_CALLS):
            assert given[name] == limits[name]
        # The proxies take these as settings: a wrong name would be ignored there.
        ours = {name: value for name, value in given.items() if name.startswith("INTERPOSE_GRPC__")}
        assert "INTERPOSE_GRPC__HOST" in ours
        GrpcSettings.model_validate({name.removeprefix("INTERPOSE_GRPC__").lower(): ours[name] for name in ours})


def test_the_secret_of_tenants_reaches_the_head_alone() -> None:
    """The head builds the application, or reads the file for what builds it, and runs no block."""
    for overlay in ("cpu-dev", "gpu", "gvisor"):
        (service,) = [d for d in render.render(render.FOLDER / "overlays" / overlay) if d["kind"] == "RayService"]
        templates = [template for _, template in pod_templates(service)]
        with_secret = [("interpose-tenants", "tenants.yaml") in set(referenced(one)) for one in templates]
        assert with_secret == [True] + [False] * (len(templates) - 1)
        assert service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        files = {
            one["value"] for template in templates for one in template["spec"]["containers"][0]["env"]
            if one["name"] == "INTERPOSE_TENANTS_FILE"
        }  # fmt: skip
        (mount,) = [one for one in templates[0]["spec"]["containers"][0]["volumeMounts"] if one["name"] == "tenants"]
        assert files == {f"{mount['mountPath']}/tenants.yaml"} and mount["readOnly"]
