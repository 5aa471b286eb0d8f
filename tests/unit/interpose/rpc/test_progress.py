"""Progress bars: for what takes long, drawn by tqdm, and none where nobody wants them."""

from __future__ import annotations

import sys
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

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
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress.Progress(True).tokens("generating", 3) as bar:
        bar.update(1)
    assert not capsys.readouterr().err


class Drawn:
    """Stands where tqdm stands; counts the bars that are there at the same time."""

    now, most, ended = 0, 0, []

    def __init__(self, **options):
        self.n, self.what = 0, options["desc"]
        Drawn.now += 1
        Drawn.most = max(Drawn.most, Drawn.now)

    def update(self, n):
        before = self.n
        time.sleep(0.0001)
        self.n = before + n  # loses what another thread adds meanwhile

    def close(self):
        Drawn.now -= 1
        Drawn.ended.append((self.what, self.n))


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.setattr(progress, "_tqdm", lambda: Drawn)
    monkeypatch.setattr(Drawn, "most", 0)
    monkeypatch.setattr(Drawn, "ended", [])


def test_a_trace_has_one_bar_at_a_time(service, drawn):
    big = numbers(5000)

    def script(service, trace):
        yield from finish(service, trace)
        yield service.saves(0, x=big)

    service.script = script
    with interpose.connect(service.address) as client, client.model().trace("x", max_tokens=3):
        x = big.sum()
    assert Drawn.most == 1 and Drawn.ended == [("uploading", 20000), ("generating", 1), ("fetching", 20000)], x


def test_threads_lose_no_progress(drawn):
    with progress.Progress(True).bytes("fetching", 100) as bar, ThreadPoolExecutor(8) as pool:
        list(pool.map(bar.update, [1] * 100))
    assert Drawn.ended == [("fetching", 100)]
    bar.update(1)  # of a thread that is late
    assert Drawn.now == 0


def test_text_of_a_block_does_not_go_into_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    with progress.Progress(True).tokens("generating", 3) as bar:
        bar.update(1)
        progress.write("a line\n")
    said = capsys.readouterr()
    assert said.out == "a line\n" and said.err.count("generating") >= 2, "drawn again after the text"


def test_a_notebook_without_widgets_gets_no_warning(monkeypatch):
    page = types.SimpleNamespace(get_ipython=lambda: type("ZMQInteractiveShell", (), {})())
    monkeypatch.setitem(sys.modules, "IPython", page)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with progress.Progress(True).tokens("generating", 3) as bar:
            bar.update(1)
