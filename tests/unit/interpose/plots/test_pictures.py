"""Pictures fit a page for few layers and for many, say what their axes are, and are written as their suffix says."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import interpose
from interpose import plots
from interpose.plots.patterns import mosaic, spread
from tests.unit.interpose.plots import made_up

KINDS = "attention attribution head_ablation lens monitor patch_sweep probe probe_scores sae steer".split()
UNLABELLED = {"steer": 1}  # parts of a picture that are text
SLACK = 0.03  # inches
SECONDS = 60.0  # what took longest before took more than 200 where nothing else ran


def check(figure: Any, kind: str) -> None:
    """Assert that a figure is of a size for a page, labelled, with nothing outside it, and its caption right below the rest."""
    width, height = figure.get_size_inches()
    assert 3 < width <= 13
    assert 2 < height <= 12
    renderer = figure.canvas.get_renderer()
    tight = figure.get_tightbbox(renderer)
    assert tight.x0 >= -SLACK and tight.y0 >= -SLACK, tight
    assert tight.x1 <= width + SLACK and tight.y1 <= height + SLACK, (tight, width, height)
    caption = figure._supxlabel.get_window_extent(renderer)
    boxes = [axis.get_tightbbox(renderer) for axis in figure.axes]
    lowest = min(box.y0 for box in boxes)
    assert -SLACK * figure.dpi <= lowest - caption.y1 < 0.5 * figure.dpi, "the caption is right below"
    for one, other in combinations(boxes, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        along = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, along) <= SLACK * figure.dpi, "two parts of the picture overlap"
    unlabelled = [axis for axis in figure.axes if not (axis.get_xlabel() or axis.get_ylabel())]
    assert len(unlabelled) == UNLABELLED.get(kind, 0)


@pytest.mark.parametrize("layers", [4, 30, 80])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_fits(kind: str, layers: int, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    start = time.monotonic()
    figure = made_up.found(kind, layers).plot(picture)
    assert time.monotonic() - start < SECONDS
    assert picture.read_bytes().startswith(b"\x89PNG")
    check(figure, kind)


@pytest.mark.parametrize("layers", [4, 80])
@pytest.mark.parametrize("kind", ["patch_sweep", "attention", "lens", "sae"])
def test_a_long_prompt_fits(kind: str, layers: int, tmp_path: Path) -> None:
    check(made_up.found(kind, layers, tokens=60).plot(tmp_path / "picture.png"), kind)


@pytest.mark.parametrize("layers", [4, 30, 80])
def test_two_lenses_fit(layers: int, tmp_path: Path) -> None:
    panels = {title: made_up.found("lens", layers) for title in ("as it is", "without the MLP of layer 11")}
    check(plots.lenses(panels, tmp_path / "picture.png"), "lens")


@pytest.mark.parametrize("kind", ["attribution", "probe", "steer"])
def test_repeats_have_error_bars(kind: str, tmp_path: Path) -> None:
    from matplotlib.container import ErrorbarContainer

    figure = made_up.found(kind, 30, repeats=4).plot(tmp_path / "picture.png")
    check(figure, kind)
    bars = [one for axis in figure.axes for one in axis.containers if isinstance(one, ErrorbarContainer)]
    assert bars and all(one.has_yerr for one in bars)
    assert "standard error" in figure._supxlabel.get_text().replace("\n", " ")


def test_the_suffix_says_the_format(tmp_path: Path) -> None:
    found = made_up.found("patch_sweep", 4)
    for suffix, begin in ((".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", b"\x89PNG")):
        found.plot(tmp_path / f"picture{suffix}")
        assert (tmp_path / f"picture{suffix}").read_bytes().startswith(begin)
    with pytest.raises(interpose.InvalidArgument, match=r"\.png, \.svg, \.pdf"):
        found.plot(tmp_path / "picture.bmp")


def test_a_notebook_shows_the_figure_and_no_window_opens() -> None:
    code = (
        "import sys; from tests.unit.interpose.plots import made_up\n"
        "figure = made_up.found('lens', 4).plot(); print(figure._repr_png_()[1:4], 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "b'PNG' False"


def test_without_matplotlib_the_error_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from interpose import plots, verbs; from tests.unit.interpose.plots import made_up\n"
        "try: made_up.found('lens', 4).plot()\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "pictures need matplotlib: pip install 'interpose[plots]'"


def test_heads_and_layers_are_spread_evenly() -> None:
    assert spread(4, 8) == [0, 1, 2, 3]
    shown = spread(80, 8)
    assert (len(shown), shown[0], shown[-1]) == (8, 0, 79)
    patterns = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    squares = mosaic(patterns)
    assert squares.shape == (5, 8)
    assert squares[3:5, 6:8].tolist() == patterns[1, 2].tolist()
    assert np.isnan(squares[2]).all()


def test_the_text_of_a_result_is_short() -> None:
    text = repr(made_up.found("lens", 80, tokens=60))
    assert "ids=int64[80, 60]" in text and len(text) < 700
