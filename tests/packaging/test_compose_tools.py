"""What `make test-compose` runs with, where there may be no Docker: the commands that it finds, and what pip gets in a build."""

from __future__ import annotations

import configparser
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tomllib

from tests.compose.docker import Docker, NoDocker
from tests.compose.pip_settings import build_arguments

ROOT = Path(__file__).parents[2]


def program(folder: Path, name: str, *fails: str, prints: str = "") -> None:
    """A command that fails if its first argument is one of these."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\nfor word in {" ".join(fails)}; do test "$1" != $word || exit 1; done\necho {prints}\n')
    path.chmod(0o755)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all programs there are."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_without_docker_it_says_what_is_missing(alone: Path) -> None:
    with pytest.raises(NoDocker, match=r"there is no command `docker`\. On Debian: apt-get install docker\.io"):
        Docker()
    program(alone, "docker", "info")
    with pytest.raises(NoDocker, match="no daemon answers `docker info`"):
        Docker()
    program(alone, "docker", "buildx", prints="28.2.2")
    with pytest.raises(NoDocker, match="no `docker` here has BuildKit; its plugin is `buildx`"):
        Docker()
    program(alone, "docker", "compose")
    with pytest.raises(NoDocker, match="neither `docker compose` nor `docker-compose`"):
        Docker()


def test_either_spelling_of_compose_will_do(alone: Path) -> None:
    program(alone, "docker-compose")
    program(alone, "docker", "compose")
    assert Docker().compose == ["docker-compose"]
    program(alone, "docker")
    assert Docker().compose == [str(alone / "docker"), "compose"]


def test_what_builds_is_a_docker_with_buildkit(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker before 23 has it inside, and later ones have it as a plugin."""
    older = alone.parent / "older"
    program(alone, "docker", "buildx", prints="28.2.2")
    program(older, "docker", "buildx", prints="20.10.24")
    monkeypatch.setenv("PATH", f"{alone}:{older}")
    docker = Docker()
    assert (docker._docker, docker._builder) == (str(alone / "docker"), str(older / "docker"))


def test_pip_in_a_build_finds_what_pip_here_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, index, other = (tmp_path / name for name in ("wheels", "index/simple", "other"))
    for folder in (wheels, index, other):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    (tmp_path / "pip.conf").write_text(f"[global]\nextra-index-url = file://{index} https://example.org/simple\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CERT", "/somewhere/ca.pem")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    with build_arguments(secrets) as arguments:
        assert arguments[:4] == ["--network", "host", "--secret", "id=ca.pem,src=/somewhere/ca.pem"]
        assert f"id=pip.conf,src={secrets / 'pip.conf'}" in arguments
        assert (secrets / "pip.conf").stat().st_mode & 0o77 == 0
        written = configparser.ConfigParser()
        written.read(secrets / "pip.conf")
        settings = written["global"]
        assert settings["cert"] == "/run/secrets/ca.pem" and settings["trusted-host"].split() == ["127.0.0.1"]
        (links,) = settings["find-links"].split()
        served, remote = settings["extra-index-url"].split()
        assert remote == "https://example.org/simple"
        for url, name in ((links, "wheels"), (served, "simple")):
            assert url.startswith("http://127.0.0.1:")
            assert urllib.request.urlopen(f"{url}file", timeout=10).read().decode() == name
        for path in (f"{other}/file", f"{wheels}/../other/file", "/etc/passwd", "/"):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(links.split(str(wheels))[0] + path, timeout=10)


def test_it_is_no_part_of_make_test() -> None:
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert not any("tests/compose".startswith(path) for path in pytest_options["testpaths"])
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\ntest: ")[1].split("\n\n")[0]
    assert "tests/compose" not in recipe and "tests/compose" in makefile.split("\ntest-compose: ")[1].split("\n\n")[0]
    assert "make test-compose" in makefile.split("\nhelp:")[1].split("\n\n")[0]
