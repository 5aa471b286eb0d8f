"""An `async with` under every interpreter of this machine that a client may run on."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.interpreters import installed

ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio
from interpose.capture import CapturedContext

class Context(CapturedContext):
    async def run_block_async(self, block, scope):
        await asyncio.sleep(0)
        scope.assign({"x": (block.source, scope.lookup("given"))})

async def main():
    try:
        given = 1
        async with Context() as context:
            x = given
            raise ZeroDivisionError
    except ZeroDivisionError:
        raise SystemExit("the body ran")
    async with Context():
        x = given
    return x, isinstance(context, Context)

assert asyncio.run(main()) == (("x = given\\n", 1), True)
"""


@pytest.mark.parametrize("version", installed())
def test_every_supported_python(version: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [str(installed()[version]), str(script)]
    # The capture needs nothing but the standard library; the package around it imports nothing before it is used.
    result = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
