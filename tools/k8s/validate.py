"""All checks on one kustomize folder."""

from __future__ import annotations

from collections.abc import Sequence

from tools.k8s import agreement, serve_config
from tools.k8s.builtin import BuiltinKinds
from tools.k8s.crds import CustomResources
from tools.k8s.problems import Document, Problem

SERVICE = ("ray.io/v1", "RayService")


def problems(documents: Sequence[Document], custom: CustomResources, builtin: BuiltinKinds) -> list[Problem]:
    """Return what is wrong with the objects of one folder; what builds on a schema is only checked when it is satisfied."""
    found: list[Problem] = []
    for document in documents:
        kind = document.get("apiVersion"), document.get("kind")
        by_schema = custom.problems(document) if custom.know(document) else builtin.problems(document)
        if not by_schema and kind == SERVICE:
            by_schema = _service_problems(document, builtin)
        elif not by_schema and document.get("kind") == "PodDisruptionBudget":
            by_schema = agreement.budget_problems(document)
        found += by_schema
    return found


def _service_problems(service: Document, builtin: BuiltinKinds) -> list[Problem]:
    found = [
        problem
        for path, template in agreement.pod_templates(service)
        for problem in builtin.pod_problems(service, template, path)
    ]
    return found or serve_config.problems(service) or agreement.problems(service)
