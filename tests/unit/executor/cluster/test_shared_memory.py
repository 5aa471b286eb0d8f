"""Files in shared memory outlive their processes; files of killed processes are removed, and no others."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from executor.cluster.shared_memory import SHARED_MEMORY
from serve_app.shared_memory import SharedFiles

_MAP = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
if sys.stdin.readline():
    mapped.close()
    print("closed", flush=True)
sys.stdin.read()
"""


class User:
    """A process that has mapped a file."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", _MAP, str(file)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = psutil.Process(self._popen.pid)
        assert self._said() == "mapped\n"

    def _said(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def close(self) -> None:
        """Have it give the file up, and live."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()
        assert self._said() == "closed\n"

    def kill(self) -> None:
        """Kill it; nobody takes leave of it."""
        self.process.kill()
        while self.process.status() != psutil.STATUS_ZOMBIE:
            pass

    def bury(self) -> None:
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture
def file() -> Iterator[Path]:
    path = SHARED_MEMORY / f"interpose-test-{secrets.token_hex(4)}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def user(file: Path) -> Iterator[Callable[[], User]]:
    users: list[User] = []

    def start() -> User:
        users.append(User(file))
        return users[-1]

    yield start
    for one in users:
        one.bury()


def test_what_only_dead_ones_have_used_goes(file: Path, user: Callable[[], User]) -> None:
    shared, one = SharedFiles(), user()
    shared.look_after({one.process})
    one.kill()
    assert file.exists()
    shared.look_after({one.process})  # it is still an entry for its parent
    assert not file.exists()


def test_what_a_living_one_has_used_stays(file: Path, user: Callable[[], User]) -> None:
    """It may open it again, or tell another one of it."""
    shared, one, other = SharedFiles(), user(), user()
    shared.look_after({one.process, other.process})
    other.close()
    one.kill()
    shared.look_after({other.process})
    assert file.exists()
    other.kill()
    shared.look_after(set())
    assert not file.exists()


def test_in_the_end_all_go(file: Path, user: Callable[[], User]) -> None:
    shared, one = SharedFiles(), user()
    shared.look_after({one.process})
    shared.remove()
    assert not file.exists()
    shared.remove()
