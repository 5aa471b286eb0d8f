"""Hooks of the documents' site: pages of long tables, and of notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tools.notebooks import page_of

FIDELITY, CELLS = "fidelity.md", "fidelity-cells.md"
# Where the summary ends and a table for each phase and layout begins.
_FIRST_CELLS = "\n## Prefill, TP 1\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the cells, and the pages of notebooks."""
    _, cells = parted((Path(config.docs_dir) / FIDELITY).read_text())
    head = "---\nsearch: {exclude: true}\n---\n# Fidelity: every cell"
    text = f"{head}\n\n[Fidelity]({FIDELITY}) says what is measured.\n{cells}"
    files.append(File.generated(config, CELLS, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    for notebook in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        page = notebook.relative_to(config.docs_dir).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=page_of(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **more: Any) -> str:
    """Leave the cells out of the page of fidelity."""
    if page.file.src_uri != FIDELITY:
        return markdown
    summary, _ = parted(markdown)
    return f"{summary}\n\n[Every cell]({CELLS}): each location of each architecture in each layout.\n"


def parted(text: str) -> tuple[str, str]:
    """Return the summary of the page of fidelity, and its cells.

    Raises:
        ValueError: the page has no such heading any more.
    """
    summary, heading, cells = text.partition(_FIRST_CELLS)
    if not heading:
        raise ValueError(f"{FIDELITY} has no heading {_FIRST_CELLS.strip()!r}: change tools/site.py")
    return summary, heading + cells
