"""The settings of what a tenant may use: its quotas, and its weight beside other tenants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pydantic import Field

from actors.allowance import Allowance
from serve_app.settings_model import Part

# Sessions that are reserved for each tenant unless the settings say otherwise. All reserves take half the sessions at most.
RESERVED_SESSIONS = 16


class Quotas(Part):
    """What one tenant may use. Without a value there is no limit.

    Size: one field for each setting.
    """

    sessions: int | None = Field(
        None, ge=1, description="sessions open at a time; `sessions.max_per_tenant` unless given"
    )
    reserved_sessions: int | None = Field(
        None,
        ge=0,
        description="sessions that other tenants cannot take; unless given up to 16, where there are several tenants",
    )
    running_traces: int | None = Field(
        None,
        ge=1,
        description="traces that engines have at a time, over all replicas and sessions; further traces wait",
    )
    waiting_traces: int | None = Field(
        None, ge=0, description="traces that wait for `running_traces`; further traces are refused"
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of prompts and generated tokens; `max_tokens` counts until a trace has ended"
    )
    stored_bytes: int | None = Field(
        None, ge=1, description="bytes of uploads, begun ones too, of saved values and of event logs, of all sessions"
    )
    saved_bytes_per_minute: int | None = Field(None, ge=1, description="bytes that traces save")
    kv_share: float | None = Field(
        None, gt=0, le=1, description="part of an engine's places and of its cache; `tenant_share` unless given"
    )
    weight: float = Field(
        1.0, gt=0, le=1000, description="the part of an engine beside other tenants, against their weights"
    )

    def over(self, usual: Quotas) -> Quotas:
        """Return these quotas; where one was not given, that of `usual`."""
        return usual.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})

    def allowance(self, reserved_sessions: int) -> Allowance:
        """Return what the directory counts.

        Args:
            reserved_sessions: the reserve, if the settings give none.
        """
        own = self.reserved_sessions
        if own is None:
            own = reserved_sessions if self.sessions is None else min(reserved_sessions, self.sessions)
        return Allowance(
            sessions=self.sessions,
            reserved_sessions=own,
            running_traces=self.running_traces,
            waiting_traces=self.waiting_traces,
            tokens_per_minute=self.tokens_per_minute,
            stored_bytes=self.stored_bytes,
            saved_bytes_per_minute=self.saved_bytes_per_minute,
            weight=self.weight,
        )


def usual_reserve(tenants: int, max_sessions: int) -> int:
    """Return how many sessions are reserved for each tenant unless the settings say otherwise."""
    return min(RESERVED_SESSIONS, max_sessions // (2 * tenants)) if tenants > 1 else 0


def fitting(allowances: Mapping[str, Allowance], max_sessions: int) -> dict[str, Allowance]:
    """Return the tenants' allowances with reserves that the service has room for.

    The file of tenants may bring more tenants than the settings were checked with; then every reserve shrinks.

    Args:
        allowances: by tenant.
        max_sessions: sessions of the service.
    """
    total = sum(one.reserved_sessions for one in allowances.values())
    if total <= max_sessions:
        return dict(allowances)
    return {
        name: dataclasses.replace(one, reserved_sessions=one.reserved_sessions * max_sessions // total)
        for name, one in allowances.items()
    }


def check(quotas: Sequence[tuple[str, Quotas]], max_sessions: int) -> None:
    """Refuse quotas that contradict each other.

    Args:
        quotas: of each tenant, by its name.
        max_sessions: sessions of the service.

    Raises:
        ValueError: with the tenant and the settings.
    """
    for name, own in quotas:
        if own.waiting_traces is not None and own.running_traces is None:
            raise ValueError(f"tenant {name!r}: quotas.waiting_traces needs quotas.running_traces")
        if own.sessions is not None and (own.reserved_sessions or 0) > own.sessions:
            raise ValueError(f"tenant {name!r}: quotas.reserved_sessions is more than quotas.sessions")
    reserve = usual_reserve(len(quotas), max_sessions)
    reserved = sum(own.allowance(reserve).reserved_sessions for _, own in quotas)
    if reserved > max_sessions:
        raise ValueError(
            f"the tenants' quotas.reserved_sessions are {reserved} together, and sessions.max_sessions is {max_sessions}"
        )
