"""The environment of a service's Ray processes.

Ray reads it when it is imported, so nothing here imports Ray.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from serve_app.settings import Settings

# Set for Serve's proxies, where `serve_app.proxy` runs: the settings of the gRPC port, by the settings' own names.
GRPC_VARIABLE = "INTERPOSE_GRPC__"
HTTP_VARIABLE = "INTERPOSE_HTTP__"
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "serve_app.proxy.listen_on_host"

# On Linux, Ray gives its node an address that other machines can reach. This variable makes Ray use the loopback address
# instead, as Ray does by default on Windows and macOS.
THIS_MACHINE_ONLY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# Serve's calls, as cheap as Serve has them. A call crosses no thread in a replica, because all code of the service is
# asynchronous.
CHEAP_CALLS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}

_GRPC_VARIABLE = "RAY_SERVE_PROXY_USE_GRPC"
_EVENTS_VARIABLE = "RAY_task_events_max_num_task_in_gcs"
_MIB = 1 << 20


def proxy_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables of Serve's proxies.

    They say where and within which bounds a proxy listens, how long a message may be at most, and how Serve calls replicas.
    """
    longest = str(max(2 * max(model.limits.max_message_bytes for model in settings.models), 64 * _MIB))
    return {
        **_variables(settings.grpc.model_dump(exclude_none=True), GRPC_VARIABLE),
        f"{HTTP_VARIABLE}OPENAI": str(settings.http.openai),
        CALLBACK_VARIABLE: CALLBACK,
        # The ingress refuses long messages with a reason. This limit keeps the proxy from holding far longer ones.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": longest,
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": longest,
        **CHEAP_CALLS,
    }


def _variables(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        variable = f"{prefix}{name.upper()}"
        found |= _variables(value, f"{variable}__") if isinstance(value, Mapping) else {variable: str(value)}
    return found


def calls_over_grpc() -> bool:
    """Return whether calls between replicas go over gRPC, as on a head for one machine."""
    return os.environ.get(_GRPC_VARIABLE) == "1"


def own_head_environment() -> dict[str, str]:
    """Return the environment of a process that starts a Ray head for this machine alone."""
    environment = {
        THIS_MACHINE_ONLY[0]: THIS_MACHINE_ONLY[1],
        "RAY_USAGE_STATS_ENABLED": "0",
        # Proxies call the ingress over gRPC, and the ingress the engines for plain requests. That is cheaper than over Ray. On
        # several machines Ray is better: it notices within seconds that a machine is cut off.
        _GRPC_VARIABLE: "1",
        # The number of calls that Ray remembers for its dashboard. Ray's default of 100,000 fills in hours and takes 200 MiB.
        _EVENTS_VARIABLE: os.environ.get(_EVENTS_VARIABLE, "10000"),
    }
    if "RAY_AUTH_MODE" not in os.environ:
        # Otherwise Ray writes a token to the home directory, which may not be writable and which other clusters share.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment
