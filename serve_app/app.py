"""The application for Serve's own tools: `serve run serve_app.app:build model=PATH tensor_parallel_size=2`.

A `RayService` names the same import path, with the settings under `args`. Serve's proxies are configured beside it:
`grpc_options` needs `serve_app.proxy.FUNCTIONS` as its `grpc_servicer_functions`.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from serve_app import builder
from serve_app.settings import settings_from


def build(args: dict[str, Any]) -> Application:
    """Build the application from Serve's arguments; see `serve_app.settings.settings_from`."""
    return builder.build(settings_from(args))
