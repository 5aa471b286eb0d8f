"""The public images that ours starts from. Where no registry answers, Debian's packages make images that stand in for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.compose.docker import ROOT, Docker, NoDocker, run

# What the public image of Python has and Debian's smallest system has not.
_PACKAGES = "ca-certificates,netbase,python3,python3-pip,python3-venv,tzdata"
_UNNEEDED = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
)
# As in the public image: apt keeps no archives and no index in a form of its own.
_NO_CACHE = """\
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
"""
_MIRROR = "http://deb.debian.org/debian"


def make_available(docker: Docker, folder: Path) -> dict[str, str]:
    """Have the daemon have the images that the Dockerfile and docker-compose.yml name.

    Returns:
        for each name, what it is: "local", "pulled" or "made here from Debian's packages".

    Raises:
        NoDocker: an image can neither be pulled nor made.
    """
    (python,) = re.findall(r"^FROM (python:\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (version,) = re.findall(r"^ARG PYTHON=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    makers = {python.replace("${PYTHON}", version): _python, compose["services"]["token"]["image"]: _busybox}
    origins = {}
    for name, make in makers.items():
        if docker.has_image(name):
            origins[name] = "local"
        elif docker.pull(name):
            origins[name] = "pulled"
        else:
            make(docker, name, folder)
            origins[name] = "made here from Debian's packages"
    return origins


def _needs(program: str, package: str, name: str) -> str:
    path = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if path is None:
        raise NoDocker(
            f"{name} cannot be pulled, and without {program} it cannot be made here: apt-get install {package}"
        )
    return path


def _import(docker: Docker, root: Path, name: str) -> None:
    archive = root.with_suffix(".tar")
    run("tar", "--create", f"--file={archive}", f"--directory={root}", "--one-file-system", ".")
    docker("import", "--change", 'CMD ["sh"]', str(archive), name)
    archive.unlink()


def _python(docker: Docker, name: str, folder: Path) -> None:
    """Debian's smallest system with its Python, whose commands have the names that the public image gives them."""
    debootstrap = _needs("debootstrap", "debootstrap", name)
    release = name.rsplit("-", 1)[1]
    root = folder / "python"
    command = [debootstrap, "--variant=minbase", f"--include={_PACKAGES}", release, str(root), _MIRROR]
    try:
        run(*command, seconds=1800)
        for path in _UNNEEDED:
            shutil.rmtree(root / path, ignore_errors=True)
        for path in (root / "usr" / "local" / "bin", root / "var" / "lib" / "apt" / "lists" / "partial"):
            path.mkdir(parents=True, exist_ok=True)
        (root / "etc" / "apt" / "apt.conf.d" / "docker-clean").write_text(_NO_CACHE)
        for command_name in ("python", "python3"):
            (root / "usr" / "local" / "bin" / command_name).symlink_to("/usr/bin/python3")
        _import(docker, root, name)
    finally:
        # An interrupted debootstrap leaves /proc mounted in it.
        if os.path.ismount(root / "proc"):
            subprocess.run(["umount", str(root / "proc")], capture_output=True, check=True)
        shutil.rmtree(root, ignore_errors=True)


def _busybox(docker: Docker, name: str, folder: Path) -> None:
    program = _needs("busybox", "busybox-static", name)
    root = folder / "busybox"
    (root / "bin").mkdir(parents=True)
    shutil.copy(program, root / "bin" / "busybox")
    for command in run(program, "--list").split():
        if command != "busybox":
            (root / "bin" / command).symlink_to("busybox")
    _import(docker, root, name)
    shutil.rmtree(root)
