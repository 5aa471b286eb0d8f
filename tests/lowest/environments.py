"""Environments that have the lowest versions of our own dependencies that pyproject.toml allows.

What is lowest, uv resolves: of a direct dependency the lowest version that its bound, all other requirements and the wheels of
the Python version allow; of everything else the version that the running environment has, where it fits.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

import tomllib

from tests.interpreters import installed
from tests.wheel import ROOT

# PyTorch's CPU builds are in no registry that uv asks by itself. What they require, the running environment has.
_LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")
# Of the extra `dev`, what the client's unit tests need; and what they find where a notebook has it.
_FOR_TESTS = ("cryptography", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "tokenizers", "tqdm")

Versions = dict[str, str]


def requirements(*extras: str) -> list[str]:
    """Return the requirements of the client, and of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return [line for line in found if not line.startswith("interpose[")]


def normal(name: str) -> str:
    """Return a package's name in the spelling that all tools agree on."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lowest(uv: Path, required: Iterable[str], python: str, folder: Path, kept: Versions | None = None) -> Versions:
    """Return the version of each package that an environment with the lowest allowed versions has.

    Args:
        uv: the program.
        required: the direct dependencies.
        python: the version of Python.
        folder: for what uv reads and writes.
        kept: versions that everything but the direct dependencies has where it fits.
    """
    asked, left_out, resolved = (folder / name for name in ("required.in", "left-out.txt", "resolved.txt"))
    asked.write_text("\n".join(required))
    left_out.write_text("\n".join(_LEFT_OUT))
    direct = {normal(re.split(r"[\[<>=]", line, maxsplit=1)[0]) for line in required}
    # uv goes on from what its output had before.
    resolved.write_text("".join(f"{name}=={version}\n" for name, version in (kept or {}).items() if name not in direct))
    options = ["--resolution", "lowest-direct", "--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet"]
    where = ["--python-version", python, "--excludes", left_out, "--output-file", resolved]
    _run([uv, "pip", "compile", *options, *where, asked])
    found = (line.split(" ")[0].split("==") for line in resolved.read_text().splitlines())
    return {normal(name): version for name, version in found}


def install_uv(folder: Path) -> Path:
    """Install uv, which nothing else here needs, into a folder of its own; return the program."""
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "uv"])
    return folder / "bin" / "uv"


def _empty(python: Path | str, folder: Path) -> tuple[Path, list[str | Path]]:
    """Make an environment of an interpreter; return its own interpreter, and the command of pip for it."""
    _run([python, "-m", "venv", "--without-pip", folder / "venv"])
    interpreter = folder / "venv" / "bin" / "python"
    return interpreter, [sys.executable, "-m", "pip", "--python", interpreter]


def client_environment(uv: Path, python: str, wheel: Path, folder: Path) -> tuple[Path, Versions]:
    """Install the client with its lowest dependencies; return its interpreter and the versions of these.

    Args:
        uv: the program.
        python: the version of Python.
        wheel: of the client.
        folder: for the environment.
    """
    versions = lowest(uv, requirements(), python, folder)
    pins = folder / "pins.txt"
    pins.write_text(_pins(versions))
    interpreter, pip = _empty(installed()[python], folder)
    _run([*pip, "install", "--quiet", "--constraint", pins, wheel, *_FOR_TESTS])
    return interpreter, versions


def server_environment(uv: Path, folder: Path) -> tuple[Path, Versions]:
    """Make an environment like the running one, with our lowest dependencies instead; return its interpreter and these.

    It has what the lowest versions make different, and finds everything else in the running one: an engine has gigabytes.

    Args:
        uv: the program.
        folder: for the environment.
    """
    here = {normal(one.name): one.version for one in distributions()}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    resolved = lowest(uv, requirements("serve", "cpu"), version, folder, here)
    versions = {name: version for name, version in resolved.items() if here.get(name) != version}
    interpreter, pip = _empty(sys.executable, folder)
    # Unlike a path alone, `addsitedir` also follows the links of editable installs there.
    purelib = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    (purelib / "running.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pins = folder / "pins.txt"
    pins.write_text(_pins(versions))
    _run([*pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--requirement", pins])
    return interpreter, versions


def _pins(versions: Versions) -> str:
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}"
