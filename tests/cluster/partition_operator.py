"""An operator of `test_partition`, on a host that is no node of the cluster: serves a model on it from there, and looks at it.

It prints one JSON object: what the cluster was while the model was served, and how the command ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.cluster import KEY, STATE, check
from tests.e2e.service import RunningService


def main() -> None:
    """Serve, compare with transformers, and stop."""
    head, checkpoint = sys.argv[1:]
    arguments = [checkpoint, "--name", "gpt2", "--dtype", "float32", "--enforce-eager", "--host", "0.0.0.0"]
    settings: dict[str, object] = {"tenants": [{"name": "tester", "api_key": KEY}]}
    of_ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="interpose-", dir="/tmp") as folder:
        running = RunningService(Path(folder), settings, *arguments, environment=of_ray)
        running.address = running.address.replace("127.0.0.1", head)
        running.wait()
        try:
            check(running.address, "gpt2", Path(checkpoint), KEY)
            asked = subprocess.run(
                [sys.executable, "-c", STATE], capture_output=True, text=True, timeout=120, check=True
            )
            served = json.loads(asked.stdout.splitlines()[-1])
        finally:
            status = running.stop()
    print(json.dumps({"served": served, "status": status}))


if __name__ == "__main__":
    main()
