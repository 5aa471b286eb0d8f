"""The application for Serve's own tools: `import_path: serve_app.app:build` in the file that `serve run` or `serve deploy`
reads, or in a `RayService`, with the settings under `args`.

The proxies are configured beside it, in `grpc_options`: the port, and `serve_app.proxy.FUNCTIONS` as
`grpc_servicer_functions`. `serve run serve_app.app:build model=PATH` without a file runs it too, but Serve's command line
has no way to open a gRPC port.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from serve_app import builder
from serve_app.settings import settings_from


def build(args: dict[str, Any]) -> Application:
    """Build the application from Serve's arguments; see `serve_app.settings.settings_from`."""
    return builder.build(settings_from(args))
