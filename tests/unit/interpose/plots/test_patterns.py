"""Attention patterns with circuitsvis where it can be imported, and as a picture of matplotlib where it cannot."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from interpose import plots
from interpose.plots.figures import Picture
from interpose.plots.patterns import Squares
from tests.unit.interpose.plots import made_up


def stand_in() -> ModuleType:
    """What circuitsvis 1.43.3 does with these arguments, but for the code that a browser runs."""
    made = ModuleType("circuitsvis.attention")

    def attention_heads(
        attention: np.ndarray,
        tokens: list[str],
        attention_head_names: list[str] | None = None,
        max_value: float | None = None,
        min_value: float | None = None,
        negative_color: str | None = None,
        positive_color: str | None = None,
        mask_upper_tri: bool | None = None,
    ) -> Any:
        text = f"{attention.tolist()} {tokens} {attention_head_names}"
        return SimpleNamespace(local_src=f"<div id='one'/><script>{text}</script>", cdn_src="https://elsewhere")

    made.attention_heads = attention_heads  # type: ignore[attr-defined]
    return made


@pytest.fixture
def circuitsvis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself if it is installed."""
    try:
        importlib.import_module("circuitsvis.attention")
    except ImportError:
        package = ModuleType("circuitsvis")
        package.attention = stand_in()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "circuitsvis", package)
        monkeypatch.setitem(sys.modules, "circuitsvis.attention", package.attention)


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "circuitsvis", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "circuitsvis.attention", None)  # type: ignore[arg-type]


def test_a_notebook_shows_the_heads_with_circuitsvis(circuitsvis: None) -> None:
    shown = made_up.found("attention", 4).plot()
    assert isinstance(shown, Squares)
    html = shown._repr_html_()
    assert "L3 H3" in html and " Eiffel" in html and "unpkg.com" not in html and "elsewhere" not in html
    assert html.startswith("<div>") and html.endswith("</div></div>"), "the package leaves its element open"
    many = made_up.found("attention", 80).plot().html
    assert many.count("L79 H") == 12 and many.count(" H63") == 8, "as many as in the picture"


def test_a_token_ends_no_script(circuitsvis: None) -> None:
    found = dataclasses.replace(made_up.found("attention", 4), tokens=("</script>", "<!--", "<|bos|>", "a", "b", "c"))
    html = found.plot().html
    assert html.count("</script>") == 1 and re.search("[\"']<!--[\"']", html) is None
    assert "<|bos|>" in html, "other texts are left as they are"


def test_a_page_is_written(circuitsvis: None, tmp_path: Path) -> None:
    page = tmp_path / "attention.html"
    made_up.found("attention", 4).plot(page)
    assert page.read_text().startswith("<!doctype html>") and "L0 H0" in page.read_text()


def test_a_picture_is_drawn_where_it_is_asked_for(circuitsvis: None, tmp_path: Path) -> None:
    found = made_up.found("attention", 4)
    assert isinstance(plots.attention(found, interactive=False), Picture)
    assert isinstance(found.plot(tmp_path / "attention.png"), Picture)


def test_without_circuitsvis_there_is_the_picture(nothing: None, tmp_path: Path) -> None:
    found = made_up.found("attention", 4)
    assert isinstance(found.plot(), Picture)
    for arguments in ({"interactive": True}, {"path": tmp_path / "attention.html"}):
        with pytest.raises(ImportError, match="need circuitsvis: pip install circuitsvis"):
            found.plot(**arguments)
    assert list(tmp_path.iterdir()) == []
