"""Removes the files that Ray's failed writes leave on a node's disk.

When the object store is full, Ray writes values to the disk, several values into one file. On a full disk Ray writes as much
as fits, fails, leaves the file behind, and begins another file a moment later. Ray never writes to an abandoned file again.
The room stays taken until the node ends, even when the disk has been cleared of everything else.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import threading
from pathlib import Path

import psutil
import ray
from ray._private.ray_constants import DEFAULT_OBJECT_PREFIX

from actors.failures import FULL

_FOLDER_ARGUMENT = "--fallback_directory="
_FILE = re.compile(r"[0-9a-f]{32}-multi-(\d+)")
_HEADER = struct.Struct("<3Q")  # sizes of the three parts that follow it


def is_complete(path: Path) -> bool:
    """Whether a file holds as many values as its name says.

    Each value begins with the sizes of its address, its metadata and its bytes. The format is that of
    `ray._private.external_storage.ExternalStorage`.
    """
    end = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(int(path.name.rpartition("-")[2])):
            file.seek(end)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return False
            end += _HEADER.size + sum(_HEADER.unpack(header))
            if end > size:
                return False
    return True


class SpillFolder:
    """The files into which a node's processes write values.

    Args:
        folder: the folder of the files.
        raylet: the parent process of all processes that write there.
    """

    def __init__(self, folder: Path, raylet: psutil.Process) -> None:
        self._folder = folder
        self._raylet = raylet
        self._lock = threading.Lock()
        self._complete: set[str] = set()  # names of complete files; no process writes to them again

    def clear(self) -> int:
        """Remove incomplete files that no process writes; return the bytes that they had.

        Raises:
            OSError, psutil.Error: it is not known which process writes which file, so no file is removed.
        """
        with self._lock:
            try:
                there = {entry.name for entry in os.scandir(self._folder) if _FILE.fullmatch(entry.name)}
            except FileNotFoundError:
                return 0
            self._complete &= there
            broken = self._incomplete(there - self._complete)
            if not broken:
                return 0
            # A file that is complete is no longer open. A file that is incomplete and not open will never be complete.
            written = self._open()
            freed = 0
            for name in self._incomplete(broken):
                path = self._folder / name
                try:
                    found = path.stat()
                    if (found.st_dev, found.st_ino) not in written:
                        path.unlink()
                        freed += found.st_size
                except FileNotFoundError:
                    pass  # Ray has removed the file
            return freed

    def _incomplete(self, names: set[str]) -> set[str]:
        broken = set()
        for name in names:
            try:
                if is_complete(self._folder / name):
                    self._complete.add(name)
                else:
                    broken.add(name)
            except FileNotFoundError:
                pass
        return broken

    def _open(self) -> set[tuple[int, int]]:
        """The device and the inode number of each file that the node's processes have open."""
        found = set()
        for process in self._raylet.children(recursive=True):
            try:
                for entry in os.scandir(f"/proc/{process.pid}/fd"):
                    try:
                        file = os.stat(entry.path)
                        found.add((file.st_dev, file.st_ino))
                    except FileNotFoundError:
                        pass
            except (FileNotFoundError, PermissionError):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    raise
        return found


@functools.cache
def _of_this_node() -> SpillFolder | None:
    """Return the folder of the node whose raylet started this process.

    None if Ray does not write to a folder.
    """
    raylet = psutil.Process(os.getppid())
    for argument in raylet.cmdline():
        if argument.startswith(_FOLDER_ARGUMENT):
            node = ray.get_runtime_context().get_node_id()
            return SpillFolder(Path(argument.removeprefix(_FOLDER_ARGUMENT), f"{DEFAULT_OBJECT_PREFIX}_{node}"), raylet)
    return None


def make_room() -> int:
    """Remove the rest of failed writes on this node's disk; return the bytes freed.

    Call it from an actor or a task.

    Raises:
        OSError, psutil.Error: see `SpillFolder.clear`.
    """
    folder = _of_this_node()
    return folder.clear() if folder is not None else 0


def put(value: object) -> ray.ObjectRef:
    """Store an object with `ray.put`; on a full disk remove failed writes and try once more.

    Raises:
        ObjectStoreFullError, OutOfDiskError: there is no room.
    """
    try:
        return ray.put(value)
    except FULL:
        try:
            freed = make_room()
        except (OSError, psutil.Error):
            freed = 0
        if not freed:
            raise
    return ray.put(value)
