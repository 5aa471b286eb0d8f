"""What a trace asks of its tenant's quotas, what it costs, and the refusal."""

from __future__ import annotations

from dataclasses import dataclass

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class Demand:
    """What a trace asks for.

    Attributes:
        tokens: tokens of its prompts, at most, and the tokens that it may generate.
        stored: bytes that its session holds with it.
    """

    tokens: int
    stored: int


@dataclass(frozen=True)
class Cost:
    """What a trace has cost.

    Attributes:
        tokens: tokens of its prompts, and the tokens that it has generated.
        saved: bytes that it has saved, as far as they were not counted before.
        stored: bytes that its session holds after it; None if they are not known.
    """

    tokens: int = 0
    saved: int = 0
    stored: int | None = None


class QuotaReached(ServiceFailure):
    """The refusal of a call for which a tenant's quota leaves no room.

    Args:
        what: the reason in words.
        name: the quota, as the settings name it.
        limit, used: of the quota.
        retry_after: seconds after which the call may go through.
    """

    def __init__(self, what: str, name: str, limit: float, used: float, retry_after: float) -> None:
        wait = max(_LEAST_SECONDS, retry_after)
        message = f"{what} (quotas.{name} {limit:.15g}, used {used:.15g}): try again in {wait:.3g} s"
        use = pb.QuotaUse(name=name, limit=limit, used=used)
        super().__init__(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, retry_after=wait, quota=use))
        self.name = name


# A client that comes back sooner would be refused for the time that its call travels.
_LEAST_SECONDS = 0.05
