"""The environment of a service's Ray processes. Ray reads it when it is imported, so nothing here imports Ray."""

from __future__ import annotations

import os
import secrets

from serve_app.keys import HASHES_VARIABLE, hashed
from serve_app.settings import Settings

# Set for Serve's proxies; `serve_app.proxy` runs there.
HOST_VARIABLE = "INTERPOSE_GRPC__HOST"
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "serve_app.proxy.listen_on_host"

# On Linux Ray takes a remotely reachable address for its node unless it is told to keep to this machine, as it does by
# itself on the systems that this variable is named after.
THIS_MACHINE_ONLY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

_EVENTS_VARIABLE = "RAY_task_events_max_num_task_in_gcs"
_MIB = 1 << 20


def proxy_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of Serve's proxies: where they listen, how long a message may be at all, and hashes of the keys."""
    longest = max(model.limits.max_message_bytes for model in settings.models)
    keys = [key for tenant in settings.tenants for key in tenant.api_keys]
    return {
        **({HASHES_VARIABLE: hashed(keys)} if keys else {}),
        HOST_VARIABLE: settings.grpc.host,
        CALLBACK_VARIABLE: CALLBACK,
        # The ingress refuses long messages with a reason; this keeps the proxy from holding absurd ones.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max(2 * longest, 64 * _MIB)),
    }


def own_head_environment() -> dict[str, str]:
    """Return the environment of a process that starts a Ray head of its own, for this machine alone."""
    environment = {
        THIS_MACHINE_ONLY[0]: THIS_MACHINE_ONLY[1],
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray remembers so many calls for its dashboard, 100,000 if it is not told, which takes hours to fill and 200 MiB.
        _EVENTS_VARIABLE: os.environ.get(_EVENTS_VARIABLE, "10000"),
    }
    if "RAY_AUTH_MODE" not in os.environ:
        # Ray would write a token to the home directory, which may not be writable and which other clusters share.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment
