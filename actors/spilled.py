"""What Ray's failed writes leave on a node's disk is removed here.

When the object store is full, Ray writes values to the disk, several into one file. On a disk that is full it writes what fits,
fails, leaves that file behind and begins another a moment later. It never comes back to one of them: the room that they take
stays taken when the disk has been cleared of everything else, until the node ends.
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
_HEADER = struct.Struct("<3Q")  # how long the parts are that follow it


def is_whole(path: Path) -> bool:
    """Whether a file holds as many values as its name says: each begins with how long its address, metadata and bytes are.

    The format is that of `ray._private.external_storage.ExternalStorage`.
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
        folder: where they are.
        raylet: the parent of all processes that write there.
    """

    def __init__(self, folder: Path, raylet: psutil.Process) -> None:
        self._folder = folder
        self._raylet = raylet
        self._lock = threading.Lock()
        self._whole: set[str] = set()  # none of them is written to again

    def clear(self) -> int:
        """Remove the files that are not whole and that nobody writes any more; return the bytes that they had.

        Raises:
            OSError, psutil.Error: it is not known who writes what, so none is removed.
        """
        with self._lock:
            try:
                there = {entry.name for entry in os.scandir(self._folder) if _FILE.fullmatch(entry.name)}
            except FileNotFoundError:
                return 0
            self._whole &= there
            broken = self._not_whole(there - self._whole)
            if not broken:
                return 0
            # One that was whole a moment ago is no longer open. One that was not, and is not open, will never be.
            written = self._open()
            freed = 0
            for name in self._not_whole(broken):
                path = self._folder / name
                try:
                    found = path.stat()
                    if (found.st_dev, found.st_ino) not in written:
                        path.unlink()
                        freed += found.st_size
                except FileNotFoundError:
                    pass  # its values are not wanted any more
            return freed

    def _not_whole(self, names: set[str]) -> set[str]:
        broken = set()
        for name in names:
            try:
                if is_whole(self._folder / name):
                    self._whole.add(name)
                else:
                    broken.add(name)
            except FileNotFoundError:
                pass
        return broken

    def _open(self) -> set[tuple[int, int]]:
        """The device and the number of each file that one of the node's processes has open."""
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
    """The folder of the node whose raylet started this process; None if Ray does not write to a folder."""
    raylet = psutil.Process(os.getppid())
    for argument in raylet.cmdline():
        if argument.startswith(_FOLDER_ARGUMENT):
            node = ray.get_runtime_context().get_node_id()
            return SpillFolder(Path(argument.removeprefix(_FOLDER_ARGUMENT), f"{DEFAULT_OBJECT_PREFIX}_{node}"), raylet)
    return None


def make_room() -> int:
    """Remove what failed writes left on this node's disk; return the bytes that they had. Call it from an actor or a task.

    Raises:
        OSError, psutil.Error: see `SpillFolder.clear`.
    """
    folder = _of_this_node()
    return folder.clear() if folder is not None else 0


def put(value: object) -> ray.ObjectRef:
    """`ray.put`; where there is no room, once more if failed writes had taken it.

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
