"""Hooks of the build of `interpose-server`: its files and its metadata come from the repository around it.

A source distribution has them inside, so that a wheel can be built from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("actors", "executor", "serve_app")
# The extras of the client that bring an engine.
ENGINES = ("cpu", "gpu")
# The client's pyproject.toml in a source distribution.
_COPY = "client.toml"


def _sources(root: str) -> tuple[Path, Path]:
    """Return the folder of the packages, and the client's pyproject.toml."""
    here = Path(root)
    if (here / _COPY).is_file():
        return here, here / _COPY
    return here.parent, here.parent / "pyproject.toml"


class Metadata(MetadataHookInterface):
    """Takes the client's version, and asks for that very version of the client."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dynamic fields."""
        _, file = _sources(self.root)
        client = tomllib.loads(file.read_text())["project"]
        version = client["version"]
        for name in ("version", "keywords", "requires-python"):
            metadata[name] = client[name]
        everywhere, linux = "Operating System :: OS Independent", "Operating System :: POSIX :: Linux"
        metadata["classifiers"] = [linux if one == everywhere else one for one in client["classifiers"]]
        metadata["dependencies"] = [f"{client['name']}[serve]=={version}"]
        metadata["optional-dependencies"] = {name: [f"{client['name']}[{name}]=={version}"] for name in ENGINES}


class Files(BuildHookInterface):
    """Adds the packages to a wheel, and also the client's pyproject.toml to a source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files."""
        folder, client = _sources(self.root)
        build_data["force_include"].update({str(folder / name): name for name in PACKAGES})
        if self.target_name == "sdist":
            build_data["force_include"][str(client)] = _COPY
