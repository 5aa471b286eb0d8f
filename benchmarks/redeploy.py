"""Makes Serve deploy a service's application anew: `python -m benchmarks.redeploy CONFIG`.

It runs in a process that joins the service's cluster.
"""

from __future__ import annotations

import sys


def main(config: str) -> None:
    """Deploy the application, without waiting until it runs.

    Args:
        config: the file that the service was started with.
    """
    import ray
    from ray import serve

    from serve_app.app import build

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    target = serve.RunTarget(build({"config_file": config}), name="interpose")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
