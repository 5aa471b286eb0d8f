"""Blocks in the cells of IPython's own shell, which is what a notebook's kernel runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """\
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for number, cell in enumerate(sys.argv[1:]):
    print("cell", number)
    shell.run_cell(cell, store_history=True)
"""
IMPORT = "from tests.pythons.fileless_lib import CaptureError, Trace, sources"


def run(tmp_path: Path, *cells: str) -> list[list[str]]:
    """Return what each cell printed about blocks, as `fileless_lib` prints it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN, IMPORT, *cells]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed: list[list[str]] = []
    for line in done.stdout.splitlines():
        if line.startswith("cell "):
            printed.append([])
        elif line.startswith(("captured ", "refused ", "source ")):
            printed[-1].append(line)
    assert len(printed) == len(cells) + 1, done.stdout + done.stderr
    return printed[1:]


def test_several_blocks_in_a_cell(tmp_path: Path) -> None:
    blocks, loop, two, awaited = run(
        tmp_path,
        "with Trace() as t:\n    x = 1  # one\n\n    y = '''a\n  b'''\nwith Trace(): z = 3",
        "for i in range(2):\n    with Trace():\n        q = i",
        "with Trace() as t, Trace():\n    a = 1",
        "import asyncio\nawait asyncio.sleep(0)\nwith Trace():\n    b = i",
    )
    assert blocks == ["captured \"    x = 1  # one\\n\\n    y = '''a\\n  b'''\\n\" 2 {}", "captured 'z = 3\\n' 6 {}"]
    assert loop == ["captured 'q = i\\n' 3 {'i': 0}", "captured 'q = i\\n' 3 {'i': 1}"]
    assert [line.partition(" {")[0] for line in two] == ["captured 'with Trace():\\n    a = 1\\n' 1"]
    assert awaited == ["captured 'b = i\\n' 4 {'i': 1}"]


def test_what_earlier_cells_defined(tmp_path: Path) -> None:
    """A cell that is run again with another text has another function, and the older one keeps its own."""
    *_, both, again, classes = run(
        tmp_path,
        "def f(a):\n    with Trace():\n        z = a",
        "class Probe:\n    rank = 2",
        "older = f",
        "def f(a):\n    with Trace():\n        z = -a",
        "class Probe:\n    rank = 3",
        "f(3)\nolder(4)\nsources(f, older)",
        "%time f(5)\n!true\nf(6)",
        "sources(Probe)",
    )
    assert both == [
        "captured 'z = -a\\n' 3 {'a': 3}",
        "captured 'z = a\\n' 3 {'a': 4}",
        "source 'def f(a):\\n    with Trace():\\n        z = -a\\n'",
        "source 'def f(a):\\n    with Trace():\\n        z = a\\n'",
    ]
    assert again == ["captured 'z = -a\\n' 3 {'a': 5}", "captured 'z = -a\\n' 3 {'a': 6}"]
    assert classes == ["source 'class Probe:\\n    rank = 3\\n'"]


def test_a_cell_whose_text_ipython_does_not_keep(tmp_path: Path) -> None:
    [[refused]] = run(tmp_path, "%%time\nwith Trace():\n    x = 1")
    assert refused.startswith("refused 1 the source of this block cannot be found") and "under %%time" in refused
