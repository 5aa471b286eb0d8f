"""`interpose doctor` where a container has Docker's 64 MiB of shared memory, and where Ray's disk is full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In a mount namespace of its own, which ends with the process.
SCRIPT = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size=64m tmpfs /tmp
head -c 62M /dev/zero > /tmp/full
exec "$@"
"""


def test_what_a_small_container_lacks() -> None:
    command = [sys.executable, "-m", "interpose.cli", "doctor", "--server", "--json"]
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", SCRIPT, "bash", *command],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1, done.stderr
    shared, disk = found["shared memory"], found["disk of Ray"]
    assert shared["status"] == "missing" and "64 MiB free; 1 workers need 160 MiB" in shared["found"]
    assert "docker run --shm-size=2g" in shared["remedy"] and "mount -o remount,size=2g /dev/shm" in shared["remedy"]
    assert disk["status"] == "missing" and "97% used" in disk["found"]
