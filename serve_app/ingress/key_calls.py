"""The calls about API keys: which keys there are, and the end of a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from actors.telemetry.telemetry import Telemetry
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import keys_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.calls import caller, unary
from serve_app.settings import Tenant
from serve_app.tenants.book import Keyring


class KeyCalls(ABC):
    """The calls of a tenant about its own keys, and of operators about all keys.

    Attributes:
        keys: the tenants and their keys.
        max_message_bytes: bytes of the longest message that any model takes.
        telemetry: what this replica tells operators.
    """

    keys: Keyring
    max_message_bytes: int
    telemetry: Telemetry

    @abstractmethod
    def _audit(self, line: dict[str, Any]) -> None:
        """Write a line of the audit log."""

    @abstractmethod
    def _directory(self) -> Any:
        """Return a handle of the directory."""

    @unary(keys_pb2.ListKeysRequest, keys_pb2.ListKeysReply)
    async def ListKeys(self, request: keys_pb2.ListKeysRequest, tenant: Tenant) -> keys_pb2.ListKeysReply:
        """List keys, with their last use and their end."""
        await self.keys.exchange(self._directory())
        uses, book = await self._directory().key_uses.remote(), self.keys.book
        reply = keys_pb2.ListKeysReply()
        for one in book.all if book is not None else ():
            if one.name != tenant.name and not tenant.operator:
                continue
            for key in one.api_keys:
                reply.keys.add(
                    tenant=one.name,
                    label=key.label,
                    expires=key.expires.timestamp() if key.expires is not None else 0.0,
                    last_used=uses.get(key.hash, 0.0),
                    revoked=book.revoked.get(key.hash, 0.0) if book is not None else 0.0,
                )
        return reply

    @unary(keys_pb2.RevokeKeyRequest, keys_pb2.RevokeKeyReply)
    async def RevokeKey(self, request: keys_pb2.RevokeKeyRequest, tenant: Tenant) -> keys_pb2.RevokeKeyReply:
        """Revoke a key: of the caller's tenant, or of any tenant if the caller is an operator."""
        name = request.tenant or tenant.name
        if name != tenant.name and not tenant.operator:
            message = "only an operator revokes keys of other tenants"
            raise ServiceFailure(failure(pb.ERROR_CODE_PERMISSION_DENIED, message))
        self._audit(
            {"action": "revoke", "tenant": tenant.name, "key": caller().key, "of": name, "revoked": request.label}
        )
        self.keys.update(await self._directory().revoke_key.remote(name, request.label))
        return keys_pb2.RevokeKeyReply()
