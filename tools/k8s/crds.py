"""Validates custom resources against the schemas of their CRDs, as an API server does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tools.k8s.problems import CannotValidate, Document, Problem, at

Schema = dict[str, Any]


class CustomResources:
    """The kinds that a folder of CRD files defines.

    Args:
        folder: with the files, one CustomResourceDefinition or more in each.

    Raises:
        CannotValidate: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self._schemas: dict[tuple[str, str], Schema] = {}
        for path in sorted(folder.glob("*.y*ml")):
            for document in yaml.safe_load_all(path.read_text()):
                if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                    self._add(document["spec"])
        if not self._schemas:
            raise CannotValidate(
                f"no CustomResourceDefinition in {folder}: CRDS=DIR is a folder with KubeRay's, which are in "
                "ray-operator/config/crd/bases of https://github.com/ray-project/kuberay"
            )

    def _add(self, spec: Document) -> None:
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            # Every object's own metadata is the API server's business, not the CRD's.
            schema["properties"]["metadata"] = {"type": "object"}
            self._schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema

    def know(self, document: Document) -> bool:
        """Whether an object is of one of these kinds."""
        return (document.get("apiVersion"), document.get("kind")) in self._schemas

    def problems(self, document: Document) -> list[Problem]:
        """Return what the API server would refuse in an object, or drop without a word."""
        schema = self._schemas[document["apiVersion"], document["kind"]]
        stored = _as_stored(schema, copy.deepcopy(document))
        return [at(document, e.absolute_path, e.message) for e in Draft202012Validator(schema).iter_errors(stored)]


def _strict(node: Any) -> Any:
    """Return the schema in JSON Schema's own words, with unknown fields refused.

    An API server prunes unknown fields.
    """
    if isinstance(node, list):
        return [_strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    strict = {
        # Below `properties` the keys are fields' names.
        key: {name: _strict(one) for name, one in value.items()} if key == "properties" else _strict(value)
        for key, value in node.items()
    }
    if isinstance(node.get("properties"), dict) and not node.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if node.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    return strict


def _as_stored(schema: Any, value: Any) -> Any:
    """A value with its nulls dropped and its defaults filled in."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [_as_stored(schema.get("items"), one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    others = schema.get("additionalProperties")
    stored = {name: _as_stored(fields.get(name, others), one) for name, one in value.items() if one is not None}
    for name, field in fields.items():
        if name not in stored and isinstance(field, dict) and "default" in field:
            stored[name] = _as_stored(field, copy.deepcopy(field["default"]))
    return stored
