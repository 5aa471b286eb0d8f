"""Kustomize folders as the objects that `kubectl apply -k` would send."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from tools.k8s.problems import CannotValidate, Document

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s"


def deployable() -> list[Path]:
    """Return the folders that somebody would apply: every overlay, and the smoke test."""
    return [*sorted(path for path in (FOLDER / "overlays").iterdir() if path.is_dir()), FOLDER / "smoke"]


def render(folder: Path) -> list[Document]:
    """Return the objects of a kustomize folder.

    Raises:
        CannotValidate: there is no kustomize here, or it refuses the folder.
    """
    result = subprocess.run([*_renderer(), str(folder)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CannotValidate(f"{folder} does not render: {result.stderr.strip()}")
    return [document for document in yaml.safe_load_all(result.stdout) if document]


def _renderer() -> list[str]:
    for program, command in (("kubectl", "kustomize"), ("kustomize", "build")):
        if shutil.which(program):
            return [program, command]
    raise CannotValidate("neither `kubectl` nor `kustomize` is on the PATH: https://kubernetes.io/docs/tasks/tools/")
