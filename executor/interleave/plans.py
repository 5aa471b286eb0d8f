"""The plans of one worker, and which blocks may have any.

Of a trace with several invokes, blocks are planned that share nothing that can change (`executor.plan.apart`): other blocks may
change each other's names between their turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from executor.core.location import Location
from executor.graphs.loops import TableLoops
from executor.model.tree import PSEUDO, ModuleTree
from executor.model.values import Served
from executor.plan.cache import PlanCache
from executor.plan.forms import Form


class Plans:
    """The plans of one worker, and what they are made for.

    Args:
        tree: the model's modules.
        loops: the loops that run in the tables; None: none does.
        forms: the forms of locations that are known from the start.
        several: whether other ranks run the same blocks.

    Attributes:
        tree, loops, several: as given.
        cache: the plans.
        steps: how many steps of blocks ran as plans.
    """

    def __init__(
        self,
        tree: ModuleTree,
        loops: TableLoops | None = None,
        forms: Mapping[tuple[str, str], Form] = {},
        several: bool = False,
    ) -> None:
        self.tree = tree
        self.loops = loops
        self.several = several
        self.cache = PlanCache()
        self.steps = 0
        self._forms = dict(forms)

    def see(self, location: Location, served: Served) -> None:
        """Note the form of a value that a block is served after the first step."""
        key = (location.path, str(location.kind))
        if key not in self._forms:
            self._forms[key] = Form.of_copies(served.value)

    def form_of(self, path: str, kind: str) -> Form | None:
        """Return the form of a location's value for one row, None if no block has been there."""
        form = self._forms.get((path, kind))
        return form if form is not None and form.rows == 1 else None

    def form_in_prompt(self, path: str, kind: str, rows: int) -> Form | None:
        """Return the form of a location's value for a prompt of so many rows, as of `form_of`."""
        form = self.form_of(path, kind)
        return form if form is None or path in PSEUDO else replace(form, rows=rows)
