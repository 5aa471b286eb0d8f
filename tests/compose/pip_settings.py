"""How pip here finds packages, handed to a build as secrets: nothing of it is in the image or in the repository."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Options whose values are places: URLs, or paths on this machine.
_PLACES = ("find-links", "index-url", "extra-index-url", "constraint")
_IN_THE_BUILD = "/run/secrets/ca.pem"
_LINE = re.compile(r"^(?::env:|global|install)\.(\S+?)='(.*)'$", re.MULTILINE)


class _Folders(http.server.SimpleHTTPRequestHandler):
    """Serves the files below some folders by their whole path, and nothing else."""

    def __init__(self, *args: object, folders: set[Path]) -> None:
        self._folders = folders
        super().__init__(*args, directory="/")  # type: ignore[arg-type]

    def translate_path(self, path: str) -> str:
        real = Path(super().translate_path(path)).resolve()
        return str(real) if any(real.is_relative_to(folder) for folder in self._folders) else "/nowhere"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def build_arguments(folder: Path) -> Iterator[list[str]]:
    """Arguments of `docker build` that give pip there the configuration of pip here, files and environment.

    The build has this machine's network. Folders of packages are served on its loopback interface while the context lasts.

    Args:
        folder: an empty one, for the secrets' files.
    """
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings: dict[str, str] = {}
    for name, value in reversed(_LINE.findall(shown.stdout)):  # the environment is shown first, and counts most
        settings[name] = value.replace("\\n", " ")
    folders: set[Path] = set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Folders, folders=folders))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        for option in set(settings) & set(_PLACES):
            places = []
            for word in settings[option].split():
                path = _path(word)
                if path:
                    # The pages of an index refer to files beside it.
                    folders.add(path.parent if option.endswith("index-url") or path.is_file() else path)
                    word = f"http://127.0.0.1:{server.server_address[1]}{path}{'/' if path.is_dir() else ''}"
                places.append(word)
            settings[option] = "\n    ".join(places)
        if folders:
            settings["trusted-host"] = f"{settings.get('trusted-host', '')}\n    127.0.0.1"
        arguments = ["--network", "host"]
        if "cert" in settings:
            arguments += ["--secret", f"id=ca.pem,src={settings['cert']}"]
            settings["cert"] = _IN_THE_BUILD
        configuration = folder / "pip.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        arguments += ["--secret", f"id=pip.conf,src={configuration}"]
        if {"find-links", "extra-index-url"} & set(settings):
            arguments += ["--build-arg", "PIP_ARGS="]  # where to find PyTorch's wheels is known here
        yield arguments
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _path(word: str) -> Path | None:
    """The file or folder on this machine that is meant, if one is."""
    parts = urlsplit(word)
    return Path(unquote(parts.path)).resolve() if parts.scheme in ("", "file") else None
