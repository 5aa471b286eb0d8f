"""What Ray's failed writes left is removed, and nothing else: the files are written by Ray's own code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray._private.external_storage import FileSystemStorage

from actors.spilled import SpillFolder, is_complete

VALUE = bytes(range(256)) * 64


class Spilling:
    """A node's folder, and a process that writes there.

    Attributes:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._storage = FileSystemStorage("node", str(folder))
        [self.folder] = folder.iterdir()
        self.cleared = SpillFolder(self.folder, psutil.Process())

    def write(self, *values: bytes | None) -> Path:
        """The file of some values, of which one that is None cannot be written."""
        before = set(self.folder.iterdir())
        refs = [SimpleNamespace(hex=lambda: "00") for _ in values]
        found = [(value, b"" if value is None else b"RAW", None) for value in values]
        self._storage._core_worker = SimpleNamespace(get_if_local=lambda refs: found)
        try:
            self._storage.spill_objects(refs, [b"127.0.0.1"] * len(refs))
        except ValueError:
            assert None in values
        [path] = set(self.folder.iterdir()) - before
        return path


@pytest.fixture
def spilling(tmp_path: Path) -> Spilling:
    return Spilling(tmp_path)


@pytest.fixture
def writer(spilling: Spilling) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A file that is half written, and the process that has it open."""
    path = spilling.write(VALUE, VALUE)
    half = path.with_name("f" * 32 + "-multi-2")
    content = path.read_bytes()
    path.unlink()
    half.write_bytes(content[: len(content) // 2])
    script = f"file = open({str(half)!r}, 'ab'); print('open', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    yield half, process
    process.kill()
    process.communicate()


def test_whole_files_stay(spilling: Spilling) -> None:
    paths = [spilling.write(VALUE), spilling.write(VALUE, b"", VALUE), spilling.write(b"")]
    assert all(is_complete(path) for path in paths)
    for _ in range(2):
        assert spilling.cleared.clear() == 0
    assert set(spilling.folder.iterdir()) == set(paths)


def test_what_failed_writes_left_goes(spilling: Spilling) -> None:
    whole = spilling.write(VALUE)
    broken = [spilling.write(VALUE, None), spilling.write(VALUE, VALUE, None), spilling.write(None)]
    cut = spilling.write(VALUE)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    assert not any(is_complete(path) for path in (*broken, cut))
    size = sum(path.stat().st_size for path in (*broken, cut))
    assert size > 3 * len(VALUE) and spilling.cleared.clear() == size
    assert list(spilling.folder.iterdir()) == [whole]
    later = spilling.write(VALUE, None)
    assert spilling.cleared.clear() > len(VALUE) and not later.exists()


def test_files_that_are_not_rays_stay(spilling: Spilling) -> None:
    for name in ("ballast", "f" * 32 + "-multi-", "f" * 31 + "-multi-1", "f" * 32 + "-multi-1.part"):
        (spilling.folder / name).touch()
    assert spilling.cleared.clear() == 0
    assert len(list(spilling.folder.iterdir())) == 4


def test_a_file_stays_while_it_is_written(spilling: Spilling, writer: tuple[Path, subprocess.Popen[str]]) -> None:
    half, process = writer
    assert not is_complete(half)
    assert spilling.cleared.clear() == 0 and half.exists()
    process.kill()
    process.wait()
    assert spilling.cleared.clear() > 0 and not half.exists()


def test_without_a_folder_there_is_nothing_to_do(spilling: Spilling) -> None:
    spilling.folder.rmdir()
    assert spilling.cleared.clear() == 0
