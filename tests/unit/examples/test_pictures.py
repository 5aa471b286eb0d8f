"""The examples' pictures fit a page for few layers and for many: nothing is cut off or drawn over, and they take seconds."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.unit.examples import made_up

EXAMPLES = Path(__file__).parents[3] / "examples"
DRAWN = "activation_patching attention attribution head_ablation logit_lens probe sae steering stream_monitor".split()
SLACK = 0.03  # inches
SECONDS = 60.0  # what took longest before took more than 200 where nothing else ran


@pytest.fixture(params=DRAWN)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The figures that were saved, still open."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pictures = importlib.import_module("pictures")
    figures: list[Any] = []
    close = pictures.plt.close
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)


def check(figure: Any) -> None:
    """Assert that a saved figure is of a size for a page, with nothing outside it, and its caption right below the rest."""
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
    assert 0 <= lowest - caption.y1 < 0.5 * figure.dpi, "the caption is right below"
    for one, other in combinations(boxes, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        along = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, along) <= SLACK * figure.dpi, "two parts of the picture overlap"


@pytest.mark.parametrize("layers", [4, 30, 80])
def test_a_picture_fits(example: Any, layers: int, drawn: list[Any], tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    start = time.monotonic()
    example.draw(made_up.model(layers), made_up.found(example, layers), picture)
    assert time.monotonic() - start < SECONDS
    assert picture.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    check(figure)


@pytest.mark.parametrize("layers", [4, 80])
@pytest.mark.parametrize("example", ["activation_patching", "attention", "logit_lens", "sae"], indirect=True)
def test_a_long_prompt_fits(example: Any, layers: int, drawn: list[Any], tmp_path: Path) -> None:
    example.draw(made_up.model(layers), made_up.found(example, layers, tokens=60), tmp_path / "picture.png")
    check(drawn[0])


@pytest.mark.parametrize("layers", [4, 30, 80])
@pytest.mark.parametrize("example", ["logit_lens"], indirect=True)
def test_two_lenses_fit(example: Any, layers: int, drawn: list[Any], tmp_path: Path) -> None:
    panels = {title: made_up.found(example, layers) for title in ("as it is", "without the MLP of layer 11")}
    model = made_up.model(layers)
    example.draw_panels(panels, lambda token: model.tokenizer.decode([token]), tmp_path / "picture.png")
    check(drawn[0])
