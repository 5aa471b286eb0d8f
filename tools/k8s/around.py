"""Checks the objects around a RayService against its pods: selectors and counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.k8s.agreement import CLUSTER, pod_templates, pods_of
from tools.k8s.problems import Document, Problem, at

# Of Kubernetes' own kinds, those that keep pods running.
CONTROLLERS = ("Deployment", "StatefulSet", "DaemonSet")


@dataclass(frozen=True)
class _Pods:
    """Pods of one template.

    Attributes:
        owner: the object that it is in.
        path: where in that.
        labels: the pods'.
        count: how many there are; None if nothing here says so.
    """

    owner: Document
    path: list[str | int]
    labels: dict[str, str]
    count: int | None = None


def problems(documents: Sequence[Document]) -> list[Problem]:
    """Return where the objects of one folder do not agree on its pods.

    Their schemas are satisfied.
    """
    pods = list(_pods(documents))
    return [
        *(problem for document in documents for problem in _selectors(document, pods)),
        *_policies(documents, pods),
        *_budgets(documents, pods),
        *(
            problem
            for document in documents
            if document["kind"] == "RayService"
            for problem in _redis(document, documents)
        ),
    ]


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a label selector selects a pod with these labels; the empty one selects all."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        _holds(one, labels) for one in selector.get("matchExpressions") or []
    )


def _holds(expression: Document, labels: dict[str, str]) -> bool:
    given, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return given in values
        case "NotIn":
            return given not in values
        case "Exists":
            return given is not None
        case _:
            return given is None


def _pods(documents: Sequence[Document]) -> Iterator[_Pods]:
    for document in documents:
        if document["kind"] == "RayService":
            counts = pods_of(document)
            for (path, template), count in zip(pod_templates(document), counts, strict=True):
                yield _Pods(document, path, _labels(template), count)
        elif document["kind"] in CONTROLLERS:
            yield _Pods(document, ["spec", "template"], _labels(document["spec"]["template"]))


def _labels(template: Document) -> dict[str, str]:
    return (template.get("metadata") or {}).get("labels") or {}


def _selectors(document: Document, pods: Sequence[_Pods]) -> Iterator[Problem]:
    """Yield the selectors of objects that select no pod of their namespace."""
    for path, selector in _given(document):
        if not any(selects(selector, one.labels) for one in pods):
            yield at(document, path, "selects no pod of those here")


def _given(document: Document) -> Iterator[tuple[list[str | int], Document]]:
    """Every selector of an object for pods of its own namespace, and where it is."""
    spec = document.get("spec") or {}
    if document["kind"] == "Service" and spec.get("selector"):
        yield ["spec", "selector"], {"matchLabels": spec["selector"]}
    elif document["kind"] == "PodDisruptionBudget":
        yield ["spec", "selector"], spec.get("selector") or {}
    elif document["kind"] == "NetworkPolicy":
        yield ["spec", "podSelector"], spec.get("podSelector") or {}
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for index, rule in enumerate(spec.get(direction) or []):
                for number, peer in enumerate(rule.get(peers) or []):
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        yield ["spec", direction, index, peers, number, "podSelector"], peer["podSelector"]
    elif document["kind"] == "RayService":
        for path, template in pod_templates(document):
            for index, spread in enumerate(template["spec"].get("topologySpreadConstraints") or []):
                where = [*path, "spec", "topologySpreadConstraints", index, "labelSelector"]
                yield where, spread.get("labelSelector") or {}


def _policies(documents: Sequence[Document], pods: Sequence[_Pods]) -> Iterator[Problem]:
    """Every pod that stays has a network policy."""
    selectors = [d["spec"].get("podSelector") or {} for d in documents if d["kind"] == "NetworkPolicy"]
    for one in pods:
        if not any(selects(selector, one.labels) for selector in selectors):
            yield at(
                one.owner,
                [*one.path, "metadata", "labels"],
                "no NetworkPolicy selects these pods: whoever is near reaches them",
            )


def _budgets(documents: Sequence[Document], pods: Sequence[_Pods]) -> Iterator[Problem]:
    """A RayService's pods are all in one budget, of which none may be missing."""
    budgets = [document for document in documents if document["kind"] == "PodDisruptionBudget"]
    rays = [one for one in pods if one.owner["kind"] == "RayService"]
    for one in rays:
        if not any(selects(budget["spec"].get("selector") or {}, one.labels) for budget in budgets):
            yield at(
                one.owner,
                [*one.path, "metadata", "labels"],
                "no PodDisruptionBudget holds these pods: a drained node ends what they run",
            )
    for budget in budgets:
        held = [one for one in pods if selects(budget["spec"].get("selector") or {}, one.labels)]
        count = sum(one.count or 0 for one in held)
        given: Any = budget["spec"].get("minAvailable")
        if any(one.count is None for one in held):
            yield at(budget, ["spec", "selector"], "selects other pods than a RayService's")
        elif not isinstance(given, int):
            yield at(budget, ["spec"], "for pods of a RayCluster only a whole number as minAvailable is counted")
        elif held and given != count:
            yield at(budget, ["spec", "minAvailable"], f"is {given}; it holds {count} pods, the head's among them")


def _redis(service: Document, documents: Sequence[Document]) -> Iterator[Problem]:
    """A Redis in the service's own namespace is here. One elsewhere has a name with dots."""
    address = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {}).get("redisAddress", "")
    host, _, port = address.rpartition("://")[2].partition(":")
    ports = {
        document["metadata"]["name"]: [str(one["port"]) for one in document["spec"].get("ports", [])]
        for document in documents
        if document["kind"] == "Service"
    }
    if address and "." not in host and port not in ports.get(host, []):
        where = [*CLUSTER, "gcsFaultToleranceOptions", "redisAddress"]
        yield at(
            service, where, f"{address} is none of the Services here: {', '.join(sorted(ports)) or 'there are none'}"
        )
