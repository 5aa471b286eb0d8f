"""Progress bars: for what takes long, drawn by tqdm, and none where nobody wants them."""

from __future__ import annotations

import sys

import pytest

import interpose
from interpose.rpc import progress
from tests.unit.interpose.conftest import finish, numbers


@pytest.mark.parametrize("wanted", [True, False])
def test_transfers_and_generations(service, wanted, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    big = numbers(5000)

    def script(service, trace):
        yield from finish(service, trace)
        yield service.saves(0, x=big)

    service.script = script
    with interpose.connect(service.address, progress=wanted) as client:
        with client.model().trace("x", max_tokens=3):
            x = big.sum()
    said = capsys.readouterr().err
    for what in ("uploading", "generating", "fetching"):
        assert (what in said) is wanted, said
    assert len(x) == 5000


def test_what_is_quick_shows_nothing(service, capsys):
    with interpose.connect(service.address) as client, client.model().trace("x"):
        pass
    assert not capsys.readouterr().err


def test_without_tqdm_there_is_none(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with progress.Progress(True).tokens("generating", 3) as bar:
        bar.update(1)
    assert not capsys.readouterr().err
