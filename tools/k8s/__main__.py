"""`python -m tools.k8s --crds DIR`, which `make k8s-validate CRDS=DIR` runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.k8s.builtin import KUBERNETES, BuiltinKinds
from tools.k8s.crds import CustomResources
from tools.k8s.problems import CannotValidate
from tools.k8s.render import deployable, render
from tools.k8s.validate import problems


def main() -> int:
    """Validate every folder in k8s/ that can be applied.

    Returns:
        0 if all is well, 1 if something is wrong, 2 if that cannot be told.
    """
    parser = argparse.ArgumentParser(prog="make k8s-validate CRDS=DIR", description="Validate the manifests in k8s/.")
    parser.add_argument("--crds", required=True, metavar="DIR", help="a folder with KubeRay's CRD files")
    arguments = parser.parse_args()
    if not arguments.crds:
        parser.error("CRDS=DIR is missing: a folder with KubeRay's CRD files, its ray-operator/config/crd/bases")
    try:
        custom, builtin = CustomResources(Path(arguments.crds)), BuiltinKinds()
        wrong = 0
        for folder in deployable():
            documents = render(folder)
            found = problems(documents, custom, builtin)
            for problem in found:
                print(f"{folder.name}: {problem}", file=sys.stderr)
            wrong += len(found)
            print(f"{folder.name}: {len(documents)} objects, {len(found)} problems (Kubernetes {KUBERNETES})")
    except CannotValidate as error:
        print(f"k8s-validate: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
