"""`make k8s-validate`: the manifests satisfy it, and each kind of mistake is found, where it is."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.k8s import render
from tools.k8s.builtin import BuiltinKinds
from tools.k8s.crds import CustomResources
from tools.k8s.problems import CannotValidate, Document, Problem
from tools.k8s.validate import problems

ROOT = Path(__file__).parents[2]
CRDS = Path(__file__).parent

Change = Callable[[Document], Any]


@pytest.fixture(scope="module")
def custom() -> CustomResources:
    return CustomResources(CRDS)


@pytest.fixture(scope="module")
def builtin() -> BuiltinKinds:
    return BuiltinKinds()


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Document]]:
    return {folder.name: render.render(folder) for folder in render.deployable()}


@pytest.fixture
def found_after(
    rendered: dict[str, list[Document]], custom: CustomResources, builtin: BuiltinKinds
) -> Callable[[str, str, Change], list[Problem]]:
    """What is found in an overlay after a change to its only object of a kind."""

    def find(overlay: str, kind: str, change: Change) -> list[Problem]:
        documents = copy.deepcopy(rendered[overlay])
        change(next(document for document in documents if document["kind"] == kind))
        return problems(documents, custom, builtin)

    return find


@pytest.mark.parametrize("folder", [path.name for path in render.deployable()])
def test_the_manifests_are_valid(
    folder: str, rendered: dict[str, list[Document]], custom: CustomResources, builtin: BuiltinKinds
) -> None:
    assert problems(rendered[folder], custom, builtin) == []


def test_the_overlays_are_complete(rendered: dict[str, list[Document]]) -> None:
    assert set(rendered) == {"cpu-dev", "gpu", "gvisor", "smoke"}
    for overlay in ("cpu-dev", "gpu", "gvisor"):
        kinds = [document["kind"] for document in rendered[overlay]]
        assert {"Namespace", "RayService", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"} == set(
            kinds
        )
        assert all(d["metadata"].get("namespace", "interpose") == "interpose" for d in rendered[overlay])


def test_models_under_gvisor_have_no_sandbox(rendered: dict[str, list[Document]]) -> None:
    """It has no Landlock: with a sandbox that cannot begin, traces of tenants without trust would be refused."""
    [service] = [document for document in rendered["gvisor"] if document["kind"] == "RayService"]
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert [model["sandbox"] for model in application["args"]["models"]] == ["off"]


def cluster(service: Document) -> Any:
    return service["spec"]["rayClusterConfig"]


def worker(service: Document) -> Any:
    return cluster(service)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]


def labels(service: Document, group: str = "workerGroupSpecs") -> Any:
    """Of the head's pods or the first worker group's."""
    spec = cluster(service)[group]
    return (spec[0] if isinstance(spec, list) else spec)["template"]["metadata"]["labels"]


def rename(mapping: Any, old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def in_serve(old: str, new: str) -> Change:
    """A change of the text in serveConfigV2."""

    def change(service: Document) -> None:
        text = service["spec"]["serveConfigV2"]
        assert old in text
        service["spec"]["serveConfigV2"] = text.replace(old, new)

    return change


def redis(service: Document) -> Any:
    return cluster(service)["gcsFaultToleranceOptions"]


def spread(service: Document) -> Any:
    return cluster(service)["workerGroupSpecs"][0]["template"]["spec"]["topologySpreadConstraints"][0]


COMPONENT = "app.kubernetes.io/component"
GROUP = "RayService/interpose spec.rayClusterConfig.workerGroupSpecs[0]"
CONTAINER = f"{GROUP}.template.spec.containers[0]"
SERVE = "RayService/interpose spec.serveConfigV2"
APPLICATION = f"{SERVE}.applications[0]"


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        # KubeRay's schema
        (lambda s: rename(cluster(s)["workerGroupSpecs"][0], "replicas", "replica"), GROUP, "'replica' was unexpected"),
        (lambda s: cluster(s)["workerGroupSpecs"][0].update(replicas="two"), f"{GROUP}.replicas", "not of type"),
        (lambda s: cluster(s)["authOptions"].update(mode="tokens"), "authOptions.mode", "not one of"),
        (lambda s: cluster(s).pop("headGroupSpec"), "rayClusterConfig", "required"),
        # Kubernetes' schema of the pods in it
        (lambda s: rename(worker(s), "readinessProbe", "readynessProbe"), CONTAINER, "'readynessProbe' was unexpected"),
        (lambda s: worker(s)["ports"][0].update(containerPort="http"), f"{CONTAINER}.ports[0].containerPort", "'http'"),
        # Serve's schema
        (in_serve("proxy_location:", "proxy_locations:"), f"{SERVE}.proxy_locations", "knows no such option"),
        (in_serve("max_replicas_per_node", "max_replica_per_node"), "max_replica_per_node", "knows no such option"),
        (in_serve("num_replicas: 3", "num_replicas: many"), SERVE, "num_replicas"),
        (in_serve("EveryNode", "{"), SERVE, "no YAML"),
        # Names to import
        (in_serve("serve_app.app:build", "serve_app.app:builds"), f"{APPLICATION}.import_path", "cannot be imported"),
        (in_serve("serve_app.app:build", "serve_apps.app:build"), f"{APPLICATION}.import_path", "cannot be imported"),
        (
            in_serve("serve_app.app:build", "serve_app.builder:build"),
            f"{APPLICATION}.import_path",
            "serve_app.app:build",
        ),
        (in_serve("add_health", "add_healthy"), "grpc_servicer_functions[2]", "cannot be imported"),
        # Our settings
        (
            in_serve("tensor_parallel_size", "tensor_paralel_size"),
            f"{APPLICATION}.args.models[0].tensor_paralel",
            "did you mean tensor_parallel_size",
        ),
        (in_serve("engine: {", "engine: {worker_cls: mine, "), f"{APPLICATION}.args.models[0].engine", "worker_cls"),
        (in_serve("name: ingress", "name: ingres"), f"{APPLICATION}.deployments[0].name", "engine-"),
        (
            in_serve("tensor_parallel_size: 2", "autoscaling_config: {max_replica: 2}"),
            f"{APPLICATION}.args",
            "Ray Serve has no max_replica",
        ),
        (
            in_serve("serve_app.app:build", "serve_app.app:build_model"),
            f"{APPLICATION}.route_prefix",
            "is not null",
        ),
        # What has to agree
        (lambda s: worker(s)["ports"][1].update(name="grpc"), f"{CONTAINER}.ports", "'serve-grpc' is None"),
        (in_serve("port: 9000", "port: 9001"), f"{CONTAINER}.ports", "serveConfigV2 says 9001"),
        (lambda s: s["spec"]["serveService"]["spec"]["ports"][1].pop("appProtocol"), "ports[1].appProtocol", "h2c"),
        (lambda s: worker(s)["readinessProbe"]["grpc"].pop("service"), f"{CONTAINER}.readinessProbe", "'proxy'"),
        (lambda s: worker(s).pop("readinessProbe"), f"{CONTAINER}.readinessProbe", "calls that its proxy cannot take"),
        (
            lambda s: cluster(s)["workerGroupSpecs"][0].update(replicas=3),
            f"{APPLICATION}.deployments",
            "num_replicas 4",
        ),
        (in_serve("proxy_location: EveryNode", "proxy_location: HeadOnly"), f"{SERVE}.proxy_location", "never become"),
        (in_serve("tensor_parallel_size: 2", "tensor_parallel_size: 4"), "workerGroupSpecs", "need 4"),
        (lambda s: cluster(s).update(rayVersion="2.59.0"), "rayVersion", "the image has Ray 2.60.0"),
        (lambda s: cluster(s)["authOptions"].update(mode="disabled"), "authOptions", "runs code"),
        (lambda s: s["metadata"].update(name="i" * 48), "metadata.name", "47"),
        (lambda s: cluster(s)["workerGroupSpecs"][0].update(maxReplicas=1), f"{GROUP}.replicas", "maxReplicas, 1:"),
        (lambda s: cluster(s)["workerGroupSpecs"][0].update(minReplicas=3), f"{GROUP}.replicas", "minReplicas, 3,"),
        # The state of the cluster while its head restarts
        (lambda s: cluster(s).pop("gcsFaultToleranceOptions"), "gcsFaultToleranceOptions", "what it holds is lost"),
        (lambda s: redis(s).pop("redisAddress"), "gcsFaultToleranceOptions", "no Redis"),
        (
            lambda s: redis(s).update(redisAddress="redis:6379"),
            "gcsFaultToleranceOptions.redisAddress",
            "interpose-redis",
        ),
        (lambda s: redis(s).update(redisAddress="interpose-redis:6380"), "redisAddress", "none of the Services here"),
        # What is around it
        (
            lambda s: labels(s).update({COMPONENT: "other"}),
            f"{GROUP}.template.metadata.labels",
            "no NetworkPolicy selects",
        ),
        (
            lambda s: labels(s).update({COMPONENT: "other"}),
            f"{GROUP}.template.metadata.labels",
            "no PodDisruptionBudget",
        ),
        (lambda s: labels(s, "headGroupSpec").clear(), "headGroupSpec.template.metadata.labels", "no NetworkPolicy"),
        (
            lambda s: spread(s)["labelSelector"]["matchLabels"].update({COMPONENT: "other"}),
            f"{GROUP}.template.spec.topologySpreadConstraints[0].labelSelector",
            "selects no pod",
        ),
    ],
)
@pytest.mark.parametrize("overlay", ["cpu-dev", "gpu"])
def test_a_mistake_in_the_service(overlay: str, change: Change, where: str, words: str, found_after: Any) -> None:
    found = [str(problem) for problem in found_after(overlay, "RayService", change)]
    assert any(where in problem and words in problem for problem in found), found


def test_gpu_pods_need_a_model_that_says_so(found_after: Any) -> None:
    (found,) = found_after("gpu", "RayService", in_serve("device: gpu", "device: auto"))[:1]
    assert "say `device`" in found.message
    (found,) = found_after("gpu", "RayService", lambda s: worker(s)["resources"]["limits"].pop("nvidia.com/gpu"))
    assert found.message == "the models' workers need 2 GPUs, the pods have 0"


def match(document: Document, label: str, value: str) -> None:
    """Have an object select pods with a label."""
    spec = document["spec"]
    (spec.get("selector") or spec["podSelector"])["matchLabels"][label] = value


def relabel(stateful_set: Document, component: str) -> None:
    """Give the pods of a StatefulSet, and its selector, another label."""
    for labels in (
        stateful_set["spec"]["selector"]["matchLabels"],
        stateful_set["spec"]["template"]["metadata"]["labels"],
    ):
        labels[COMPONENT] = component


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("NetworkPolicy", lambda d: rename(d["spec"], "podSelector", "podSelecter"), "'podSelecter' was unexpected"),
        ("StatefulSet", lambda d: d["spec"].update(replicas="1"), "not of type"),
        ("Service", lambda d: d.update(apiVersion="v2"), "has no v2"),
        ("PodDisruptionBudget", lambda d: rename(d["spec"], "minAvailable", "maxUnavailable"), "whole number"),
        ("PodDisruptionBudget", lambda d: d["spec"].update(minAvailable=2), "spec.minAvailable: is 2; it holds 3 pods"),
        ("PodDisruptionBudget", lambda d: d["spec"].update(minAvailable=4), "spec.minAvailable: is 4; it holds 3 pods"),
        (
            "PodDisruptionBudget",
            lambda d: d["spec"]["selector"]["matchLabels"].pop(COMPONENT),
            "other pods than a RayService's",
        ),
        ("PodDisruptionBudget", lambda d: match(d, COMPONENT, "rays"), "spec.selector: selects no pod"),
        ("NetworkPolicy", lambda d: match(d, COMPONENT, "rays"), "spec.podSelector: selects no pod"),
        ("NetworkPolicy", lambda d: match(d, "tier", "ray"), "spec.podSelector: selects no pod"),
        (
            "NetworkPolicy",
            lambda d: d["spec"]["egress"][1]["to"][0]["podSelector"]["matchLabels"].update({COMPONENT: "cache"}),
            "spec.egress[1].to[0].podSelector: selects no pod",
        ),
        (
            "NetworkPolicy",
            lambda d: d["spec"]["podSelector"].update(
                matchExpressions=[{"key": COMPONENT, "operator": "DoesNotExist"}]
            ),
            "spec.podSelector: selects no pod",
        ),
        ("Service", lambda d: d["spec"]["selector"].update({COMPONENT: "cache"}), "spec.selector: selects no pod"),
        ("StatefulSet", lambda d: relabel(d, "cache"), "no NetworkPolicy selects these pods"),
    ],
)
def test_a_mistake_in_another_object(kind: str, change: Change, words: str, found_after: Any) -> None:
    found = [str(problem) for problem in found_after("gpu", kind, change)]
    assert any(problem.startswith(f"{kind}/interpose") and words in problem for problem in found), found


def test_pods_that_were_added_and_not_everywhere(found_after: Any) -> None:
    """Of what goes together when there are more pods, everything that was forgotten is told at once."""
    change: Change = lambda s: cluster(s)["workerGroupSpecs"][0].update(replicas=3, minReplicas=3, maxReplicas=3)  # noqa: E731
    ingress, budget = found_after("cpu-dev", "RayService", change)
    assert "num_replicas 4" in ingress.message
    assert (
        str(budget) == "PodDisruptionBudget/interpose spec.minAvailable: is 3; it holds 4 pods, the head's among them"
    )


@pytest.mark.parametrize("missing", ["PodDisruptionBudget", "NetworkPolicy", "StatefulSet", "Service"])
def test_an_object_that_is_missing(
    missing: str, rendered: dict[str, list[Document]], custom: CustomResources, builtin: BuiltinKinds
) -> None:
    assert problems([d for d in rendered["gpu"] if d["kind"] != missing], custom, builtin)


def test_a_redis_elsewhere_is_somebody_elses(found_after: Any) -> None:
    change: Change = lambda s: redis(s).update(redisAddress="rediss://redis.example.com:6379")  # noqa: E731
    assert not found_after("gpu", "RayService", change)


def test_a_mistake_in_the_job(found_after: Any) -> None:
    change: Change = lambda job: rename(job["spec"], "backoffLimit", "backOffLimit")  # noqa: E731
    (found,) = found_after("smoke", "Job", change)
    assert "'backOffLimit' was unexpected" in found.message


class TestSchemasOfCrds:
    """What an API server does with a CRD's schema."""

    def check(self, custom: CustomResources, **group: Any) -> list[str]:
        spec = {"headGroupSpec": {"template": {}}, "workerGroupSpecs": [{"groupName": "g", "template": {}, **group}]}
        document = {"apiVersion": "ray.io/v1", "kind": "RayService", "spec": {"rayClusterConfig": spec}}
        assert custom.know(document)
        return [problem.message for problem in custom.problems(document)]

    def test_defaults_make_required_fields(self, custom: CustomResources) -> None:
        assert self.check(custom) == []

    def test_a_null_is_no_value(self, custom: CustomResources) -> None:
        assert self.check(custom, minReplicas=None, rayStartParams=None) == []

    @pytest.mark.parametrize("share", [1, "50%"])
    def test_an_integer_or_a_string(self, custom: CustomResources, share: object) -> None:
        assert self.check(custom, share=share) == []

    def test_neither_of_both(self, custom: CustomResources) -> None:
        assert len(self.check(custom, share=1.5)) == 1

    def test_fields_that_are_preserved(self, custom: CustomResources) -> None:
        assert self.check(custom, template={"spec": {"anything": 1}}) == []

    def test_any_name_where_the_schema_says_so(self, custom: CustomResources) -> None:
        assert self.check(custom, rayStartParams={"anything": "1"}) == []
        assert len(self.check(custom, rayStartParams={"anything": 1})) == 1

    def test_another_kind(self, custom: CustomResources) -> None:
        assert not custom.know({"apiVersion": "ray.io/v1alpha1", "kind": "RayService"})


def test_a_folder_without_crds(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"kind": "ConfigMap"}))
    with pytest.raises(CannotValidate, match="ray-operator/config/crd/bases"):
        CustomResources(tmp_path)


def test_without_kustomize(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotValidate, match="kubectl"):
        render.render(render.FOLDER / "smoke")


def test_a_folder_that_does_not_render(tmp_path: Path) -> None:
    with pytest.raises(CannotValidate, match="does not render"):
        render.render(tmp_path)


def test_without_the_schemas_of_kubernetes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_ARGS", f"--no-index --find-links {tmp_path}")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(CannotValidate, match="kubernetes-validate"):
        BuiltinKinds(tmp_path).problems({"apiVersion": "v1", "kind": "Namespace"})


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.k8s", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_command() -> None:
    result = command("--crds", str(CRDS))
    assert result.returncode == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["cpu-dev", "gpu", "gvisor", "smoke"]
    assert result.stdout.count(" 0 problems") == 4


def test_the_command_without_crds(tmp_path: Path) -> None:
    result = command("--crds", "")  # what `make k8s-validate` runs
    assert result.returncode == 2
    assert "CRDS=DIR is missing" in result.stderr
    result = command("--crds", str(tmp_path))
    assert result.returncode == 2
    assert "no CustomResourceDefinition" in result.stderr
