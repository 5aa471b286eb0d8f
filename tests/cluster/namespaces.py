"""Hosts of one private network on this machine: namespaces with addresses, processes and shared memory of their own."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# The first process of a host: it takes leave of those whose parent has gone, and all end with it.
_INIT = """
import os, time
print("ready", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""


class Network:
    """A bridge, and hosts with one interface each, whose cables can be taken out.

    Args:
        prefix: of the names that it takes on this machine, at most nine characters.
        hosts: names; the first has the address 10.99.0.1.
    """

    def __init__(self, prefix: str, hosts: Sequence[str]) -> None:
        self._prefix = prefix
        self._bridge = f"{prefix}br"
        self._inits: dict[str, tuple[subprocess.Popen[str], psutil.Process]] = {}
        self._made: list[Path] = []  # folders that hosts have something at, and this machine nothing
        self.addresses = {name: f"10.99.0.{number}" for number, name in enumerate(hosts, 1)}

    def make(self) -> None:
        """Make the network.

        Raises:
            RuntimeError: that is not allowed here.
        """
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for name, address in self.addresses.items():
                space, port = self._space(name), self._port(name)
                _ip("netns", "add", space)
                _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", port, "master", self._bridge, "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            reason = getattr(error, "stderr", "") or error
            raise RuntimeError(
                f"hosts of their own need namespaces: `ip netns` of iproute2, run as root, with CAP_SYS_ADMIN: {reason}"
            ) from None

    def remove(self) -> None:
        """End all hosts and remove the network. Idempotent."""
        for name in self.addresses:
            self.stop(name)
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
            subprocess.run(["ip", "link", "del", self._port(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        while self._made:
            with contextlib.suppress(OSError):
                self._made.pop().rmdir()

    def start(self, name: str, own: Sequence[str] = (), volumes: Mapping[Path, Path] | None = None) -> None:
        """Switch a host on.

        Args:
            own: folders that are its own, and empty, as its shared memory is.
            volumes: folders of this machine, by where the host has them, to read.
        """
        lines = [f"mount -t tmpfs tmpfs {shlex.quote(folder)}" for folder in ("/dev/shm", *own)]
        for there, here in (volumes or {}).items():
            self._make_folder(there)
            lines.append(f"mount --bind --options ro {shlex.quote(str(here))} {shlex.quote(str(there))}")
        mounts = " && ".join(lines)
        command = ["nsenter", f"--net=/run/netns/{self._space(name)}"]
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-c", _INIT]
        # In a session of its own: what interrupts a test must leave it the hosts to switch off.
        outside = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert outside.stdout is not None
        said = outside.stdout.readline()
        if said != "ready\n":
            outside.kill()
            raise RuntimeError(f"the host {name} did not start: {said}{outside.communicate()[0]}")
        [init] = psutil.Process(outside.pid).children()
        self._inits[name] = outside, init

    def stop(self, name: str) -> None:
        """Pull a host's plug: everything on it ends at once. Idempotent."""
        if name in self._inits:
            outside, init = self._inits.pop(name)
            with contextlib.suppress(psutil.NoSuchProcess):
                init.kill()
            outside.communicate(timeout=30)

    def inside(self, name: str, command: Sequence[str], folder: str = "/") -> list[str]:
        """A command as it runs on a host."""
        pid = self._inits[name][1].pid
        enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--pid", f"--wdns={folder}"]
        return [*enter, *command]

    def cut(self, name: str) -> None:
        """Take a host's cable out."""
        _ip("link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        """Put it in again."""
        _ip("link", "set", self._port(name), "up")

    def processes(self, name: str) -> list[psutil.Process]:
        """Everything that runs on a host."""
        found = []
        for number in _ip("netns", "pids", self._space(name)).split():
            try:
                found.append(psutil.Process(int(number)))
            except psutil.NoSuchProcess:
                continue
        return found

    def _make_folder(self, folder: Path) -> None:
        """Make a folder for a volume, as a place is needed to mount it at; `remove` removes what was made."""
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o755)
            self._made.append(one)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _port(self, name: str) -> str:
        return f"{self._prefix}v{list(self.addresses).index(name)}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
