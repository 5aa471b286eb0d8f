"""Checks beyond schemas: a RayService, the objects around it and KubeRay agree.

KubeRay labels every worker pod for the Serve service, whether or not it has a Serve proxy, and Serve starts a proxy where a
replica is. So each pod has an ingress replica, and is ready when that answers through the pod's own gRPC proxy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from typing import Any

import ray

from serve_app.ingress.health import PROXY
from tools.k8s import serve_config
from tools.k8s.problems import Document, Problem, at

# Of KubeRay's own checks of a RayService's name.
LONGEST_NAME = 47
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

HTTP, GRPC = "serve", "serve-grpc"
H2C = "kubernetes.io/h2c"
CLUSTER = ["spec", "rayClusterConfig"]


def problems(service: Document) -> list[Problem]:
    """Return where a RayService contradicts itself. Its schemas are satisfied."""
    return [*_cluster(service), *_ports(service), *_proxies(service), *_room(service)]


def pod_templates(service: Document) -> Iterator[tuple[list[str | int], Document]]:
    """Yield the head's template and each worker group's, with where it is."""
    cluster = service["spec"]["rayClusterConfig"]
    yield [*CLUSTER, "headGroupSpec", "template"], cluster["headGroupSpec"]["template"]
    for index, group in enumerate(cluster.get("workerGroupSpecs", [])):
        yield [*CLUSTER, "workerGroupSpecs", index, "template"], group["template"]


def pods_of(service: Document) -> list[int]:
    """Return how many pods there are of each template."""
    return [1, *(_pods(group) for group in service["spec"]["rayClusterConfig"].get("workerGroupSpecs", []))]


def _cluster(service: Document) -> Iterator[Problem]:
    name = service["metadata"]["name"]
    if len(name) > LONGEST_NAME or not DNS_LABEL.fullmatch(name):
        yield at(service, ["metadata", "name"], f"KubeRay takes a DNS label of at most {LONGEST_NAME} characters")
    cluster = service["spec"]["rayClusterConfig"]
    if cluster.get("rayVersion") != ray.__version__:
        yield at(service, [*CLUSTER, "rayVersion"], f"the image has Ray {ray.__version__}")
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield at(
            service, [*CLUSTER, "authOptions"], "without `mode: token` whoever reaches Ray's ports runs code in it"
        )
    kept = cluster.get("gcsFaultToleranceOptions", {})
    if kept.get("backend", "redis") == "redis" and not kept.get("redisAddress"):
        message = "no Redis: when the head restarts the whole cluster does, and what it holds is lost"
        yield at(service, [*CLUSTER, "gcsFaultToleranceOptions"], message)


def _ports(service: Document) -> Iterator[Problem]:
    """The numbers in `serveConfigV2` are those of the ports that KubeRay finds by name."""
    config = serve_config.config_of(service)
    numbers = {
        HTTP: config.get("http_options", {}).get("port", 8000),
        GRPC: config.get("grpc_options", {}).get("port", 9000),
    }
    for path, template in pod_templates(service):
        ports = template["spec"]["containers"][0].get("ports", [])
        yield from _named_ports(service, [*path, "spec", "containers", 0, "ports"], ports, "containerPort", numbers)
    ports = service["spec"].get("serveService", {}).get("spec", {}).get("ports", [])
    where: list[str | int] = ["spec", "serveService", "spec", "ports"]
    yield from _named_ports(service, where, ports, "port", numbers)
    for index, port in enumerate(ports):
        if port.get("name") == GRPC and port.get("appProtocol") != H2C:
            yield at(service, [*where, index, "appProtocol"], f"a gateway speaks HTTP/2 to it only if this is {H2C}")


def _named_ports(
    service: Document, path: list[str | int], ports: list[Document], field: str, numbers: dict[str, int]
) -> Iterator[Problem]:
    given = {port.get("name"): port.get(field) for port in ports}
    for name, number in numbers.items():
        if given.get(name) != number:
            yield at(service, path, f"the port named {name!r} is {given.get(name)}; serveConfigV2 says {number}")


def _proxies(service: Document) -> Iterator[Problem]:
    """Every pod has a proxy, and workers are ready when it serves."""
    config = serve_config.config_of(service)
    where: list[str | int] = ["spec", "serveConfigV2"]
    if config.get("proxy_location", "EveryNode") != "EveryNode":
        yield at(service, [*where, "proxy_location"], "not EveryNode: pods without a proxy never become ready")
    pods = sum(pods_of(service))
    for index, application in enumerate(config.get("applications", [])):
        if serve_config.is_model(application):
            continue
        options: Document = next(
            (d for d in application.get("deployments", []) if d["name"] == serve_config.INGRESS), {}
        )
        given = options.get("num_replicas"), options.get("max_replicas_per_node")
        if given != (pods, 1):
            message = f"{pods} pods, the head's among them, each need one ingress replica: num_replicas {pods}, "
            yield at(service, [*where, "applications", index, "deployments"], message + "max_replicas_per_node 1")
    for path, template in list(pod_templates(service))[1:]:
        probe = template["spec"]["containers"][0].get("readinessProbe", {})
        expected = {"port": config.get("grpc_options", {}).get("port"), "service": PROXY}
        if probe.get("grpc") != expected:
            message = f"is not gRPC's, {expected}: the pod would get calls that its proxy cannot take"
            yield at(service, [*path, "spec", "containers", 0, "readinessProbe"], message)


def _room(service: Document) -> Iterator[Problem]:
    """The engines' workers fit on the pods."""
    groups = service["spec"]["rayClusterConfig"].get("workerGroupSpecs", [])
    has = {kind: sum(_pods(group) * _devices(group, kind) for group in groups) for kind in ("gpu", "cpu")}
    needs = {"gpu": 0, "cpu": 0}
    for index, application in enumerate(serve_config.config_of(service).get("applications", [])):
        for model in serve_config.models_of(application):
            if model.device == "auto" and has["gpu"]:
                message = f"{model.name}: say `device`; the application is built before the pods are there"
                yield at(service, ["spec", "serveConfigV2", "applications", index, "args", "models"], message)
            needs["gpu" if model.device == "gpu" else "cpu"] += model.world_size * model.most_replicas
    for index, group in enumerate(groups):
        least, most = int(group.get("minReplicas", 0)), int(group.get("maxReplicas", 2**31 - 1))
        if not least <= int(group.get("replicas", 0)) <= most:
            message = f"not between minReplicas, {least}, and maxReplicas, {most}: KubeRay would keep to those"
            yield at(service, [*CLUSTER, "workerGroupSpecs", index, "replicas"], message)
    for kind, count in needs.items():
        if count > has[kind]:
            message = f"the models' workers need {count} {kind.upper()}s, the pods have {has[kind]}"
            yield at(service, [*CLUSTER, "workerGroupSpecs"], message)


def _pods(group: Document) -> int:
    return int(group.get("replicas", 0)) * int(group.get("numOfHosts", 1))


def _devices(group: Document, kind: str) -> int:
    """What Ray counts on a pod of a group, as KubeRay tells it."""
    given = group.get("rayStartParams", {}).get(f"num-{kind}s")
    if given is not None:
        return int(given)
    limits = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return ceil(_quantity(limits.get("nvidia.com/gpu" if kind == "gpu" else "cpu", 0)))


def _quantity(value: Any) -> float:
    text = str(value)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
