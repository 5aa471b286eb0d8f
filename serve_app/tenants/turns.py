"""Whose trace is next: tenants get tokens by their weights, and their sessions the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from actors.shares import Shares
from executor.core.fairness import Flow


class Turns:
    """The turns of traces by tenant and session."""

    def __init__(self) -> None:
        self._tenants = Shares()
        self._sessions: defaultdict[str, Shares] = defaultdict(Shares)

    def enter(self, flow: Flow) -> None:
        """Note that a trace waits."""
        self._tenants.enter(flow.tenant)
        self._sessions[flow.tenant].enter(flow.session)

    def leave(self, flow: Flow) -> None:
        """Note that a trace neither waits nor runs any more."""
        self._tenants.leave(flow.tenant)
        self._sessions[flow.tenant].leave(flow.session)

    def start(self, flow: Flow, tokens: float) -> None:
        """Note that a waiting trace starts, which may need so many tokens."""
        self._tenants.start(flow.tenant, tokens / flow.weight)
        self._sessions[flow.tenant].start(flow.session, tokens)

    def end(self, flow: Flow, tokens: float, used: float) -> None:
        """Note that a trace that had started has ended, and how many tokens it has used."""
        self._tenants.end(flow.tenant, tokens / flow.weight, used / flow.weight)
        self._sessions[flow.tenant].end(flow.session, tokens, used)

    def next(self, waiting: Iterable[Flow]) -> Flow:
        """Return the flow whose trace is next.

        Args:
            waiting: flows with a waiting trace that has entered, in order of arrival; at least one.
        """
        return min(waiting, key=self._had)

    def _had(self, flow: Flow) -> tuple[float, float]:
        return self._tenants.had(flow.tenant), self._sessions[flow.tenant].had(flow.session)
