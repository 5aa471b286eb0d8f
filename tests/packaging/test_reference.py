"""The reference pages are as their program writes them, and say something of every setting and flag."""

from __future__ import annotations

import pytest

from serve_app.settings import Settings
from serve_app.settings_model import Limits, ModelSettings
from tools.reference.__main__ import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `python -m tools.reference`"


def test_every_setting_has_a_row() -> None:
    page = PAGES["settings.md"]()
    names = [*Settings.model_fields, *ModelSettings.model_fields, *Limits.model_fields]
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert "| `stored_bytes` | integer, ≥ 1 MiB | 16 GiB |" in page
    assert "`PACK` or `SPREAD`" in page and "| `port` | integer, ≥ 1, ≤ 65,535 | 9000 |" in page


def test_every_command_has_a_section() -> None:
    page = PAGES["commands.md"]()
    assert "### `interpose keys revoke`" in page and "### `interpose doctor`" in page
    assert "| `--tensor-parallel-size N`, `-tp N` |" in page
