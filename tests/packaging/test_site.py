"""The documents as a site: it builds without a warning, leads nowhere that is not there, and has a page for each error."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import interpose
from interpose.contract import errors
from tools.notebooks import page_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = dict(attrs)
        self.anchors |= {has["id"] or ""} if "id" in has else set()
        for name in ("href", "src"):
            if has.get(name):
                self.links.add(str(has[name]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def nav(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        yield from (page for value in entries.values() for page in nav(value))
    elif isinstance(entries, list):
        yield from (page for value in entries for page in nav(value))


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    known = pages(site)
    assert len(known) >= 40
    missing = []
    for path, page in known.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            file = (path.parent / target).resolve() if target else path
            wanted = known.get(file)
            if not file.exists() or (
                anchor and wanted and anchor not in wanted.anchors and not anchor.startswith("__")
            ):
                missing.append(f"{path.name}: {link}")
    assert missing == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert re.findall(r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)", text) == []
    assert re.findall(r"<link[^>]+href=\"(https?:[^\"]+)", text) == []


def test_every_page_is_in_the_menu() -> None:
    listed = sorted(nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = [*DOCS.rglob("*.md"), *(path.with_suffix(".md") for path in DOCS.rglob("*.ipynb"))]
    assert listed == sorted(str(path.relative_to(DOCS)) for path in written)


def test_a_notebook_is_a_page(site: Path) -> None:
    text = (site / "notebooks" / "first-experiment.html").read_text()
    assert "logit_lens" in text and "A first experiment" in text


def test_what_cells_gave_is_on_the_page(tmp_path: Path) -> None:
    outputs: list[dict[str, object]] = [
        {"output_type": "stream", "name": "stdout", "text": ["a < b\n", "\n", "c\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["<Picture>"], "image/png": "AAAA\n"}},
        {"output_type": "execute_result", "data": {"text/plain": ["x"], "text/html": ["<b>", "x</b>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": outputs},
    ]
    notebook = tmp_path / "one.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    assert page_of(notebook).split("\n\n") == [
        "# Title\ntext",
        "```python\n1 + 1\n```",
        "<pre><code>a &lt; b&#10;&#10;c</code></pre>",
        '<p><img alt="picture" src="data:image/png;base64,AAAA"></p>',
        '<div class="cell-output"><b>x</b></div>\n',
    ]


def test_the_cells_of_fidelity_are_a_page_of_their_own(site: Path) -> None:
    assert (site / "fidelity.html").stat().st_size < 100_000 < (site / "fidelity-cells.html").stat().st_size
    assert "Prefill, TP 1" not in (site / "fidelity.html").read_text()


def classes() -> list[str]:
    kinds = (errors.InterposeError, errors.InterposeWarning)
    return [name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, kinds)]


@pytest.mark.parametrize("name", classes())
def test_every_error_has_a_section_with_a_remedy(name: str) -> None:
    sections = re.split(r"^## ", (DOCS / "errors.md").read_text(), flags=re.M)
    (section,) = [one for one in sections if one.startswith(f"{name}\n")]
    assert len(section.splitlines()) >= 3
    kind = getattr(errors, name)
    if issubclass(kind, errors.InterposeError):
        assert kind("it failed").page == f"docs/errors.md#{name.lower()}", "the anchor of that section"
    assert f"::: interpose.contract.errors.{name}\n" in (DOCS / "api" / "errors.md").read_text() + "\n"


def test_every_public_name_is_in_the_api() -> None:
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"^::: \S+\.(\w+)$", text, re.M))
    assert set(interpose.__all__) - {"__version__"} - listed == set()
    homes = set(re.findall(r"^::: (\S+)$", text, re.M))
    assert [home for home in homes if not _there(home)] == []


def _there(home: str) -> bool:
    module, _, name = home.rpartition(".")
    return hasattr(__import__(module, fromlist=[name]), name)
