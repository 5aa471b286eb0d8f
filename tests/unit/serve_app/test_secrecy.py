"""What other processes of the same user can read of a process that keeps to itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
# Becomes an ordinary user first: root reads everything. The paths are read before.
CHILD = """
import ctypes, os, sys
import executor.cluster.environment as environment, serve_app.secrecy as secrecy
if os.getuid() == 0:
    os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process has it that was this user's from its start
if "keep" in sys.argv:
    secrecy.forget_variables(environment.hide_keys())
    secrecy.keep_to_itself()
print("ready", flush=True)
sys.stdin.read()
"""
READER = """
import os, sys
if os.getuid() == 0:
    os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
for name in ("environ", "mem", "maps", "fd"):
    path = f"/proc/{{sys.argv[1]}}/{{name}}"
    try:
        found = os.listdir(path) if name == "fd" else open(path, "rb").read(1 << 20 if name != "mem" else 0)
        print(name, found)
    except PermissionError:
        print(name, "refused")
"""


def test_a_process_keeps_its_keys_to_itself() -> None:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "INTERPOSE_TENANTS": '[{"api_key": "a-secret"}]', "OTHER": "stays", "PYTHONPATH": root}
    told = {}
    for kind in ("keep", "tell"):
        command = [sys.executable, "-c", CHILD.format(nobody=NOBODY), kind]
        with subprocess.Popen(
            command, env=environment, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            own = Path(f"/proc/{child.pid}/environ").read_bytes() if os.getuid() == 0 else b"OTHER=stays"
            reader = [sys.executable, "-c", READER.format(nobody=NOBODY), str(child.pid)]
            told[kind] = subprocess.run(reader, capture_output=True, text=True, check=True).stdout
            child.stdin.close()  # type: ignore[union-attr]
        assert b"OTHER=stays" in own
        if kind == "keep":
            assert b"a-secret" not in own, "also root finds nothing there"
    assert "a-secret" in told["tell"] and "refused" not in told["tell"]
    assert [line.split(" ", 1)[1] for line in told["keep"].splitlines()] == ["refused"] * 4
