"""What blocks can import on the server, as the client knows it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from interpose.contract.display import Table
from interpose.v1.service_pb2 import ListPackagesReply, Package

_SHOWN = ("torch", "numpy", "transformers", "einops", "scipy", "scikit-learn")  # what researchers ask for first
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Packages:
    """The packages of the server.

    Attributes:
        by_module: the package of each importable top-level module.
        sandboxed: whether blocks run in sandboxes, which have these packages only.
        python_version: of the server.
    """

    by_module: Mapping[str, Package] = field(default_factory=dict)
    sandboxed: bool = False
    python_version: str = ""

    @classmethod
    def of(cls, reply: ListPackagesReply) -> Packages:
        """Return the packages that a server has listed."""
        found = {module: package for package in reply.packages for module in package.modules}
        return cls(found, reply.sandboxed, reply.python_version)

    def all(self) -> list[Package]:
        """Return the packages, by name."""
        return [found for _, found in sorted({one.name: one for one in self.by_module.values()}.items())]

    def table(self) -> Table:
        """Return the packages as a table."""
        where = "in its sandboxes" if self.sandboxed else "in blocks"
        rows = [{"package": one.name, "version": one.version, "modules": list(one.modules)} for one in self.all()]
        return Table.of(f"what the server has {where} (Python {self.python_version})", rows)

    def said(self, module: str = "") -> str:
        """Return a sentence about what the server has.

        Args:
            module: the name that was looked for; names that are near come first.
        """
        packages = self.all()
        by_name = {one.name: one for one in packages}
        near = _near(module, self.by_module)
        names = list(dict.fromkeys([*(self.by_module[name].name for name in near), *_SHOWN]))
        named = [f"{name} {by_name[name].version}" for name in names if name in by_name][:_MOST_SHOWN]
        rest = len(packages) - len(named)
        others = f" and {rest} more: client.packages() lists them" if rest else ""
        return (
            f"The server's {'sandbox' if self.sandboxed else 'Python'} has {', '.join(named) or 'no packages'}{others}."
        )


def _near(module: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(module, list(known), n=2, cutoff=0.75) if module else []
