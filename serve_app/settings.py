"""The settings of a service as one model, built once and passed down.

The sources, weakest first: the YAML file, the environment (`INTERPOSE_GRPC__PORT=9001`), the arguments of the caller (flags
of the command line, arguments of the Serve application). An unknown key in any of them is an error.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from actors.allowance import Allowances
from actors.telemetry.options import Options
from serve_app.settings_errors import explain
from serve_app.settings_file import SettingsFile
from serve_app.settings_keys import ApiKey, clear_keys
from serve_app.settings_model import GIB, MIB, Limits, ModelSettings, Part
from serve_app.settings_quotas import Quotas, check, fitting, usual_reserve
from serve_app.settings_telemetry import LogSettings, MetricSettings, SpanSettings, check_telemetry, telemetry_of
from serve_app.settings_trust import warnings

__all__ = [
    "ANONYMOUS",
    "PREFIX",
    "ApiKey",
    "GrpcSettings",
    "HttpSettings",
    "Limits",
    "ModelSettings",
    "Quotas",
    "SessionSettings",
    "Settings",
    "Tenant",
    "TlsSettings",
    "model_settings_from",
    "settings_from",
]

PREFIX = "INTERPOSE_"

# Variables of the client library, which may run in the same environment as the server.
_CLIENT_VARIABLES = frozenset(
    f"INTERPOSE_{name}" for name in ("ADDRESS", "API_KEY", "CA", "CERTIFICATE", "CERTIFICATE_KEY")
)


class SessionSettings(Part):
    """The number of sessions, how long they live, and what they keep."""

    warm: int = Field(2, ge=0, description="session actors, each a process, that are ready before the first session")
    per_actor: int = Field(128, ge=1, description="sessions that one session actor holds; then another actor starts")
    idle_seconds: float = Field(900.0, gt=0, description="an unused session is closed after this")
    max_sessions: int = Field(1024, ge=1, description="sessions open at a time; then an idle session gives way")
    max_per_tenant: int = Field(256, ge=1, description="open sessions of one tenant, with or without API keys")
    wait_seconds: float = Field(
        20.0, ge=0, description="how long opening a session waits for another session to give way before it is refused"
    )
    retention_seconds: float = Field(600.0, gt=0, description="a finished trace's values are kept this long")
    stored_bytes: int = Field(16 * GIB, ge=MIB, description="uploads and results that one session keeps")
    kept_upload_bytes: int = Field(
        4 * GIB,
        ge=0,
        description="bytes of a tenant's uploads that later sessions find again; its quota of `stored_bytes` bounds them too",
    )
    kept_upload_seconds: float = Field(3600.0, gt=0, description="such an upload is kept this long after its last use")
    max_edits: int = Field(64, ge=0, description="standing edits that a tenant may have")
    edit_bytes: int = Field(64 * MIB, ge=0, description="bytes of all standing edits of a tenant together")


class TlsSettings(Part):
    """The certificates of the address for clients, as PEM files on the nodes of Serve's proxies.

    A proxy reads the files again for new connections when they have changed.
    """

    certificate: str = Field(
        min_length=1, description="the file with the server's certificate and its chain of signers"
    )
    key: str = Field(min_length=1, description="the file with the certificate's private key")
    client_ca: str = Field(
        "",
        description="the file with the certificates that clients' certificates are signed with; then clients need one",
    )


class GrpcSettings(Part):
    """The address for clients, and the bounds of their connections."""

    host: str = "127.0.0.1"
    port: int = Field(9000, ge=1, le=65535)
    tls: TlsSettings | None = Field(
        None, description="without, connections are not encrypted: put a gateway before the service"
    )
    handshake_seconds: float = Field(
        10.0, gt=0, description="a connection on which HTTP/2 has not begun is closed after this"
    )
    keyless_seconds: float = Field(
        60.0, gt=0, description="a connection on which no accepted call was made is closed after this"
    )
    idle_seconds: float = Field(
        900.0, gt=0, description="a connection without calls is closed after this; clients connect again"
    )
    max_connections: int = Field(4096, ge=1, description="connections of one proxy")
    connections_per_peer: int = Field(
        1024, ge=0, description="connections from one address; 0: no bound, for a gateway before the service"
    )
    connections_per_key: int = Field(512, ge=0, description="connections with calls of one key; 0: no bound")
    streams_per_connection: int = Field(
        1024, ge=1, description="calls at a time on one connection; further calls wait in the client"
    )
    calls_per_tenant: int = Field(2048, ge=1, description="calls of one tenant at a time in one proxy")


class HttpSettings(Part):
    """Serve's HTTP proxy: the OpenAI-compatible endpoint.

    It carries no traces. Serve starts its gRPC proxy only together with it.
    """

    openai: bool = Field(True, description="whether `/v1` answers completions, chat and the list of models")
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: any free port")


class Tenant(Part):
    """A tenant: its name, its API keys, and how far its programs are trusted."""

    name: str = Field(min_length=1, max_length=100)
    api_keys: tuple[ApiKey, ...] = Field(
        default=(), repr=False, description="hashes of keys, as `interpose keys new` makes them; or, to try, keys"
    )
    operator: bool = Field(False, description="whether the tenant's keys may also call what operators need")
    trust: Literal["none", "code", "full"] = Field(
        "none",
        description="none: blocks run in a sandbox where the model has one; code: in the workers; full: and may send pickles",
    )

    quotas: Quotas = Field(Quotas(), description="in place of the service's `quotas`, each by itself")

    @model_validator(mode="before")
    @classmethod
    def _one_key(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "api_key" in values:
            values = dict(values)
            values["api_keys"] = (values.pop("api_key"), *values.get("api_keys", ()))
        return values


ANONYMOUS = Tenant(name="anonymous")


class Settings(BaseSettings):
    """The settings of a whole service.

    Args:
        config_file: a YAML file with any of the other fields; also `INTERPOSE_CONFIG_FILE`.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    config_file: Path | None = None
    models: tuple[ModelSettings, ...] = ()
    sessions: SessionSettings = SessionSettings()
    grpc: GrpcSettings = GrpcSettings()
    http: HttpSettings = HttpSettings()
    tenants: tuple[Tenant, ...] = ()
    tenants_file: str = Field(
        "",
        description="a YAML file with more `tenants`, on the node of the cluster's head; a running service follows its changes",
    )
    tenant_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="the part of an engine's places and cache for one tenant at a time, where there are several tenants",
    )
    quotas: Quotas = Field(Quotas(), description="what each tenant may use, unless the tenant has quotas of its own")
    ingress_replicas: int = Field(1, ge=1)
    metrics: MetricSettings = MetricSettings()
    logs: LogSettings = LogSettings()
    spans: SpanSettings = SpanSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = _file(getattr(init_settings, "init_kwargs", {}))
        if file is None:
            return init_settings, env_settings
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=file.values)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if not self.models:
            raise ValueError("no model to serve: name one, or list some under `models`")
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError("every model must be given once only")
        check_tenants(self.tenants)
        check(
            [(tenant.name, self.quotas_of(tenant)) for tenant in self.tenants or (ANONYMOUS,)],
            self.sessions.max_sessions,
        )
        check_telemetry(self)
        _refuse_unknown_variables(type(self).model_fields)
        return self

    @property
    def telemetry(self) -> Options:
        """What every process of the service is told to write for operators."""
        return telemetry_of(self)

    def model_named(self, name: str) -> ModelSettings | None:
        """Return the model of this name; "" names the only model, if there is only one."""
        if not name:
            return self.models[0] if len(self.models) == 1 else None
        return next((model for model in self.models if model.name == name), None)

    @property
    def warning(self) -> str:
        """What an operator should know about these settings, or ""."""
        of_keys = clear_keys((tenant.name, key) for tenant in self.tenants for key in tenant.api_keys)
        return "\n".join(filter(None, (of_keys, *warnings(self.models, self.tenants, bool(self.tenants_file)))))

    def quotas_of(self, tenant: Tenant) -> Quotas:
        """Return the quotas of a tenant: its own, and the service's where it has none."""
        return tenant.quotas.over(self.quotas)

    def share_of(self, tenant: Tenant) -> float:
        """Return the part of an engine that a tenant may use at a time, from 0 to 1.

        A single tenant may use the whole engine, unless it has a quota.
        """
        own = self.quotas_of(tenant).kv_share
        if own is not None:
            return own
        return self.tenant_share if len(self.tenants) > 1 else 1.0

    @property
    def allowances(self) -> Allowances:
        """What the directory counts of each tenant."""
        tenants, sessions = self.tenants or (ANONYMOUS,), self.sessions.max_sessions
        reserve = usual_reserve(len(tenants), sessions)
        own = {one.name: self.quotas_of(one).allowance(reserve) for one in tenants}
        return Allowances(self.quotas.allowance(0), fitting(own, sessions))


def check_tenants(tenants: Sequence[Tenant]) -> None:
    """Refuse tenants that a service cannot tell apart.

    Raises:
        ValueError: two tenants, keys or ids of keys are the same; or one of several tenants has no key.
    """
    keys = [key for tenant in tenants for key in tenant.api_keys]
    for what, names in (
        ("tenant", [tenant.name for tenant in tenants]),
        ("API key", [key.hash for key in keys]),
        ("id of an API key", [key.id for key in keys if key.id]),
    ):
        if len(set(names)) < len(names):
            raise ValueError(f"every {what} must be given once only")
    for tenant in tenants:
        if not tenant.api_keys and len(tenants) > 1:
            raise ValueError(f"tenant {tenant.name!r} has no API key; only a single tenant may do without")
        if not tenant.api_keys and tenant.operator:
            raise ValueError(f"tenant {tenant.name!r} is an operator, so it needs an API key")


def settings_from(arguments: dict[str, Any]) -> Settings:
    """Return settings from flat arguments, over those of a file and the environment.

    Args:
        arguments: any field of `Settings`; or, for a single model, `model` and any field of `ModelSettings`.

    Raises:
        SettingsError: with a line for each wrong setting, which says where the setting was given. For an unknown name the
            line says which names are near.
    """
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if "model" in arguments:
        fields = set(ModelSettings.model_fields) & arguments.keys()
        one = {name: arguments.pop(name) for name in fields}
        if "models" in arguments:
            raise ValueError("give either `model` or `models`")
        arguments["models"] = [one]
    try:
        return Settings(**arguments)
    except ValidationError as error:
        raise explain(error, Settings, arguments, _file(arguments), PREFIX) from None


def model_settings_from(arguments: dict[str, Any]) -> ModelSettings:
    """Return the settings of one model.

    Args:
        arguments: fields of `ModelSettings`.

    Raises:
        SettingsError: with a line for each wrong setting.
    """
    try:
        return ModelSettings(**arguments)
    except ValidationError as error:
        raise explain(error, ModelSettings, arguments) from None


def _file(arguments: Mapping[str, Any]) -> SettingsFile | None:
    path = arguments.get("config_file") or os.environ.get(f"{PREFIX}CONFIG_FILE")
    return SettingsFile(Path(path)) if path else None


def _refuse_unknown_variables(fields: Mapping[str, Any]) -> None:
    known = {f"{PREFIX}{name}".upper() for name in fields} | _CLIENT_VARIABLES
    for variable in os.environ:
        name = variable.upper()
        if not name.startswith(PREFIX) or name in known or name.split("__")[0] in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown environment variable {variable}{hint}")
