"""`program.py` and `classes_program.py` under every interpreter of this machine that a client may run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PROGRAMS = ("program.py", "classes_program.py")


def interpreters() -> dict[str, str]:
    """One interpreter for each version that is installed: this one, those on PATH, and pyenv's."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {here: sys.executable}
    roots = [os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"]
    for version in VERSIONS:
        candidates = [shutil.which(f"python{version}")]
        for root in filter(None, roots):
            candidates += sorted(str(path) for path in Path(root).glob(f"versions/{version}.*/bin/python"))
        for candidate in filter(None, candidates):
            if version not in found and _reports(candidate) == version:  # a pyenv shim may stand for nothing
                found[version] = candidate
    return found


def _reports(python: str) -> str:
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@pytest.mark.parametrize(("version", "python"), sorted(interpreters().items()))
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [(), ("-O",), ("-X", "no_debug_ranges")], ids=["plain", "optimised", "no-columns"])
def test_captures_everywhere(version: str, python: str, options: tuple[str, ...], program: str) -> None:
    # Under -O the asserts are gone: it shows that sources are still recognised and that nothing raises.
    path = Path(__file__).with_name(program)
    done = subprocess.run([python, *options, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"Python {version}:\n{done.stdout}{done.stderr}"
    assert done.stdout.strip() == "ok"


@pytest.mark.parametrize(("version", "python"), sorted(interpreters().items()))
def test_text_on_the_command_line(version: str, python: str) -> None:
    """Where the interpreter keeps the text of ``-c`` it is captured, elsewhere refused with the reason."""
    text = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from interpose.capture import CapturedContext, CaptureError\n"
        "class Trace(CapturedContext):\n"
        "    def run_block(self, block, scope): print('captured', block.writes)\n"
        "try:\n"
        "    with Trace():\n"
        "        x = 1\n"
        "except CaptureError as error:\n"
        "    print('refused', error)\n"
    )
    done = subprocess.run([python, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if version == "3.13":
        assert done.stdout.strip() == "captured ('x',)"
    else:
        assert "source of this block cannot be found" in done.stdout
