"""All checks on one kustomize folder."""

from __future__ import annotations

from collections.abc import Sequence

from tools.k8s import agreement, around, serve_config
from tools.k8s.builtin import BuiltinKinds
from tools.k8s.crds import CustomResources
from tools.k8s.problems import Document, Problem

SERVICE = ("ray.io/v1", "RayService")


def problems(documents: Sequence[Document], custom: CustomResources, builtin: BuiltinKinds) -> list[Problem]:
    """Return what is wrong with the objects of one folder.

    Checks that build on a schema run only if the schema is satisfied.
    """
    found: list[Problem] = []
    contradictions: list[Problem] = []
    for document in documents:
        service = (document.get("apiVersion"), document.get("kind")) == SERVICE
        by_schema = custom.problems(document) if custom.know(document) else builtin.problems(document)
        if service and not by_schema:
            by_schema = _pod_problems(document, builtin) or serve_config.problems(document)
        if service and not by_schema:
            contradictions += agreement.problems(document)
        found += by_schema
    return [*found, *contradictions, *(around.problems(documents) if not found else ())]


def _pod_problems(service: Document, builtin: BuiltinKinds) -> list[Problem]:
    return [
        problem
        for path, template in agreement.pod_templates(service)
        for problem in builtin.pod_problems(service, template, path)
    ]
