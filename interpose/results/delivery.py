"""Assigns the saved values of a trace to the names and containers of the notebook."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from interpose import capture
from interpose.contract.errors import InterposeWarning, UnsavedWarning
from interpose.results.outcome import Delivered, update_in_place
from interpose.results.session_names import SessionNames, still_there
from interpose.results.unsaved import unsaved
from interpose.v1.trace_pb2 import SessionVariable


class Delivery:
    """Assigns a trace's values as its blocks would have done here.

    Args:
        block: the trace's own block.
        scope: the scope of that block.
        blocks: block and scope of each invoke.
        captured: the caller's objects by their index in the trace's scope.
        session: notes the assigned names and changed containers, and fetches their remote values at its end.
        groups: the invokes of each prompt, one for each sequence of the prompt.
        shared: the first shared name of entries of the trace's scope, by index.
    """

    def __init__(
        self,
        block: capture.Block,
        scope: capture.Scope,
        blocks: Sequence[tuple[capture.Block, capture.Scope]],
        captured: Mapping[int, object],
        session: SessionNames | None = None,
        groups: Sequence[Sequence[int]] = (),
        shared: Mapping[int, str] | None = None,
    ) -> None:
        self._block = block
        self._scope = scope
        self._blocks = list(blocks)
        self.captured = captured
        self._session = session
        self._shared = dict(shared or {})
        self._groups = {invoke: group for group in groups for invoke in group if len(group) > 1}

    def deliver(
        self, values: Iterable[Delivered], detached: bool = False, variables: Iterable[SessionVariable] = ()
    ) -> None:
        """Update the caller's containers and assign the saved names.

        Args:
            detached: whether the delivery comes long after the block. Names in functions that have returned are then left out.
            variables: the session variables, with the versions of their values. Where a later version of a variable has
                arrived already, the variable stays unchanged.
        """
        variables = list(variables)
        savers: dict[str, list[int]] = {}
        for invoke, names, updates in self._by_prompt(values):
            for name in names if invoke >= 0 else ():
                savers.setdefault(name, []).append(invoke)
            if invoke < 0 and self._session is not None:
                names, updates = self._newer(self._session, variables, names, updates)
            for index, contents in updates.items():
                container = self.captured.get(index)
                update_in_place(container, contents)
                if self._session is not None:
                    self._session.changed(container)
            scope = self.scope_of(invoke)
            if detached and not still_there(scope):
                continue
            scope.assign(names)
            if self._session is not None:
                self._session.assigned(scope, names)
        for name, invokes in savers.items():
            if len(invokes) > 1 and invokes[-1] < len(self._blocks):
                self._warn_of_last(name, invokes)

    def _warn_of_last(self, name: str, invokes: Sequence[int]) -> None:
        """Warn at the notebook's line that several prompts saved the same name.

        There is no warning if every prompt after the first reads the name.
        """
        if all(name in self._blocks[invoke][0].reads for invoke in invokes[1:]):
            return
        block, scope = self._blocks[invokes[-1]]
        stores = (node for statement in block.body for node in ast.walk(statement) if isinstance(node, ast.Name))
        line = next(
            (node.lineno for node in stores if node.id == name and isinstance(node.ctx, ast.Store)), block.first_line
        )
        message = (
            f"{name!r} was saved by {len(invokes)} prompts of the trace and holds the value of the last. To keep all, "
            f"write {name}s = [].save() in the outer block and {name}s.append(…) in the blocks of the prompts, or give each "
            "block a name of its own"
        )
        registry = scope.globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, InterposeWarning, block.filename, line, registry=registry)

    def _newer(
        self,
        session: SessionNames,
        variables: Iterable[SessionVariable],
        names: dict[str, object],
        updates: dict[int, object],
    ) -> tuple[dict[str, object], dict[int, object]]:
        """Return names and updates without session variables that are older than the session's.

        The session learns the new versions of the variables that stay.
        """
        names, updates = dict(names), dict(updates)
        for variable in variables:
            first = self._shared.get(variable.entry, "")
            if session.variables.is_old(variable):
                names.pop(first, None)
                updates.pop(variable.entry, None)
                continue
            container = self.captured.get(variable.entry)
            if variable.entry in updates and first not in names:
                update_in_place(container, updates.pop(variable.entry))
                session.changed(container)
            session.variables.learn(variable, names.get(first, container))
        return names, updates

    def _by_prompt(self, values: Iterable[Delivered]) -> Iterable[Delivered]:
        """Replace the values of a prompt's sequences by lists with an entry for each sequence.

        The lists take the place of the first sequence that saved a value.
        """
        if not self._groups:
            return values
        arrived = list(values)
        names_of = {invoke: names for invoke, names, _ in arrived}
        seen: set[int] = set()
        merged: list[Delivered] = []
        for invoke, names, updates in arrived:
            group = self._groups.get(invoke)
            if group is not None:
                first = group[0] not in seen
                seen.add(group[0])
                names = in_sequences([names_of.get(one, {}) for one in group]) if first else {}
            merged.append((invoke, names, updates))
        return merged

    def warn_of_unsaved(self, saved: Collection[str]) -> None:
        """Warn once of names that a block assigned and did not save, and the notebook reads.

        Args:
            saved: the names that the trace saved.
        """
        blocks = {id(block): block for block, _ in self._blocks}
        for invoke, (block, _) in enumerate(self._blocks):
            others = [other for other in blocks.values() if other is not block]
            scope = self.scope_of(invoke)
            found = unsaved(block, scope, saved, others)
            if found:
                names = ", ".join(map(repr, found))
                first = next(iter(found))
                message = (
                    f"the block assigned {names} and did not save {'it' if len(found) == 1 else 'them'}, so the notebook has no "
                    f"such name: write {first} = ….save()"
                )
                registry = scope.globals.setdefault("__warningregistry__", {})
                warnings.warn_explicit(message, UnsavedWarning, block.filename, found[first], registry=registry)
                return

    def scope_of(self, invoke: int) -> capture.Scope:
        """Return the scope for an invoke's names.

        It is the scope of the trace's block. If another function added the invoke, it is the scope of that function.
        """
        if invoke < 0 or invoke >= len(self._blocks):
            return self._scope
        inner, inner_scope = self._blocks[invoke]
        block = self._block
        first, last = block.first_line, max(statement.end_lineno or 0 for statement in block.body)
        inside = inner.filename == block.filename and first <= inner.first_line <= last
        return self._scope if inside else inner_scope


def in_sequences(saved: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return a list for each saved name, with an entry for each sequence of the prompt.

    The entry is None where a sequence did not save the name.
    """
    names = dict.fromkeys(name for one in saved for name in one)
    return {name: [one.get(name) for one in saved] for name in names}
