"""The applications for Serve's own tools (`serve run`, `serve deploy`, a `RayService`).

Their settings stand under `args` in the file that the tool reads.

`import_path: serve_app.app:build` is the service: ingress and models. The proxies are configured beside it, in
`grpc_options`: the port, and `serve_app.proxy.FUNCTIONS` as `grpc_servicer_functions`. `serve run serve_app.app:build
model=PATH` runs the service without a file, but Serve's command line cannot open a gRPC port.

`import_path: serve_app.app:build_model` is one more model. The service goes on while such a model comes or goes.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve import Application

from serve_app import builder
from serve_app.settings import Tenant, model_settings_from, settings_from

logger = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Application:
    """Build the service from Serve's arguments (see `serve_app.settings.settings_from`).

    Raises:
        ValueError: the settings are wrong, or the arguments have an API key itself: Serve stores its arguments, and every
            process of the cluster can read them.
    """
    for tenant in args.get("tenants") or ():
        keys = Tenant.model_validate(tenant).api_keys
        if any(key.clear for key in keys):
            raise ValueError(
                "Serve's arguments have an API key itself, and Serve stores them where every process of the cluster can read "
                "them: write hashes (`interpose keys new`), or use `tenants_file`; and make the key anew"
            )
    settings = settings_from(args)
    for warning in settings.warning.splitlines():
        logger.warning(warning)
    return builder.build(settings)


def build_model(args: dict[str, Any]) -> Application:
    """Build one more model for a running service; `args` are the fields of a `ModelSettings`."""
    return builder.build_model(model_settings_from(args))
