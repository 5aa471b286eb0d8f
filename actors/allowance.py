"""The quotas of tenants, as the ingress gives them to the directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Allowance:
    """What one tenant may use; None is no limit.

    Attributes:
        sessions: open at a time.
        reserved_sessions: sessions that other tenants cannot take.
        running_traces: traces that engines have at a time, over all replicas and sessions. Further traces wait.
        waiting_traces: traces that wait for that at a time. Further traces are refused.
        tokens_per_minute: tokens of prompts and generated tokens.
        stored_bytes: bytes of uploads, event logs and saved values of all sessions. An upload counts from its first chunk.
        saved_bytes_per_minute: bytes that traces save.
        weight: the tenant's part of an engine beside other tenants, against their weights.
    """

    sessions: int | None = None
    reserved_sessions: int = 0
    running_traces: int | None = None
    waiting_traces: int | None = None
    tokens_per_minute: int | None = None
    stored_bytes: int | None = None
    saved_bytes_per_minute: int | None = None
    weight: float = 1.0

    @property
    def counted(self) -> bool:
        """Whether sessions must ask before a trace starts, or before bytes are stored."""
        counted = (self.running_traces, self.tokens_per_minute, self.stored_bytes, self.saved_bytes_per_minute)
        return any(one is not None for one in counted)

    @property
    def limited(self) -> bool:
        """Whether the tenant has any quota."""
        return self.counted or self.sessions is not None


@dataclass(frozen=True)
class Allowances:
    """The quotas of all tenants.

    Attributes:
        usual: of a tenant that is not listed.
        tenants: by name.
    """

    usual: Allowance = Allowance()
    tenants: Mapping[str, Allowance] = field(default_factory=dict)

    def of(self, tenant: str) -> Allowance:
        """Return what a tenant may use."""
        return self.tenants.get(tenant, self.usual)
